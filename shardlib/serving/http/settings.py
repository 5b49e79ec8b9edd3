"""What whoever starts the server may change."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from shardlib.errors import ArgumentError, MissingFileError, raise_all

#: Bytes of a file of tokens, and characters of one of them.
TOKEN_FILE_BYTES, TOKEN_LENGTH = 1 << 16, 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of the server.

    Attributes:
        tokens: bearer tokens, of which every request needs one; empty for none.
        waiting: requests of a model that wait for a slot at most; those above are answered 429.
        buffer: tokens that an answer may be ahead of its reader.
        choices: answers that one request may ask for.
        body_bytes: of a request.
        body_seconds: in which it has come in.
        head_seconds: in which its head has come in.
        send_seconds: that one piece of an answer may wait for its reader.
        drain_seconds: that answers have to end in when the server is to stop.
        refresh_seconds: between two looks for newer weights.
        connections: at a time, of those that have shown a token.
        strangers: connections at a time of those that have not.
        strangers_per_address: of one address.
        answer_seconds: after which an answer ends with what it has; None for as long as it takes.

    Raises:
        ArgumentError: figures that are not above 0.
    """

    tokens: tuple[str, ...] = ()
    waiting: int = 64
    buffer: int = 1024
    choices: int = 16
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    send_seconds: float = 60.0
    drain_seconds: float = 60.0
    refresh_seconds: float = 10.0
    connections: int = 1024
    strangers: int = 512
    strangers_per_address: int = 128
    answer_seconds: float | None = None

    def __post_init__(self) -> None:
        failures = [
            f"{field.name} is {value!r}; it is a number above 0"
            for field in fields(self)
            if field.name not in ("tokens", "waiting")
            if (value := getattr(self, field.name)) is not None
            if not (value > 0 and math.isfinite(value))
        ]
        if self.waiting < 0:
            failures.append(f"waiting is {self.waiting!r}; it is a whole number from 0 on")
        if failures:
            raise_all(ArgumentError, "the server cannot run so", failures)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Bearer tokens from a file, one a line."""
    try:
        with path.open("rb") as file:
            text = file.read(TOKEN_FILE_BYTES + 1).decode("ascii")
    except OSError as error:
        raise MissingFileError(f"the tokens in {path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} holds other characters than those of ASCII") from error
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens or len(text) > TOKEN_FILE_BYTES:
        raise ArgumentError(f"{path} holds no tokens, or too many\nTry: one a line")
    if short := [number for number, token in enumerate(tokens, 1) if len(token) < TOKEN_LENGTH]:
        raise ArgumentError(
            f"token {short[0]} of {path} has fewer than {TOKEN_LENGTH} characters\nTry: python -c"
            " 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens
