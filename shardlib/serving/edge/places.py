"""Where stages listen, and the secret that they know."""

from __future__ import annotations

import socket
from pathlib import Path

from shardlib.errors import ArgumentError, LaunchError, MissingFileError

#: Characters of a secret at most.
SECRET_LENGTH = 1 << 12


def read_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of a text."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ArgumentError(f"{option} is {text!r}\nTry: 127.0.0.1:7000")
    return host, int(port)


def read_secret(path: Path) -> str:
    """What all stages of a chain know."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(SECRET_LENGTH)
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFileError(f"the secret in {path} cannot be read: {error}") from error
    return long_enough(text)


def long_enough(text: str) -> str:
    """A secret, without what stands around it."""
    if len(text.strip()) < 16:
        raise ArgumentError(
            "the secret of a chain has at least 16 characters\nTry: --secret-file with what python"
            " -c 'import secrets; print(secrets.token_urlsafe(32))' prints"
        )
    return text.strip()


def listener(address: tuple[str, int]) -> socket.socket:
    """A socket that listens for a chain."""
    try:
        return socket.create_server(address)
    except OSError as error:
        raise LaunchError(
            f"{address[0]}:{address[1]} cannot be listened at ({error})\nTry: another port"
        ) from error
