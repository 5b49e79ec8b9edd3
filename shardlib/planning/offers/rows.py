"""Rows: candidates under choices of colours, with the quantities that prices are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.sums import Sums
from shardlib.planning.bounds.step_time_that_fits import Kind
from shardlib.planning.bounds.tick import Tick

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Candidates under choices.

    Attributes:
        candidates: position of each row's candidate in its block.
        choices: number of each row's choice.
        c: the candidates of the rows.
        sums: by remat policy, quantities.
        ticks: by remat policy, bounds for a microbatch; also of `EACH` where layer groups may
            differ.
        kinds: bounds of what fits by kind of plans, as far as they are known.
    """

    candidates: Array
    choices: Array
    c: Candidates
    sums: dict[str, Sums]
    ticks: dict[str, Tick]
    kinds: Mapping[Kind, Array]

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, which: Array) -> Rows:
        """Some of the rows, by ascending position."""
        if len(which) == len(self):
            return self
        return Rows(
            candidates=self.candidates[which],
            choices=self.choices[which],
            c=self.c.take(which),
            sums={policy: s.take(which) for policy, s in self.sums.items()},
            ticks={policy: tick.take(which) for policy, tick in self.ticks.items()},
            kinds={kind: bound[which] for kind, bound in self.kinds.items()},
        )

    def below(
        self,
        zeros: Iterable[int],
        breadth_first: tuple[bool, ...],
        gathers: Iterable[str],
        limit: float,
    ) -> Array:
        """Rows that may have a plan faster than a limit that fits, boolean array [rows].

        Args:
            limit: seconds.
        """
        if not self.kinds:
            return np.ones(len(self), dtype=bool)
        kinds = itertools.product(zeros, breadth_first, gathers)
        return np.logical_or.reduce(
            [
                np.zeros(len(self), dtype=bool),
                *(self.kinds[kind] < limit for kind in kinds if kind in self.kinds),
            ]
        )
