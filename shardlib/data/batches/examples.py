"""The tokens that make up example number p: kinds of packing, each with random access.

`Windows` cuts the endless concatenation of all documents, which are shuffled anew in every epoch,
into stretches of equal length, as Megatron-LM's index of samples does (arXiv:1909.08053). `Bins`,
in the module beside, fills rows with whole documents.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shardlib.data.batches.order import shuffled, shuffled_indices
from shardlib.data.tokens.documents import Documents

#: Dtypes of what an example has beside inputs and targets.
FIELDS: Mapping[str, np.dtype] = {
    "inputs": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
}


class Examples(Protocol):
    """Examples by number, as many as are asked for: every epoch has the same ones in an order of
    its own.

    Attributes:
        count: examples of an epoch.
        fields: arrays of an example, names of `FIELDS`.
    """

    @property
    def count(self) -> int: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """The examples that come at some positions, int64 [positions]."""
        ...

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """Writes an example into arrays [seq], which are zero before."""
        ...


def by_epoch(positions: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs of positions, and where they lead in their epoch's order of `count` examples, int64
    [positions] each.
    """
    epochs, indices = np.divmod(positions, count)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        indices[in_epoch] = shuffled_indices(indices[in_epoch], count, seed, epoch)
    return epochs, indices


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    """Documents in the order of an epoch, int64 [documents], and where each ends in their
    concatenation, int64 [documents].
    """

    order: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of `seq` tokens over the concatenation of documents, epoch after epoch.

    An epoch's documents need not be a whole number of windows: a window that begins in one epoch
    may end in the next, so that every token of every epoch is an input once, and none is left out.
    Windows are shuffled among the `count` that come after each other.

    Attributes:
        documents: see `Documents`.
        seq: tokens.
        seed: of both orders.
        segments: whether examples have "segments", the number of the document in its window, from
            1; "positions" of tokens in their document, as far as the window has it; and "weights",
            0 where the target is of another document.
    """

    documents: Documents
    seq: int
    seed: int
    segments: bool = False
    _epochs: dict[int, _Epoch] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def count(self) -> int:
        """See `Examples`."""
        return self.documents.tokens // self.seq

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Examples`."""
        return tuple(FIELDS) if self.segments else ("inputs", "targets")

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """See `Examples`: windows counted from the beginning of training."""
        epochs, indices = by_epoch(positions, self.count, self.seed)
        return epochs * self.count + indices

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """See `Examples`."""
        tokens, lengths = self._stretch(number * self.seq, self.seq + 1)
        row["inputs"][:], row["targets"][:] = tokens[:-1], tokens[1:]
        if self.segments:
            numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            row["segments"][:], row["positions"][:] = (
                numbers[:-1],
                np.concatenate([np.arange(length) for length in lengths])[:-1],
            )
            row["weights"][:] = numbers[1:] == numbers[:-1]

    def _stretch(self, start: int, count: int) -> tuple[np.ndarray, list[int]]:
        """Tokens of the endless concatenation, int32 [count], and how many each document there
        gives.
        """
        tokens, lengths, done = np.empty(count, np.int32), list[int](), 0
        epoch, offset = divmod(start, self.documents.tokens)
        while done < count:
            now = self._epoch(epoch)
            index = int(np.searchsorted(now.ends, offset, side="right"))
            while done < count and index < len(now.order):
                document, end = int(now.order[index]), int(now.ends[index])
                length = int(self.documents.lengths[document])
                begin, taken = length - (end - offset), min(end - offset, count - done)
                tokens[done : done + taken] = self.documents.read(document, begin, begin + taken)
                lengths.append(taken)
                done, offset, index = done + taken, end, index + 1
            epoch, offset = epoch + 1, 0
        return tokens, lengths

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            if epoch not in self._epochs:
                order = shuffled(len(self.documents.starts), self.seed, epoch)
                while len(self._epochs) > 3:
                    self._epochs.pop(min(self._epochs))
                self._epochs[epoch] = _Epoch(
                    order=order, ends=np.cumsum(self.documents.lengths[order])
                )
            return self._epochs[epoch]
