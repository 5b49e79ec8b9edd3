"""Seconds of gathers of parameters and reductions of gradients that no place undercuts.

They hide behind compute, but only behind so much of it: a step takes at least as long as they do,
and what compute cannot hide them (`Tick.loaded`). With every group of axes on the fastest links
that it could have alone they are a sum over the components of the colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from shardlib.axes import MESH_AXES
from shardlib.cost.machine.best_links import best_links
from shardlib.cost.machine.collective_tables import (
    INDEX,
    SLOTS,
    Links,
    Slot,
    role_slots,
    stored,
)
from shardlib.cost.pricing.gradient_reduction import in_the_last, once_a_step, scatters
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.coefficients import Tally
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import BYTES, COUNTS, ROWS, Q
from shardlib.cost.terms.framework_profiles import ends_on_all_stages
from shardlib.decisions.table import Decisions
from shardlib.planning.bounds.step_time import waited
from shardlib.planning.space.table_components import Parts, Scope, Under

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Seconds on the stage that has the most, at least; arrays [candidates].

    Attributes:
        gather: of gathers of parameters that are stored sharded, in a microbatch.
        scatter: of reductions of gradients to shards, in a microbatch.
        reduce: of reductions of gradients that are stored replicated, in a microbatch.
        routed: those of `reduce` that are gradients of experts on their devices.
        blocked: of collectives that compute waits for, in a microbatch and on all stages.
        updated: of the gather of updated parameters, in a step.
    """

    gather: Array
    scatter: Array
    reduce: Array
    routed: Array
    blocked: Array
    updated: Array

    def seconds(self, zero: int, pricer: Pricer, sizes: Mapping[str, Array], gather: str) -> Array:
        """Seconds of a step under a ZeRO stage."""
        micro, staged, decisions = sizes["micro"], sizes["stage"] > 1, Decisions(zero=zero)
        if zero == 3:
            times = np.where(staged, 0.5, micro) if gather == "once" else micro
            return self.gather * times + self.scatter * np.maximum(times, 1)
        updated = self.updated if zero else 0.0
        reduced = self.scatter if scatters(pricer.profile, decisions) else self.reduce
        if once_a_step(pricer.profile, decisions):
            return reduced + updated
        if zero == 2:
            return reduced * micro + updated
        if in_the_last(pricer.profile, decisions):
            return reduced + np.where(staged, 0.0, self.routed * (micro - 1)) + updated
        return reduced * np.where(staged, 1, micro) + updated

    def take(self, which: Array) -> Moved:
        """Some of the candidates."""
        return Moved(**{field.name: getattr(self, field.name)[which] for field in fields(Moved)})


class Traffic:
    """Bounds of what moves, for some candidates.

    Args:
        scope: the choices.
        pricer: machine and software.
        values: measures on all shapes of the space.
        shape: number of the shape of each candidate.
        sizes: of every mesh axis and "micro", by candidate.
        links: costs of collectives by candidate; those that no place undercuts by default.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        values: Values,
        shape: Array,
        sizes: Mapping[str, Array],
        links: Links | None = None,
    ) -> None:
        profile, stages, model = pricer.profile, sizes["stage"], scope.load.model
        self._values, self._shape, self._layers = values, shape, len(model.counts)
        self._distinct, self._place = np.unique(shape, return_inverse=True)
        # what hides where a profile says it itself is no part of `Tick.loaded`
        measured_here = profile.gather_overlap is None and profile.reduce_overlap is None
        if profile.embedding_and_head == "owners":
            ends = np.where(stages > 1, model.largest_end, 1.0)
        else:
            ends = np.ones(len(stages)) if ends_on_all_stages(profile) else 1 / stages
        layers = [np.ceil(count / stages) / count for count in model.counts]
        self._shares = np.stack([*layers, np.ones(len(stages)), ends])
        if links is None:
            links = best_links({axis: sizes[axis] for axis in MESH_AXES}, pricer.topology)
        waits = waited(scope)
        slots = sorted({*waits, *(role_slots(*_ROLES) if measured_here else ())})
        factors = pricer.waits(slots) * np.array(
            [
                [model.reduction if SLOTS[slot].role in ("reduce", "scatter") else 1.0]
                for slot in slots
            ]
        )
        into = np.array(
            [
                *([SLOTS[slot].role == role for slot in slots] for role in _ROLES),
                [SLOTS[slot].role == "reduce" and SLOTS[slot].group.of_experts for slot in slots],
                [slot in waits for slot in slots],
            ],
            dtype=float,
        )
        unsharded = np.array([slot in waits for slot in slots])
        self._roles = _Weights(
            rows=np.array([first + slot for first in (COUNTS, BYTES) for slot in slots]),
            rates=np.concatenate(
                [figures[slots] * factors for figures in (links.latency, links.per_byte)]
            ),
            into=np.concatenate([into, into], axis=1),
            whole=np.concatenate([unsharded, unsharded]),
        )
        dense, experts = (
            links.per_byte[INDEX[Slot("gather", stored(experts=flag), "all-gather")]]
            for flag in (False, True)
        )
        if not measured_here:
            dense, experts = np.zeros_like(dense), np.zeros_like(dense)
        self._updates = _Weights(
            rows=np.array([Q.PARAMETERS, Q.EXPERTS]),
            rates=np.stack([dense, experts - dense]),
            into=np.ones((1, 2)),
            whole=np.zeros(2, dtype=bool),
        )
        accounts, shapes = scope.accounts, values.shapes.take(shape)
        self._work = {
            policy: Parts(
                scope,
                accounts.work[policy, scope.routes],
                shapes,
                lambda tally, positions: self._seconds(tally, positions, self._roles),
                len(into),
            )
            for policy in scope.space.policies
        }
        self._rest = Parts(
            scope,
            accounts.rest,
            shapes,
            lambda tally, positions: self._seconds(tally, positions, self._updates),
            1,
        )

    def least(self, positions: Array) -> dict[str, Moved]:
        """The least of all choices by remat policy; infinite where none fits."""
        updates = self._rest.least(positions)
        return {
            policy: _moved(parts.least(positions), updates) for policy, parts in self._work.items()
        }

    def total(self, row_choices: Under, positions: Array) -> dict[str, Moved]:
        """What moves under choices by remat policy."""
        updates = self._rest.total(row_choices, positions)
        return {
            policy: _moved(parts.total(row_choices, positions), updates)
            for policy, parts in self._work.items()
        }

    def _seconds(self, tally: Tally, positions: Array, weights: _Weights) -> Array:
        """Seconds of the rows of a tally, by kind."""
        which = np.searchsorted(weights.rows, tally.rows % ROWS)
        which = np.minimum(which, len(weights.rows) - 1)
        weighted = np.flatnonzero(weights.rows[which] == tally.rows % ROWS)
        matrix, which = tally.matrix[weighted], which[weighted]
        used = np.flatnonzero(matrix.any(0))
        if not len(used):
            return np.zeros((len(weights.into), len(positions)))
        here = self._place[positions]
        present = np.zeros(len(self._distinct), dtype=bool)
        present[here] = True
        shapes, place = self._distinct[present], (np.cumsum(present) - 1)[here]
        values = matrix[:, used] @ self._values.stacked(
            tuple(tally.measures[i] for i in used), shapes
        )
        shares = np.where(
            weights.whole[which][:, None],
            1.0,
            self._shares[tally.rows[weighted] // ROWS][:, positions],
        )
        return weights.into[:, which] @ (
            values[:, place] * shares * weights.rates[which][:, positions]
        )


#: Roles of collectives, in the order of the first fields of `Moved`.
_ROLES = ("gather", "scatter", "reduce")


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """What some rows of a tally cost.

    Attributes:
        rows: of a segment, ascending.
        rates: seconds by row and candidate.
        into: which kinds of seconds each row is part of, array [kinds, rows].
        whole: which rows are those of all stages, and not of one.
    """

    rows: Array
    rates: Array
    into: Array
    whole: Array


def _moved(work: Array, updates: Array) -> Moved:
    gather, scatter, reduce, routed, blocked = work
    return Moved(
        gather=gather,
        scatter=scatter,
        reduce=reduce,
        routed=routed,
        blocked=blocked,
        updated=updates[0],
    )
