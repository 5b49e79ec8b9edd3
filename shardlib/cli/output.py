"""The output of commands, and the files that they read and write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import typer

from shardlib.errors import ArgumentError, MissingFileError, ShardlibError
from shardlib.untrusted.data import LIMITS, Json, JsonObject, printable, read_bytes, shown


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Prints text, of which parts may be a stranger's: what a terminal would obey is escaped."""
    typer.echo(printable(text), nl=nl, err=err)


def report(error: ShardlibError, *, as_json: bool) -> None:
    """Says an error on stderr, and as JSON on stdout."""
    from rich.console import Console
    from rich.text import Text

    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}))
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        Text(printable(f"error: {error}"), style="red")
    )


def show(rows: list[JsonObject], as_json: bool, text: Mapping[str, Callable[[Json], str]]) -> None:
    """Prints rows as a JSON list, or as a table with numbers in words."""
    if as_json:
        echo(json.dumps(rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        heading = (
            name.replace("flops_per_s", "bfloat16")
            .replace("hbm_bytes", "memory")
            .replace("_bytes", "")
            .replace("_per_s", "/s")
            .replace("_", " ")
        )
        table.add_column(
            heading, justify="left" if isinstance(rows[0][name], str) else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(printable(text.get(name, str)(value))) for name, value in row.items()))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(table)


def read_text(path: Path, what: str, hint: str, error: type[ShardlibError]) -> bytes:
    """Reads a file."""
    if not os.path.exists(path):
        raise MissingFileError(f"there is no {what} file {path}\nTry: {hint}")
    if path.is_dir():
        raise error(f"{path} is a folder, not a {what} file\nTry: a file that is in it")
    return read_bytes(path, f"{what} file", error, limit=LIMITS.bytes, hint=hint)


def writable(path: Path | None) -> Path | None:
    """The path of a file that is to be written, as an option gave it; the callback of such options,
    so that what cannot be written is said before anything is done.
    """
    if path is None:
        return None
    with _explained_errors(path):
        if path.is_dir():
            raise ArgumentError(
                f"{path} is a folder, and a file is written there\nTry: {path / 'NAME'}"
            )
        if not path.parent.is_dir():
            raise MissingFileError(f"the folder {path.parent} for {path.name} does not exist")
        if not os.access(path if _exists(path) else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path


def write(path: Path, text: str) -> None:
    """Writes a file."""
    writable(path)
    with _explained_errors(path):
        path.write_text(text)


def _exists(path: Path) -> bool:
    """Returns whether there is something of that name; an error where there cannot be."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    """Says in one sentence why a file cannot be written."""
    try:
        yield
    except ShardlibError:
        raise
    except (OSError, ValueError) as failure:  # a name that no file can have is a ValueError
        reason = getattr(failure, "strerror", None) or str(failure)
        raise ArgumentError(
            f"{shown(str(path), 300)} cannot be written: {reason}\nTry: another file"
        ) from failure


@contextlib.contextmanager
def quiet_stdout(as_json: bool) -> Iterator[None]:
    """Sends what a user's model prints to stderr while stdout belongs to JSON."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield
