"""Tokens on disk and the documents that they make up.

Files are read by position (`pread`) and not mapped into memory: a mapped file that shrinks ends the
process with a signal, a short read is an error that says which file it was.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from shardlib.errors import DataError, MissingFileError

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
