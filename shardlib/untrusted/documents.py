"""Plain data from a JSON or TOML file of a stranger.

A document is read within limits that no honest one comes near, and what comes out is plain: text is
UTF-8, numbers are finite, no key is there twice, nothing is nested deeper than `Limits.depth`.
Whatever is wrong is one error of the kind that the caller names.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardlib.errors import MissingFileError, ShardlibError
from shardlib.untrusted.json_types import Json, JsonObject
from shardlib.untrusted.shown import fit, printable, shown


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a document may be.

    Attributes:
        bytes: of its text.
        depth: objects and lists in each other.
        magnitude: of its numbers.
    """

    bytes: int = 1 << 28
    depth: int = 64
    magnitude: float = 1e300


#: Of JSON: plans and indexes of large models have tens of megabytes.
LIMITS = Limits()
#: Of TOML, which people write by hand, and whose reader in Python is slow.
TOML_LIMITS = Limits(bytes=1 << 18)
#: Dots in a line of TOML: what the reader of the standard library takes in time and memory grows
#: with the square of the parts of a key.
TOML_DOTS = 200


class _Refused(ValueError):
    """What a document holds and may not hold, as the end of a message."""


def read_regular(path: str | Path, limit: int = -1) -> bytes:
    """The bytes of a regular file, as many as `limit` says; of a pipe, a device or a socket, which
    may have no end or nothing at all, nothing is read.

    Args:
        limit: bytes; -1 for all.
    """
    with open(
        path, "rb", opener=lambda file, flags: os.open(file, flags | getattr(os, "O_NONBLOCK", 0))
    ) as stream:  # a pipe must not stop us
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file that can be read", str(path))
        return stream.read(limit)


def read_bytes(
    path: str | Path, what: str, error: type[ShardlibError], *, limit: int, hint: str = ""
) -> bytes:
    """The bytes of a file.

    Args:
        limit: bytes that it may have.
    """
    name, after = shown(str(path), 300), f"\nTry: {hint}" if hint else ""
    try:
        data = read_regular(path, limit + 1)
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise MissingFileError(
            f"{what} {name} is not there (looked in {Path.cwd()}){after}"
        ) from missing
    except (OSError, ValueError) as failure:  # a name that no file can have is a ValueError
        reason = (
            failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
        )
        raise error(f"{what} {name} cannot be read: {reason}{after}") from failure
    if len(data) > limit:
        raise error(f"{what} {name} has more than {limit:,} bytes, which none can have")
    return data


def read_json(
    path: str | Path,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = LIMITS,
    hint: str = "",
) -> Json:
    """The plain data of a JSON file; see `read_bytes` and `parse_json`.

    Args:
        limits: bytes and depth that it may have.
    """
    data = read_bytes(path, what, error, limit=limits.bytes, hint=hint)
    return parse_json(data, _file(what, path), error, limits=limits)


def read_toml(
    path: str | Path,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = TOML_LIMITS,
    hint: str = "",
) -> JsonObject:
    """The plain data of a TOML file; arguments and errors as those of `read_json`."""
    data = read_bytes(path, what, error, limit=limits.bytes, hint=hint)
    return parse_toml(data, _file(what, path), error, limits=limits)


def _file(what: str, path: str | Path) -> str:
    """What messages call a file."""
    return f"{what} {shown(str(path), 300)}"


def parse_json(
    text: str | bytes,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = LIMITS,
    hint: str = "",
) -> Json:
    """The plain data of a JSON text.

    Args:
        text: as text, or as bytes of UTF-8.
    """
    after = f"\nTry: {hint}" if hint else ""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error(f"{what} is no JSON: it is {type(text).__name__} and no text{after}")
    return _parsed(text, f"{what} is no JSON", error, limits, _json, after)


def parse_toml(
    text: str | bytes, what: str, error: type[ShardlibError], *, limits: Limits = TOML_LIMITS
) -> JsonObject:
    """The plain data of a TOML text; arguments and errors as those of `parse_json`. Dates and times
    are not plain.
    """
    return _parsed(text, f"{what} is no TOML", error, limits, _toml)


def _toml(text: str) -> JsonObject:
    if any(line.count(".") > TOML_DOTS for line in text.split("\n")):
        raise _Refused(f"a line has more than {TOML_DOTS} dots")
    return tomllib.loads(text)


def _parsed(
    text: str | bytes,
    failed: str,
    error: type[ShardlibError],
    limits: Limits,
    parse: Callable[[str], Any],
    after: str = "",
) -> Any:
    try:
        if len(text) > limits.bytes:
            raise _Refused(f"it has more than {limits.bytes:,} bytes")
        value = parse(text.decode("utf-8") if isinstance(text, bytes) else text)
        _check(value, limits)
    except UnicodeDecodeError as wrong:
        raise error(
            f"{failed}: its bytes are no UTF-8 ({wrong.reason} at byte {wrong.start}){after}"
        ) from wrong
    except RecursionError as wrong:
        raise error(f"{failed}: it is nested deeper than {limits.depth} levels{after}") from wrong
    except ValueError as wrong:
        raise error(f"{failed}: {fit(printable(str(wrong)), 300)}{after}") from wrong
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as wrong:
        remainder = text[wrong.pos : wrong.pos + 24]
        raise _Refused(
            f"{wrong.msg.removesuffix(' at')} at line {wrong.lineno}, column {wrong.colno}, where"
            f" {f'{remainder!r} stands' if remainder else 'the text ends'}"
        ) from wrong


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"the key {shown(twice)} is there twice")
    return table


def _constant(word: str) -> Any:
    raise _Refused(f"{word} is no finite number")


def _check(root: Any, limits: Limits) -> None:
    """Looks at every value, without recursion."""
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict | list):
            if depth >= limits.depth:
                raise _Refused(f"it is nested deeper than {limits.depth} levels")
            if isinstance(value, dict):
                table = cast("dict[str, Any]", value)
                for key in table:
                    _check_text(key)
                waiting += [(item, depth + 1) for item in table.values()]
            else:
                waiting += [(item, depth + 1) for item in cast("list[Any]", value)]
        elif isinstance(value, int | float) and not -limits.magnitude <= value <= limits.magnitude:
            raise _Refused(
                f"{shown(value)} is "
                + (
                    "no finite number"
                    if isinstance(value, float) and not math.isfinite(value)
                    else "too large a number"
                )
            )
        elif value is not None and not isinstance(value, int | float):
            raise _Refused(f"{shown(value)} is a {type(value).__name__}, which nothing here takes")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _Refused(f"{shown(text)} is half of a character, and no text") from None
