"""Examples as batches, by position alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardlib.data.batches.examples import FIELDS, Examples
from shardlib.errors import DataError
from shardlib.report import Finding

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDataset:
    """Examples of a language model, endlessly many, every epoch in an order of its own.

    Nothing here is a state: an example is a function of documents, tokenizer, packing, seed and
    position, and so is a batch.

    Attributes:
        name: for people.
        examples: see `Examples`.
        seq: tokens of an example.
        about: what decides which examples there are, beside their numbers.
        findings: what was noticed when the data was opened.
    """

    name: str
    examples: Examples
    seq: int
    about: str
    findings: tuple[Finding, ...] = ()

    @property
    def examples_per_epoch(self) -> int:
        """Examples after which the next epoch begins."""
        return self.examples.count

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays of a batch."""
        return self.examples.fields

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any example, or with their order; a run that
        goes on compares it with the one that it began with.

        Large files of tokens, which are read where they are, count with their size and with
        stretches all over them.
        """
        return hashlib.sha256(f"{self.about} {self.seq}".encode()).hexdigest()[:16]

    def batch(self, position: int, size: int) -> dict[str, np.ndarray]:
        """Examples `position` to `position + size`, exclusive: arrays [size, seq], int32 but for
        "weights", which are float32.
        """
        return self.rows(position, range(size))

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Some rows of the batch that begins at `position`: arrays [len(rows), seq]; nothing else
        is read.
        """
        if position < 0 or (len(rows) and min(rows) < 0):
            raise DataError(
                f"there are no examples before the first one, and position {position} was asked"
                " for\nTry: a position of at least 0"
            )
        arrays = {name: np.zeros((len(rows), self.seq), FIELDS[name]) for name in self.fields}
        for row, number in enumerate(
            self.examples.numbers(position + np.asarray(rows, np.int64)).tolist()
        ):
            self.examples.fill(number, {name: array[row] for name, array in arrays.items()})
        return arrays

    def grain(self) -> grain.MapDataset[dict[str, np.ndarray]]:
        """One epoch after the other as a Grain pipeline, for those who go on with one: element p is
        example p, arrays [seq].

        It is in the order of training already; slices of it are what processes read, and a `.batch`
        behind those makes other batches than `batch` does.
        """
        import grain

        return grain.MapDataset.range(2**62).map(
            lambda position: {name: array[0] for name, array in self.batch(position, 1).items()}
        )
