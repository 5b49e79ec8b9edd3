"""Rows filled with whole documents: which document goes into which row.

Documents with more tokens than a row are cut first. "first-fit" puts each piece, in a shuffled
order, into the first row that has room; "best-fit" begins with the longest and takes the row with
the least room that suffices, which cuts and pads little (arXiv:2404.10830). A piece of m + 1 tokens
has m inputs and as many targets, so that each pair of neighbours in a document is learned once an
epoch, and none across documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from shardlib.data.batches.examples import FIELDS, by_epoch
from shardlib.data.batches.kept import kept
from shardlib.data.batches.order import shuffled
from shardlib.data.tokens.documents import Documents

#: The epoch whose shuffle is the order in which "first-fit" takes pieces; examples are shuffled by
#: those from 0 on.
_ORDER = -1
#: Rows of fewer documents are not kept: they are filled as quickly as they are read.
KEPT = 50_000


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of every piece, int64 [pieces]; pieces come in the order of the array.

    A tree over rows, each node with the most room below it, finds the first row in logarithmic
    time.
    """
    leaves = 1 << max(len(lengths) - 1, 1).bit_length()
    free, rows = [capacity] * (2 * leaves), np.empty(len(lengths), np.int64)
    for number, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += free[node] < length
        rows[number] = node - leaves
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of every piece, int64 [pieces]; the longest come first, of equal ones those that are
    first in the array.
    """
    rows, count = np.empty(len(lengths), np.int64), 0
    by_room, there = (
        [list[int]() for _ in range(capacity + 1)],
        0,
    )  # bit r of `there`: some row has room for r
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = there >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = by_room[left].pop()
            if not by_room[left]:
                there &= ~(1 << left)
        else:
            left, row, count = capacity, count, count + 1
        rows[number] = row
        if left > length:
            by_room[left - length].append(row)
            there |= 1 << (left - length)
    return rows


#: Kinds of packing that fill rows with documents.
PACKERS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "first-fit": first_fit,
    "best-fit": best_fit,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """Rows of `seq` inputs filled with documents and padded with zeros: see `Windows` for
    "segments" and "positions"; "weights" is 0 in the padding, and so is "segments".

    Attributes:
        documents: see `Documents`.
        seq: tokens.
        seed: of the order of pieces and of examples.
        packing: a name of `PACKERS`.
        folder: where the rows are kept for the next process, if they are many; None for nowhere.
    """

    documents: Documents
    seq: int
    seed: int
    packing: str
    folder: Path | None = None

    @property
    def count(self) -> int:
        """See `Examples`."""
        return len(self._pieces["begins"]) - 1

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Examples`."""
        return tuple(FIELDS)

    @property
    def padding(self) -> float:
        """The part of all inputs that is padding."""
        return 1 - float(self._pieces["lengths"].sum()) / (self.count * self.seq)

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """See `Examples`: rows counted in every epoch."""
        return by_epoch(positions, self.count, self.seed)[1]

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """See `Examples`."""
        offset = 0
        pieces = range(int(self._pieces["begins"][number]), int(self._pieces["begins"][number + 1]))
        for segment, piece in enumerate(pieces, 1):
            start, length = int(self._pieces["starts"][piece]), int(self._pieces["lengths"][piece])
            tokens = self.documents.read(
                int(self._pieces["documents"][piece]), start, start + length + 1
            )
            span = slice(offset, offset + length)
            row["inputs"][span], row["targets"][span] = tokens[:-1], tokens[1:]
            row["segments"][span], row["positions"][span], row["weights"][span] = (
                segment,
                np.arange(length),
                1,
            )
            offset += length

    @cached_property
    def _pieces(self) -> Mapping[str, np.ndarray]:
        """Pieces in the order of their rows: "documents", "starts" and "lengths" in inputs, int64
        [pieces]; and where each row "begins", int64 [rows + 1].
        """
        if self.folder is None or len(self.documents.lengths) < KEPT:
            return self._packed()
        key = hashlib.sha256(
            f"{self.documents.digest} {self.packing} {self.seq} {self.seed}".encode()
        ).hexdigest()[:16]
        return kept(self.folder / f"rows-{key}.npz", self._packed)

    def _packed(self) -> Mapping[str, np.ndarray]:
        documents, starts, lengths = cut(self.documents.lengths, self.seq)
        order = shuffled(len(lengths), self.seed, _ORDER)
        rows = PACKERS[self.packing](lengths[order], self.seq)
        together = order[np.argsort(rows, kind="stable")]
        begins = (
            np.concatenate([[0], np.cumsum(np.bincount(rows))])
            if len(rows)
            else np.zeros(1, np.int64)
        )
        return {
            "documents": documents[together],
            "starts": starts[together],
            "lengths": lengths[together],
            "begins": begins,
        }


def cut(lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of documents with at most `seq` inputs: document, first token and inputs, int64
    [pieces] each.
    """
    pairs = np.maximum(lengths - 1, 0)
    pieces = -(-pairs // seq)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq
    return documents, starts, np.minimum(pairs[documents] - starts, seq)
