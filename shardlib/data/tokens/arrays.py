"""Tokens that are there already: NumPy arrays in files, and files of bare tokens. They are read
where they are, and nothing is copied.
"""

from __future__ import annotations

import hashlib
import tokenize
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.data.reading.files import FileInfo, Files, changed
from shardlib.data.tokens.documents import HOLD_OUT, Documents, TokenFile, cut_ends
from shardlib.errors import DataError
from shardlib.untrusted import fit, printable
from shardlib.untrusted.typed import WRONG

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
    digest = hashlib.sha256("".join(_digest(entry) for entry in loaded).encode()).hexdigest()

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
                f"{info.name} of {files.root} has {info.size:,} bytes, which is no multiple of the"
                f" {dtype.itemsize} of a token of {dtype}\nTry: another dtype=..., or check that"
                " the file is whole"
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
            f"{path} is no whole .npy file: {fit(printable(str(error)), 300)}\nTry: check that it"
            " is complete"
        ) from error
    if not isinstance(numbers, np.memmap) or not (numbers.flags.c_contiguous or numbers.ndim == 1):
        raise DataError(
            f"{path} is no array in rows\nTry: np.save of a C-contiguous array of integers"
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


def _digest(entry: _Found) -> str:
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
