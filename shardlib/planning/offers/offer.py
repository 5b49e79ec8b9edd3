"""Offers: prices of many rows under the same decisions, and the least of them by candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.variants.mixed_remat import Each
from shardlib.decisions.lowerings import Gap, along, facts, lowered
from shardlib.decisions.table import Decisions
from shardlib.hardware.placement import Placement
from shardlib.planning.decisions.candidate import Candidate, by_group
from shardlib.planning.units.quantity import TIE
from shardlib.propagation.assignment import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Block:
    """Candidates that are priced together.

    Attributes:
        places: (mesh, order, placement) of each.
        c: the candidates.
        choices: the choices that prices speak of, with whether tokens are routed.
        gaps: what has no lowering, and is no plan whatever it costs.
    """

    places: list[tuple[MeshShape, tuple[str, ...], Placement]]
    c: Candidates
    choices: list[tuple[Choice, bool]]
    gaps: tuple[Gap, ...] = ()

    def lowered(self, offer: Offer, candidates: Array) -> Array:
        """Which rows of an offer have a lowering."""
        stages = {"stage": self.c.sizes["stage"][candidates]}
        return lowered(facts(offer.decisions), along(stages), self.gaps)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The decisions that priced rows stand for.

    Attributes:
        decisions: of all rows, but for what follows, meshes and microbatches.
        choices: number of each row's choice, see `Block.choices`.
        layers: how many layers of each row are rematerialised; None where all are.
        groups: the policies of layer groups by row, see `Candidate`; None where all groups are
            alike.
    """

    decisions: Decisions
    choices: Array
    layers: Array | None = None
    groups: list[Each] | None = None

    def take(self, which: Array) -> Offer:
        """Some of the rows."""
        return replace(
            self,
            choices=self.choices[which],
            layers=None if self.layers is None else self.layers[which],
            groups=None if self.groups is None else [self.groups[i] for i in which],
        )

    def but(self, **changes: object) -> Offer:
        """The same rows under other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    def candidate(self, row: int, choices: list[tuple[Choice, bool]]) -> Candidate:
        """The decisions of one row, on no mesh yet."""
        choice, routes = choices[int(self.choices[row])]
        if self.groups is not None:
            policy, layers = by_group(self.groups[row])
            each = self.groups[row]
        else:
            policy, each = self.decisions.remat, ()
            layers = 0 if self.layers is None else int(self.layers[row])
        return Candidate(
            decisions=replace(self.decisions, remat=policy, remat_layers=layers),
            choice=choice,
            groups=each,
            routes=routes,
        )


def _runs(values: Array) -> Array:
    """Position of the first of each run of equal values, for every value."""
    return np.maximum.accumulate(
        np.where(np.concatenate(([True], values[1:] != values[:-1])), np.arange(len(values)), 0)
    )


class Least:
    """The least of some quantity for each candidate of a block, with the offer that has it; of
    equal ones the first choice, then the first offer.

    Args:
        size: number of candidates.
    """

    def __init__(self, size: int) -> None:
        self.values, self.offers, self.rows, self._choices = (
            np.full(size, np.inf),
            np.full(size, -1),
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.int64),
        )

    def take_in(
        self, number: int, offer: Offer, candidates: Array, values: Array, rows: Array
    ) -> None:
        """Takes in an offer."""
        choices = offer.choices[rows]
        previous = self.values[candidates]
        better = (values < previous * (1 - TIE)) | (
            (values <= previous * (1 + TIE))
            & (choices < self._choices[candidates])
            & np.isfinite(values)
        )
        improved = np.flatnonzero(better)
        if not len(improved):
            return
        improved = improved[
            _first_choices(candidates[improved], values[improved], choices[improved])
        ]
        into = candidates[improved]
        self.values[into], self.offers[into], self.rows[into], self._choices[into] = (
            values[improved],
            number,
            rows[improved],
            choices[improved],
        )


def _first_choices(candidates: Array, values: Array, choices: Array) -> Array:
    """For each candidate the position of the row with the first choice among those whose value is
    the least, but for rounding; ascending by candidate.

    A candidate may have many rows, and values that should be equal differ in their last digits. So
    rows are sorted twice: by value, to know the least of each candidate and which rows are within
    a tie of it; then those by choice, to take the first.

    >>> candidates, choices = np.array([4, 4, 4, 9]), np.array([2, 1, 0, 5])
    >>> _first_choices(candidates, np.array([1.0, 1.0 + 1e-12, 3.0, 2.0]), choices)
    array([1, 3])
    """
    order = np.lexsort((choices, values, candidates))
    minima = values[order][_runs(candidates[order])]
    order = order[values[order] <= minima * (1 + TIE)]
    order = order[np.lexsort((choices[order], candidates[order]))]
    return order[np.unique(_runs(candidates[order]))]
