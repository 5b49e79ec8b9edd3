"""Documents as tokens on disk: built once, reused, and checked."""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import re
import shutil
import time
import tokenize
import weakref
import zipfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from shardlib.data.sources import (
    Ahead,
    Document,
    FileInfo,
    Files,
    Source,
    changed,
    locked,
    unwritable,
)
from shardlib.errors import DataError, MissingFileError, ShardlibError
from shardlib.findings import Finding
from shardlib.untrusted.data import (
    WRONG,
    JsonMapping,
    JsonObject,
    Limits,
    construct,
    fit,
    printable,
    read_json,
    shown,
)

# --------------------------------------------------------------------------------------------------
# Tokens on disk and the documents that they make up.
#
# Files are read by position (`pread`) and not mapped into memory: a mapped file that shrinks ends
# the process with a signal, a short read is an error that says which file it was.

#: One document in this many is held out for validation.
HOLD_OUT = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Tokens in a file, from some byte on to its end or before it.

    Attributes:
        path: of the file.
        dtype: of a token, an integer.
        begin: bytes before the first token.
        count: tokens.
    """

    path: Path
    dtype: np.dtype
    begin: int
    count: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, exclusive, with the dtype of the file."""
        width = self.dtype.itemsize
        data = bytearray((stop - start) * width)
        view, offset = memoryview(data), self.begin + start * width
        while view:
            done = os.preadv(self._descriptor, [view], offset)
            if not done:
                size = os.fstat(self._descriptor).st_size
                raise DataError(
                    f"{self.path} shrank to {size:,} bytes; {self.begin + self.count * width:,}"
                    " were there before\nTry: put the file back as it was; training can go on at"
                    " the step where it stopped"
                )
            view, offset = view[done:], offset + done
        return np.frombuffer(data, self.dtype)

    @cached_property
    def _descriptor(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{self.path} is gone; it was there when the data was opened"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Documents as stretches of tokens.

    Attributes:
        name: for people.
        files: where the tokens are, one file after the other; no document is in two of them.
        starts: first token of every document, counted over all files, int64 [documents].
        lengths: tokens of every document, int64 [documents].
        digest: changes with the tokens and the documents.
        place: what a document, by its number here, is called.
        vocabulary: tokens are below this; None where it is not known.
    """

    name: str
    files: Sequence[TokenFile]
    starts: np.ndarray
    lengths: np.ndarray
    digest: str
    place: Callable[[int], str]
    vocabulary: int | None = None

    @cached_property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *np.cumsum([file.count for file in self.files]).tolist()]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, exclusive, of a document."""
        position = int(self.starts[document])
        number = bisect.bisect_right(self._begins, position) - 1
        tokens = self.files[number].read(
            position - self._begins[number] + start, position - self._begins[number] + stop
        )
        check_tokens(tokens, self.vocabulary, lambda: self.place(document), start)
        return tokens


def check_tokens(
    tokens: np.ndarray, vocabulary: int | None, document: Callable[[], str], start: int = 0
) -> None:
    """Tokens are not negative and below the vocabulary."""
    if not tokens.size or (
        int(tokens.min()) >= 0 and (vocabulary is None or int(tokens.max()) < vocabulary)
    ):
        return
    wrong = tokens < 0 if vocabulary is None else (tokens < 0) | (tokens >= vocabulary)
    index = int(np.argmax(wrong))
    allowed = (
        "tokens are not negative"
        if vocabulary is None
        else f"the vocabulary has tokens 0 to {vocabulary - 1:,}"
    )
    raise DataError(
        f"token {int(tokens[index]):,} at position {start + index:,} of {document()} is unknown:"
        f" {allowed}\nTry: the tokenizer of the model, or a model with a larger vocabulary"
    )


def cut_ends(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every document in two, the last twentieth of which is held out: starts, lengths and whether
    they are held out, [2 * documents].
    """
    tails = lengths // HOLD_OUT
    return (
        np.stack([starts, starts + lengths - tails], axis=1).reshape(-1),
        np.stack([lengths - tails, tails], axis=1).reshape(-1),
        np.tile([False, True], len(starts)),
    )


# --------------------------------------------------------------------------------------------------
# Tokens that are there already: NumPy arrays in files, and files of bare tokens. They are read
# where they are, and nothing is copied.

#: Tokens that are looked through at a time for ends of documents.
_BLOCK = 1 << 22
#: Stretches of a file whose bytes are part of its digest, and their size.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A file and the lengths of its documents, int64 [documents]."""

    info: FileInfo
    file: TokenFile
    lengths: np.ndarray


def read_arrays(
    files: Files,
    listed: Sequence[FileInfo],
    *,
    dtype: np.dtype | None,
    end: int | None,
    vocabulary: int | None,
    name: str,
) -> tuple[Documents, Documents]:
    """Training and validation documents of files of tokens.

    A file is a document; rows of a file with two dims are documents; and where the tokenizer says
    which token ends a document, it ends there, too. Documents are held out by a hash of file and
    number; where there are few, each gives its end.

    Args:
        dtype: of bare tokens; None where there are none.
    """
    loaded = [_found(files, info, dtype, end, vocabulary) for info in listed]
    lengths = np.concatenate([file.lengths for file in loaded]) if loaded else np.zeros(0, np.int64)
    if not lengths.sum():
        raise DataError(
            f"{name} holds no tokens ({len(listed)} files looked at)\nTry: .npy files of integers,"
            " or bare tokens with dtype=..."
        )
    begins = np.cumsum([0, *(entry.file.count for entry in loaded)])
    starts = np.concatenate(
        [
            begin + np.cumsum(entry.lengths) - entry.lengths
            for begin, entry in zip(begins, loaded, strict=False)
        ]
    )
    places = (
        [(entry.info.name, number) for entry in loaded for number in range(len(entry.lengths))]
        if len(lengths) < 10**6
        else None
    )
    held_out = _held(loaded)
    numbers = np.arange(len(lengths))
    if len(lengths) < HOLD_OUT or not held_out.any():
        starts, lengths, held_out = cut_ends(starts, lengths)
        numbers = np.repeat(numbers, 2)
    digest = hashlib.sha256("".join(_arrays_digest(entry) for entry in loaded).encode()).hexdigest()

    def split(which: bool) -> Documents:
        selected = (held_out == which) & (lengths > 0)
        number = numbers[selected]

        def place(document: int) -> str:
            return (
                f"document {number[document]:,} of {name}"
                if places is None
                else "document {1:,} of {0}".format(*places[number[document]])
            )

        return Documents(
            name=name,
            files=tuple(entry.file for entry in loaded),
            starts=starts[selected],
            lengths=lengths[selected],
            digest=f"{digest}, {which}",
            place=place,
            vocabulary=vocabulary,
        )

    return split(False), split(True)


def _held(loaded: Sequence[_Found]) -> np.ndarray:
    keys = (
        f"{entry.info.name} {number}".encode()
        for entry in loaded
        for number in range(len(entry.lengths))
    )
    return np.array(
        [int(hashlib.sha256(key).hexdigest(), 16) % HOLD_OUT == 0 for key in keys], bool
    )


def _found(
    files: Files, info: FileInfo, dtype: np.dtype | None, end: int | None, vocabulary: int | None
) -> _Found:
    path = files.path(info.name)
    if path.stat().st_size != info.size:
        raise changed(files, info, path.stat().st_size)
    if info.name.endswith(".npy"):
        shape, dtype, begin = _header(path)
    elif dtype is None:
        raise DataError(
            f"{info.name} of {files.root} is no .npy file, so that nobody knows its tokens\nTry:"
            " dtype=... with the dtype of a token, such as 'uint16'"
        )
    else:
        shape, begin = (info.size // dtype.itemsize,), 0
        if info.size % dtype.itemsize:
            raise DataError(
                f"{info.name} of {files.root} has {info.size:,} bytes, which is not a multiple of"
                f" the {dtype.itemsize} of a token of {dtype}\nTry: another dtype=..., or check"
                " that the file is whole"
            )
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise DataError(
            f"{info.name} of {files.root} holds {dtype}{list(shape)}, not tokens\nTry: integers in"
            " one dim, or in two of which the first counts documents"
        )
    file = TokenFile(path=path, dtype=dtype, begin=begin, count=int(np.prod(shape)))
    rows = (
        np.array([file.count], np.int64)
        if len(shape) == 1 or not file.count
        else np.full(shape[0], shape[1], np.int64)
    )
    return _Found(info=info, file=file, lengths=rows if end is None else _cut(file, rows, end))


def _header(path: object) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and first byte of the numbers of a ".npy" file."""
    try:
        numbers = np.load(str(path), mmap_mode="r", allow_pickle=False)
    except (
        *WRONG,
        EOFError,
        OSError,
        MemoryError,
        SyntaxError,
        tokenize.TokenError,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(
            f"{path} is not a whole .npy file: {fit(printable(str(error)), 300)}\nTry: check that"
            " it is complete"
        ) from error
    if not isinstance(numbers, np.memmap) or not (numbers.flags.c_contiguous or numbers.ndim == 1):
        raise DataError(
            f"{path} is not an array in rows\nTry: np.save of a C-contiguous array of integers"
        )
    return tuple(int(size) for size in numbers.shape), numbers.dtype, int(numbers.offset)


def _cut(file: TokenFile, rows: np.ndarray, end: int) -> np.ndarray:
    """Lengths of documents that end at rows' ends and after each token that ends one."""
    ends = np.union1d(np.cumsum(rows), np.fromiter(_ends(file, end), np.int64))
    return np.diff(ends, prepend=0)


def _ends(file: TokenFile, end: int) -> Iterator[int]:
    for start in range(0, file.count, _BLOCK):
        yield from (
            np.flatnonzero(file.read(start, min(start + _BLOCK, file.count)) == end) + start + 1
        ).tolist()


def _arrays_digest(entry: _Found) -> str:
    """Of size, dtype, documents and stretches all over the file; a file of a terabyte is not read
    as a whole for it.
    """
    file = entry.file
    size = max(_SAMPLE_BYTES // file.dtype.itemsize, 1)
    small = file.count <= _SAMPLES * size
    starts = [0] if small else np.linspace(0, file.count - size, _SAMPLES).astype(np.int64).tolist()
    digest = hashlib.sha256(f"{file.count} {file.dtype.str}".encode() + entry.lengths.tobytes())
    for start in starts:
        digest.update(file.read(start, file.count if small else start + size).tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# Tokenizers: any object with their methods can be used; bytes are built in.


@runtime_checkable
class Tokenizer(Protocol):
    """Converter of text to tokens.

    Two more attributes are used where an object has them: `end`, the token put after every
    document, and `unknown`, the token that stands for text outside of the vocabulary, which is
    counted.

    Attributes:
        vocab_size: tokens are from 0 to this, exclusive.
        identity: changes whenever the tokens of some text change; stores of tokens are found by it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """A token for every byte of UTF-8; documents end with a line break.

    Attributes:
        vocab_size: at least 256, for models whose vocabulary is larger.
        end: see `Tokenizer`.
    """

    vocab_size: int = 256
    end: int | None = 10

    @property
    def identity(self) -> str:
        """See `Tokenizer`."""
        return f"bytes, end {self.end}"

    def encode(self, text: str) -> np.ndarray:
        """The bytes of a text, uint8."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes; what is not UTF-8 becomes a replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A tokenizer of another library.

    Attributes:
        vocab_size, identity, end, unknown: see `Tokenizer`.
        to_tokens, to_text: what the other library calls its functions.
    """

    vocab_size: int
    identity: str
    end: int | None
    unknown: int | None
    to_tokens: Callable[[str], Sequence[int]]
    to_text: Callable[[Sequence[int]], str]

    def encode(self, text: str) -> Sequence[int]:
        """See `Tokenizer`."""
        return self.to_tokens(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self.to_text([int(token) for token in tokens])


#: A tokenizer of ours, of `tokenizers`, `transformers` or SentencePiece: it is told by what it has.
AnyTokenizer = Any


def adapted(tokenizer: AnyTokenizer, *, end: int | None = None) -> Tokenizer:
    """A tokenizer of ours, `tokenizers` or `transformers` (Hugging Face), or SentencePiece, as one
    that can be used here.

    Objects with `encode`, `decode`, `vocab_size` and `identity` are returned as they are.

    Args:
        end: the token put after every document, for those of other libraries; by default the one
            that `transformers` or SentencePiece know.
    """
    if hasattr(tokenizer, "backend_tokenizer"):
        return _of_tokenizers(
            tokenizer.backend_tokenizer, tokenizer.eos_token_id if end is None else end
        )
    if hasattr(tokenizer, "get_vocab_size") and hasattr(tokenizer, "to_str"):
        return _of_tokenizers(tokenizer, end)
    if hasattr(tokenizer, "serialized_model_proto"):
        end = (
            tokenizer.eos_id() if end is None and tokenizer.eos_id() >= 0 else end
        )  # -1: it has none
        return Adapted(
            vocab_size=tokenizer.vocab_size(),
            identity=_hashed(tokenizer.serialized_model_proto(), end),
            end=end,
            unknown=tokenizer.unk_id(),
            to_tokens=lambda text: tokenizer.encode(text),
            to_text=lambda tokens: tokenizer.decode(list(tokens)),
        )
    missing = [
        name
        for name in ("encode", "decode", "vocab_size", "identity")
        if not hasattr(tokenizer, name)
    ]
    if missing:
        raise DataError(
            f"the tokenizer {tokenizer!r} has no {' and no '.join(missing)}\nTry: an object with"
            " encode(text), decode(tokens), vocab_size and identity, a string that changes with"
            " its tokens"
        )
    return tokenizer


def _of_tokenizers(tokenizer: Any, end: int | None) -> Adapted:
    unknown = getattr(tokenizer.model, "unk_token", None)
    return Adapted(
        vocab_size=tokenizer.get_vocab_size(),
        identity=_hashed(tokenizer.to_str().encode(), end),
        end=end,
        unknown=None if unknown is None else tokenizer.token_to_id(unknown),
        to_tokens=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        to_text=tokenizer.decode,
    )


def _hashed(model: bytes, end: int | None) -> str:
    return f"{hashlib.sha256(model).hexdigest()}, end {end}"


# --------------------------------------------------------------------------------------------------
# Documents become tokens, once: a folder that is written beside its place and then renamed, so
# that it is whole or not there.

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


# --------------------------------------------------------------------------------------------------
# The manifest of a folder of tokens, checked against the files beside it.

#: Token files up to this size are hashed at the first opening of every process; larger ones where
#: they were modified.
HASHED_BYTES = 1 << 30
#: Dtypes of tokens.
TOKEN = re.compile(r"[<>=|]?[iu][1248]|u?int(?:8|16|32|64)")
#: A manifest is short.
MANIFEST = Limits(bytes=1 << 20, depth=8)


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The parts of a manifest that are used; see `shardlib.data.tokens`."""

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
                f"manifest.json says that tokens are {shown(recorded.dtype)}, which are not"
                " integers"
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
        wrong = [path.name for path, digest in hashed if _manifest_digest(path) != digest]
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
    """Returns whether documents lie outside of the tokens; empty where they do not."""
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


def _manifest_digest(path: Path) -> str:
    """SHA-256 of a file, counted once in a process as long as nobody writes the file."""
    status = os.stat(path)
    return _digest_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest_of(path: Path, *version: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def rows_of(folder: Path) -> np.ndarray:
    return np.frombuffer((folder / "documents.bin").read_bytes(), ROW)


# --------------------------------------------------------------------------------------------------
# A folder of tokens: found again in the next run, checked, and made anew where its sources changed
# or it is damaged.

#: Changes when stores are written otherwise.
FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """An open store.

    Attributes:
        training, validation: documents of the two splits.
        findings: what was noticed when it was opened.
    """

    training: Documents
    validation: Documents
    findings: tuple[Finding, ...]


def open_store(
    source: Source, tokenizer: Tokenizer, cache: Path, *, name: str, vocabulary: int | None = None
) -> Store:
    """The tokens of a source: those of the folder that has them, or else new ones, made by one
    process while others wait.

    Args:
        vocabulary: tokens that the model has; by default those of the tokenizer.
    """
    origin, key = _keys(source, tokenizer)
    folder, findings = cache / f"tokens-{origin}-{key}", list[Finding]()
    state = checked(folder)
    if isinstance(state, str):
        needed = sum(info.size for info in source.listed)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"tokens-{origin}.lock"):
                state = checked(folder)
                if isinstance(state, str):
                    findings += _why(cache, origin, folder, state, name)
                    if folder.exists():
                        shutil.rmtree(folder)
                    build(
                        source,
                        tokenizer,
                        folder,
                        {
                            "format": FORMAT,
                            "source": source.files.root,
                            "reading": source.reading,
                            "tokenizer": tokenizer.identity,
                        },
                    )
        except ShardlibError:
            raise
        except OSError as error:
            raise unwritable(cache, error, f"the tokens of {name}", needed) from error
        state = checked(folder)
        if isinstance(state, str):
            raise DataError(
                f"the tokens of {name} in {folder} are damaged as soon as they are written:"
                f" {state}\nTry: cache=... on another disk"
            )
    if state["largest"] >= (limit := tokenizer.vocab_size if vocabulary is None else vocabulary):
        _raise_unknown(folder, state, source, limit)
    return _opened(folder, state, source, tokenizer, name, tuple(findings))


def _keys(source: Source, tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns what the store is of, and the same with sizes and times of all files."""
    origin = [FORMAT, source.files.root, source.reading, tokenizer.identity, tokenizer.vocab_size]
    files = [[info.name, info.size, info.modified] for info in source.listed]
    return tuple(
        hashlib.sha256(json.dumps(what).encode()).hexdigest()[:digits]
        for what, digits in ((origin, 8), ([origin, files], 16))
    )  # type: ignore[return-value]


def _why(cache: Path, origin: str, folder: Path, damage: str, name: str) -> list[Finding]:
    """Returns why a store is made where there is one already."""
    if folder.exists():
        return [
            Finding(
                code="store-damaged",
                severity="warning",
                where=str(folder),
                message=f"the tokens of {name} are damaged and made anew: {damage}",
                hint="look after the disk; the text itself was not touched",
            )
        ]
    others = sorted(path.name for path in cache.glob(f"tokens-{origin}-*") if path.is_dir())
    if others:
        return [
            Finding(
                code="source-changed",
                severity="warning",
                where=str(cache),
                message=(
                    f"the files of {name} changed since they were tokenised; tokens are made anew,"
                    f" in {folder.name} beside {', '.join(others)}"
                ),
                hint=(
                    "remove stores that no run needs any more; runs on the old text cannot go on"
                    " with the new one"
                ),
            )
        ]
    return []


def _opened(
    folder: Path,
    manifest: JsonMapping,
    source: Source,
    tokenizer: Tokenizer,
    name: str,
    findings: tuple[Finding, ...],
) -> Store:
    file, rows = _file(folder, manifest), rows_of(folder)

    def split(held_out: bool) -> Documents:
        selected = rows[(rows["held"] == held_out) & (rows["length"] > 0)]
        return Documents(
            name=name,
            files=(file,),
            starts=selected["start"].copy(),
            lengths=selected["length"].copy(),
            place=_placed(source, selected),
            vocabulary=tokenizer.vocab_size,
            digest=hashlib.sha256(
                f"{manifest['tokens_sha256']} {manifest['documents_sha256']} {held_out}".encode()
            ).hexdigest(),
        )

    return Store(
        training=split(False),
        validation=split(True),
        findings=(*findings, *_noticed(manifest, source, tokenizer, name)),
    )


def _raise_unknown(folder: Path, manifest: JsonMapping, source: Source, vocabulary: int) -> None:
    """Finds the first token that is not below the vocabulary, and says where it is."""
    rows, file = rows_of(folder), _file(folder, manifest)
    boundaries = np.flatnonzero(
        np.r_[
            True,
            (rows["part"][1:] != rows["part"][:-1]) | (rows["number"][1:] != rows["number"][:-1]),
        ]
    )
    for first, after in zip(boundaries, np.r_[boundaries[1:], len(rows)], strict=True):
        start, place = int(rows["start"][first]), _placed(source, rows)
        stop = int(rows["start"][after - 1] + rows["length"][after - 1])
        check_tokens(
            file.read(start, stop), vocabulary, lambda first=first, place=place: place(int(first))
        )


def _file(folder: Path, manifest: JsonMapping) -> TokenFile:
    return TokenFile(
        path=folder / "tokens.bin",
        dtype=np.dtype(manifest["dtype"]),
        begin=0,
        count=manifest["tokens"],
    )


def _placed(source: Source, rows: np.ndarray) -> Callable[[int], str]:
    def place(document: int) -> str:
        part, number = int(rows["part"][document]), int(rows["number"][document])
        try:
            return source[part][number].name
        except (DataError, OSError, IndexError):
            return f"document {number} of part {part} of {source.files.root}"

    return place


def _noticed(
    manifest: JsonMapping, source: Source, tokenizer: Tokenizer, name: str
) -> list[Finding]:
    findings = list[Finding]()
    if source.reading == "text" and manifest["empty_parts"]:
        findings.append(
            Finding(
                code="files-left-out",
                severity="info",
                where=source.files.root,
                message=(
                    f"{manifest['empty_parts']:,} of {len(source.listed):,} files of {name} are not"
                    " UTF-8 text and are left out"
                ),
            )
        )
    if manifest["unknown"]:
        share = manifest["unknown"] / max(manifest["tokens"], 1)
        findings.append(
            Finding(
                code="unknown-tokens",
                severity="warning",
                where=source.files.root,
                hint="a tokenizer that was made for this text",
                message=(
                    f"{manifest['unknown']:,} of {manifest['tokens']:,} tokens ({share:.2%}) stand"
                    " for text outside of the tokenizer's vocabulary"
                ),
            )
        )
    return findings
