"""The manifest of a folder of tokens, checked against the files beside it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardlib.data.tokens.building import ROW
from shardlib.errors import DataError, MissingFileError
from shardlib.untrusted import Limits, construct, read_json, shown
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Token files up to this size are hashed at the first opening of every process; larger ones where
#: they were modified.
HASHED_BYTES = 1 << 30
#: Dtypes of tokens.
TOKEN = re.compile(r"[<>=|]?[iu][1248]|u?int(?:8|16|32|64)")
#: A manifest is short.
MANIFEST = Limits(bytes=1 << 20, depth=8)


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """What of a manifest is used; see `shardlib.data.tokens.building`."""

    tokens: int
    documents: int
    dtype: str
    largest: int
    unknown: int
    empty_parts: int
    modified: int
    tokens_sha256: str
    documents_sha256: str


def checked(folder: Path) -> JsonObject | str:
    """The manifest of a store, or what is wrong with it."""
    try:
        manifest = read_json(folder / "manifest.json", "manifest", DataError, limits=MANIFEST)
        recorded = construct(_Manifest, manifest, "manifest.json", DataError, least=0.0)
        if not TOKEN.fullmatch(recorded.dtype):
            return (
                f"manifest.json says that tokens are {shown(recorded.dtype)}, which are no integers"
            )
        tokens, rows = folder / "tokens.bin", folder / "documents.bin"
        for path, size in (
            (tokens, manifest["tokens"] * np.dtype(manifest["dtype"]).itemsize),
            (rows, manifest["documents"] * ROW.itemsize),
        ):
            if path.stat().st_size != size:
                return f"{path.name} has {path.stat().st_size:,} bytes, and {size:,} were written"
        status = tokens.stat()
        hashed = [(rows, manifest["documents_sha256"])]
        if status.st_size <= HASHED_BYTES or status.st_mtime_ns != manifest["modified"]:
            hashed.append((tokens, manifest["tokens_sha256"]))
        wrong = [path.name for path, digest in hashed if _digest(path) != digest]
        if wrong:
            return f"the bytes of {' and '.join(wrong)} are not those that were written"
        if wrong := _lying(folder, manifest):
            return wrong
        return manifest
    except MissingFileError:
        return "manifest.json is missing"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"manifest.json cannot be read: {error}"
    except OSError as error:
        return str(error)


def _lying(folder: Path, manifest: JsonMapping) -> str:
    """Whether documents lie outside of the tokens; empty where they do not."""
    rows = rows_of(folder)
    inside = (
        (rows["start"] >= 0)
        & (rows["length"] >= 0)
        & (rows["length"] <= manifest["tokens"])
        & (rows["start"] <= manifest["tokens"] - rows["length"])
    )
    return (
        ""
        if inside.all()
        else f"documents.bin has documents outside of the {manifest['tokens']:,} tokens"
    )


def _digest(path: Path) -> str:
    """SHA-256 of a file, counted once in a process as long as nobody writes the file."""
    status = os.stat(path)
    return _digest_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest_of(path: Path, *version: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def rows_of(folder: Path) -> np.ndarray:
    return np.frombuffer((folder / "documents.bin").read_bytes(), ROW)
