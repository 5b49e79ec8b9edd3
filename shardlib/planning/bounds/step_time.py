"""Lower bounds of a step, before anything is placed: the seconds that no plan can beat.

A stage is busy in every microbatch with kernels and with the collectives that compute waits for.
With every group of axes on the fastest links that it could have alone, all stages equally full,
messages between stages on the fastest links and the smallest bubble of any schedule, that is a
bound of the step time. Gathers of parameters and reductions of gradients may hide behind compute,
so it leaves them out. It is a sum over the components of the colours
(`planning/space/table_components.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from shardlib.axes import MESH_AXES
from shardlib.cost.machine.best_links import best_links, least_hops
from shardlib.cost.machine.collective_tables import ALONG, role_slots
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.coefficients import Tally
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import BYTES, COUNTS, ROWS, Q
from shardlib.planning.bounds.tick import QUANTITIES, Tick
from shardlib.planning.space import schedules
from shardlib.planning.space.table_components import Parts, Scope, Under, alone
from shardlib.propagation.assignment import Choice
from shardlib.schedules.table import most_put_off

Array = np.ndarray
#: In the place of a policy: for each layer group the least of all policies.
EACH = "each"


class Bounds:
    """Lower bounds of step times.

    Args:
        scope: the choices.
        pricer: the machine.
        values: measures on all shapes of the space.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: Values) -> None:
        self._pricer, self._values = pricer, values
        self._waiting, self._ring = waited(scope), hidden(scope)
        self._alike = len(scope.load.counts) == 1 and pricer.profile.embedding_and_head != "owners"
        self._layers, self._put_off = (
            len(scope.load.counts),
            most_put_off(lockstep=pricer.profile.pipeline == "lockstep"),
        )
        work = values.work
        none = np.ones(len(work), dtype=np.int64)
        self._links = best_links(
            {
                **dict.fromkeys(MESH_AXES, none),
                "expert": work.expert,
                "context": work.context,
                "tensor": work.tensor,
            },
            pricer.topology,
        )
        self._first = np.zeros(len(work), dtype=np.int64)
        self._first[values.which[::-1]] = np.arange(len(values.which))[::-1]
        self._parts = {
            policy: Parts(
                scope, scope.accounts.work[policy, scope.routes], work, self._seconds, QUANTITIES
            )
            for policy in scope.space.policies
        }
        self._by_class = (
            [
                [
                    Parts(
                        scope,
                        scope.accounts.work[policy, scope.routes],
                        work,
                        partial(self._of_segment, segment),
                        QUANTITIES,
                    )
                    for policy in scope.space.policies
                ]
                for segment in range(self._layers + 2)
            ]
            if scope.space.apart
            else []
        )

    def work_of(self, shapes: Array) -> Array:
        """Numbers of shapes that kernels tell apart, of some shapes by number."""
        return self._values.which[shapes]

    def tick(self, policy: str, choice: Choice, shapes: Array) -> Tick:
        """What a microbatch takes under a choice, on some shapes by number."""
        return self.ticks(policy, alone(choice, len(shapes)), shapes)

    def ticks(self, policy: str, row_choices: Under, shapes: Array) -> Tick:
        """What a microbatch takes under choices, on some shapes by number."""
        if policy != EACH:
            return Tick(self._parts[policy].total(row_choices, self._values.which[shapes]))
        return Tick(
            sum(
                (
                    np.minimum.reduce(
                        [parts.total(row_choices, self._values.which[shapes]) for parts in segment]
                    )
                    for segment in self._by_class
                ),
                np.zeros((QUANTITIES, len(shapes))),
            )
        )

    def least(self, policy: str, shapes: Array, first: int | None = None) -> Tick:
        """The least of all choices on some shapes, by number; infinite where no choice fits. With
        `first`, as `Parts.least` takes it, a bound of it.
        """
        if policy != EACH:
            return Tick(self._parts[policy].least(self._values.which[shapes], first))
        work, which = np.unique(self._values.which[shapes], return_inverse=True)
        return Tick(
            sum(
                (
                    np.minimum.reduce([parts.least(work, first) for parts in segment])
                    for segment in self._by_class
                ),
                np.zeros(1),
            )[:, which]
        )

    def _of_segment(self, segment: int, tally: Tally, shapes: Array) -> Array:
        """See `_seconds`, of one segment."""
        of_segment = tally.rows // ROWS == segment
        return self._seconds(
            replace(tally, rows=tally.rows[of_segment], matrix=tally.matrix[of_segment]), shapes
        )

    def _seconds(self, tally: Tally, shapes: Array) -> Array:
        """The rows of a `Tick`, on some of the shapes but for fsdp."""
        block, ring, stage = self._waiting, self._ring, role_slots("stage")
        waits = [first + slot for first in (COUNTS, BYTES) for slot in block]

        def rows_of(segments: int, quantities: list[int]) -> Array:
            folded = tally.folded(ROWS * segments, ROWS, quantities)
            rows = np.zeros((ROWS, len(shapes)))
            rows[folded.rows] = folded.on(self._values, self._first[shapes])
            return self._pricer.corrected(rows)

        def waiting(rows: Array, slots: list[int]) -> Array:
            used = [slot for slot in slots if rows[COUNTS + slot].any()]
            shares = self._pricer.waits(used)[:, 0] if used else ()
            return sum(
                (
                    share
                    * (
                        rows[COUNTS + slot] * self._links.latency[slot, shapes]
                        + rows[BYTES + slot] * self._links.per_byte[slot, shapes]
                    )
                    for share, slot in zip(shares, used, strict=True)
                ),
                np.zeros(len(shapes)),
            )

        rows = rows_of(
            self._layers + 2,
            [
                Q.COMPUTE,
                Q.WEIGHTS,
                *waits,
                *(first + slot for first in (COUNTS, BYTES) for slot in (*ring, *stage)),
            ],
        )
        blocked = waiting(rows, block)
        busy, layers = rows[Q.COMPUTE] + blocked, np.zeros(len(shapes))
        if self._alike:
            inside = rows_of(1, [Q.COMPUTE, *waits])
            layers = inside[Q.COMPUTE] + waiting(inside, block)
        (hop,), (share,) = stage, self._pricer.waits(stage)[:, 0]
        return np.stack(
            [
                busy,
                busy - self._put_off * rows[Q.WEIGHTS],
                busy - self._pricer.constants.overlap * rows[Q.COMPUTE] + waiting(rows, ring),
                share * rows[COUNTS + hop],
                share * rows[BYTES + hop],
                blocked,
                layers,
            ]
        )


def waited(scope: Scope) -> list[int]:
    """Slots of collectives that compute waits for."""
    along = ALONG[scope.space.strategy.decisions.context]
    return role_slots("block", *(role for role in along if role != "ring"))


def hidden(scope: Scope) -> list[int]:
    """Slots of what goes around a ring, beside compute."""
    along = ALONG[scope.space.strategy.decisions.context]
    return role_slots(*(role for role in along if role == "ring"))


def passing(tick: Tick, stages: Array, pricer: Pricer) -> Array:
    """Seconds of the messages of a microbatch and chunk of layers that no place undercuts, by
    candidate; see `step_seconds`.
    """
    latency, per_byte = least_hops(stages, pricer.topology)
    return np.where(
        np.isfinite(tick.messages),
        np.nan_to_num(tick.messages) * latency + np.nan_to_num(tick.message_bytes) * per_byte,
        0.0,
    ) * (1 - pricer.profile.send_overlap)


def step_seconds(
    tick: Tick,
    stages: Array,
    micro: Array,
    rounds: Array | None,
    layers: int,
    groups: int = 1,
    passes: Array | float = 0.0,
    hiding: Array | float = 0.0,
) -> Array:
    """A bound of the step time.

    Args:
        rounds: times that a stage waits as long as it is busy with a microbatch, at least
            (`Schedule.rounds`), by candidate, for one group; None in a schedule whose gradients of
            weights fill the time.
        passes: seconds of the messages of a microbatch.
        hiding: seconds of a step of what moves behind compute.
    """
    finite = np.isfinite(tick.busy)
    fuller = np.where(finite, tick.layers, 0.0) * (
        np.ceil(layers / stages) / max(layers, 1) - 1 / stages
    )
    busy, free, loaded = (
        seconds / stages + fuller + passes for seconds in (tick.busy, tick.free, tick.loaded)
    )
    waiting = (
        (stages - 1) * np.maximum(0.0, np.where(finite, free, 0.0))
        if rounds is None
        else rounds * np.where(finite, busy, 0.0)
    )
    return np.maximum(busy * micro, loaded * micro + hiding) + np.where(
        finite, groups * waiting, 0.0
    )


def breadth_first_seconds(
    tick: Tick,
    stages: Array,
    micro: Array,
    chunks: Array,
    layers: int,
    groups: int,
    passes: Array,
    hiding: Array | float = 0.0,
    *,
    pinned: bool,
) -> Array:
    """A bound of the step time of pipelines that take all microbatches through one chunk of layers
    before the next; more chunks have a smaller bubble and more messages.

    Args:
        tick, stages, micro, layers, groups: as `step_seconds` takes them.
        passes: seconds of the messages of a microbatch and chunk.
        hiding: seconds of a step of what moves behind compute.
    """
    fits = chunks > 0
    if not pinned:
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.sqrt(groups * (stages - 1) * tick.busy / stages / (micro * passes))
        chunks = np.clip(
            np.nan_to_num(best, nan=np.inf), schedules.FEWEST, np.maximum(chunks, schedules.FEWEST)
        )
    chunks = np.maximum(chunks, 1)
    return np.where(
        fits,
        step_seconds(
            tick, stages, micro, (stages - 1) / chunks, layers, groups, passes * chunks, hiding
        ),
        np.inf,
    )
