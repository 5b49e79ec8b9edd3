"""Documents become tokens, once: a folder that is written beside its place and then renamed, so
that it is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardlib.data.reading.sources import Document, Source
from shardlib.data.reading.threads import Ahead
from shardlib.data.reading.tokenizer import Tokenizer
from shardlib.data.tokens.documents import HOLD_OUT, check_tokens, cut_ends
from shardlib.errors import DataError, ShardlibError
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Threads that read and tokenise.
THREADS = 4
#: An unfinished store that nobody has written to for so long is one of a stopped process.
_OLD_SECONDS = 24 * 3600
#: A document in the file "documents.bin": its first token, the part of the source it is from, its
#: number there, and whether it is held out.
ROW = np.dtype(
    [("start", "<i8"), ("length", "<i8"), ("part", "<i8"), ("number", "<i4"), ("held", "?")]
)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A document as tokens.

    Attributes:
        tokens: with the token for its end, [tokens].
        number: of the document in its part.
        held: whether its key says that it is held out.
        unknown: tokens that stand for text outside of the vocabulary.
    """

    tokens: np.ndarray
    number: int
    held: bool
    unknown: int


@dataclass(kw_only=True)
class _Columns:
    """Rows of "documents.bin" as they come."""

    length: array = field(default_factory=lambda: array("q"))
    part: array = field(default_factory=lambda: array("q"))
    number: array = field(default_factory=lambda: array("q"))
    held: array = field(default_factory=lambda: array("b"))
    unknown: int = 0
    empty: int = 0
    largest: int = 0


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned dtype for tokens below this."""
    return np.dtype("<u1" if vocabulary <= 2**8 else "<u2" if vocabulary <= 2**16 else "<u4")


def encoded(source: Source, tokenizer: Tokenizer) -> Iterator[list[Encoded]]:
    """The documents of every part of a source, in order; some parts are read ahead by threads."""
    dtype = token_dtype(tokenizer.vocab_size)

    def part(index: int) -> list[Encoded]:
        try:
            documents = source[index]
        except ShardlibError:
            raise
        except OSError as error:
            raise DataError(f"the files of {source.files.root} cannot be read: {error}") from error
        return [
            _document(tokenizer, dtype, document, number)
            for number, document in enumerate(documents)
        ]

    return Ahead(part, range(len(source)), threads=THREADS, ahead=2 * THREADS)


def _document(tokenizer: Tokenizer, dtype: np.dtype, document: Document, number: int) -> Encoded:
    try:
        tokens = np.asarray(tokenizer.encode(document.text))
    except ShardlibError:
        raise
    except Exception as error:
        raise DataError(
            f"the tokenizer cannot encode {document.name}: {type(error).__name__}: {error}"
        ) from error
    if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise DataError(
            f"the tokenizer makes {tokens.dtype}{list(tokens.shape)} of {document.name}\nTry:"
            " encode(text) that returns a list of integers"
        )
    check_tokens(tokens, tokenizer.vocab_size, lambda: document.name)
    end, unknown = getattr(tokenizer, "end", None), getattr(tokenizer, "unknown", None)
    ended = tokens if end is None else np.append(tokens, end)
    return Encoded(
        tokens=ended.astype(dtype),
        number=number,
        held=int(hashlib.sha256(document.key).hexdigest(), 16) % HOLD_OUT == 0,
        unknown=0 if unknown is None else int(np.count_nonzero(tokens == unknown)),
    )


def build(source: Source, tokenizer: Tokenizer, folder: Path, description: JsonMapping) -> None:
    """Tokenises a source into a folder, which is not there before."""
    _remove_old(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        manifest = _write(source, tokenizer, temporary)
        if not set(source.listed) <= set(source.files.listing()):
            raise DataError(
                f"the files of {source.files.root} changed while they were read\nTry: again, when"
                " nobody writes them"
            )
        _store(
            temporary / "manifest.json", json.dumps({**description, **manifest}, indent=1).encode()
        )
        _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_old(folder: Path) -> None:
    """Removes what processes left that were stopped by force; other machines may be at work where
    file systems have no locks.
    """
    for path in folder.parent.glob(f".{folder.name}.*.part"):
        if (
            time.time()
            - (path / "tokens.bin" if (path / "tokens.bin").exists() else path).stat().st_mtime
            > _OLD_SECONDS
        ):
            shutil.rmtree(path, ignore_errors=True)


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> JsonObject:
    columns, digest = _Columns(), hashlib.sha256()
    with open(folder / "tokens.bin", "xb") as stream:
        for part, documents in enumerate(encoded(source, tokenizer)):
            columns.empty += not documents
            for document in documents:
                _append(stream, document, part, columns, digest)
        _flush(stream)
    if not columns.length:
        raise DataError(
            f"{source.files.root} holds no documents ({len(source.listed)} files looked at, read as"
            f" {source.reading})\nTry: a UTF-8 text file, or a folder that holds some"
        )
    rows = _rows(columns)
    _store(folder / "documents.bin", rows.tobytes())
    written = os.stat(folder / "tokens.bin")
    return {
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "tokens": int(sum(columns.length)),
        "documents": len(rows),
        "whole": len(columns.length),
        "tokens_sha256": digest.hexdigest(),
        "documents_sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "modified": written.st_mtime_ns,
        "unknown": columns.unknown,
        "empty_parts": columns.empty,
        "largest": columns.largest,
    }


def _append(stream: BinaryIO, document: Encoded, part: int, columns: _Columns, digest: Any) -> None:
    data = document.tokens.tobytes()
    stream.write(data)
    digest.update(data)
    columns.length.append(len(document.tokens))
    columns.part.append(part)
    columns.number.append(document.number)
    columns.held.append(document.held)
    columns.unknown += document.unknown
    columns.largest = max(columns.largest, int(document.tokens.max(initial=0)))


def _rows(columns: _Columns) -> np.ndarray:
    """Rows of documents; where there are few, or none is held out, every one gives its end."""
    length, held_out = np.array(columns.length, np.int64), np.array(columns.held, bool)
    part, number, start = (
        np.array(columns.part, np.int64),
        np.array(columns.number, np.int64),
        np.cumsum(length) - length,
    )
    if len(length) < HOLD_OUT or not held_out.any():
        start, length, held_out = cut_ends(start, length)
        part, number = np.repeat(part, 2), np.repeat(number, 2)
    rows = np.zeros(len(start), ROW)
    for name, column in (
        ("start", start),
        ("length", length),
        ("part", part),
        ("number", number),
        ("held", held_out),
    ):
        rows[name] = column
    return rows


def _store(path: Path, data: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(data)
        _flush(stream)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _rename(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (
            folder / "manifest.json"
        ).exists():  # where file systems have no locks, another process may have been faster
            raise
