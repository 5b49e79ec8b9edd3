"""The quantities of a step by segment and candidate, with collectives as seconds: what all ZeRO
stages and schedules share.

`sums` turns tallies by shape into one `Sums` for each remat policy and choice; `Model` is what
pricing knows of a model beside its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.cost.machine.collective_tables import SLOTS, role_slots
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.tables.by_candidate import Collectives, Kernels, Point, StoredBytes
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import BYTES, COUNTS, Q
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Model:
    """What pricing knows of a model beside its items.

    Attributes:
        counts: layers of each class.
        batch_bytes: bytes of the global batch, and of results with a value for each of its rows.
        state_bytes: bytes of model state that is replicated.
        largest_end: the largest share that one array has of the parameters outside of all layers.
        reduction: bytes of gradients in their communication dtype over those as traced.
        working: bytes of an element in the dtype of the matmuls, over those of a parameter.
        head_layers: work of the matmuls outside of all layers, over that of a layer.
    """

    counts: tuple[int, ...]
    batch_bytes: float
    state_bytes: float
    largest_end: float = 1.0
    reduction: float = 1.0
    working: float = 1.0
    head_layers: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The quantities of one remat policy under one choice, by segment and candidate, with
    collectives as seconds: what all ZeRO stages and schedules share.

    Attributes:
        kernels: what kernels take.
        collectives: seconds of collectives.
        stored: bytes between steps.
        points: memory.
        buffer: bytes of keys and values gathered along the context, array [candidates].
        stacks: bytes that loops over layers have saved when the last one ends, array [segments,
            candidates]; [0, candidates] where nobody asks.
        ticks: seconds of one microbatch on the slowest stage by (how keys and values meet queries,
            chunks a stage), filled as they are asked for.
    """

    kernels: Kernels
    collectives: Collectives
    stored: StoredBytes
    points: tuple[Point, ...]
    buffer: Array
    stacks: Array
    ticks: dict[tuple[str, int], Array] = field(
        default_factory=dict[tuple[str, int], Array], init=False, compare=False, repr=False
    )

    def along(self, knobs: Knobs) -> Array:
        """Seconds of collectives along the sequence that compute waits for."""
        roles = self.collectives
        return roles.context + (
            roles.keys
            if knobs.context == "all-gather"
            else roles.exchange
            if knobs.context == "ulysses"
            else 0.0
        )

    def take(self, which: Array) -> Sums:
        """Some of the candidates."""
        selected = Sums(
            kernels=self.kernels.take(which),
            collectives=self.collectives.take(which),
            stored=self.stored.take(which),
            points=tuple(point.take(which) for point in self.points),
            buffer=self.buffer[which],
            stacks=self.stacks[:, which],
        )
        selected.ticks.update({key: tick[which] for key, tick in self.ticks.items()})
        return selected


def joined(parts: Sequence[Sums]) -> Sums:
    """The candidates of several, one after the other; where one has fewer points of memory than
    others, its first stands for the others.
    """
    count = max(len(part.points) for part in parts)
    points = [(*part.points, *part.points[:1] * (count - len(part.points))) for part in parts]
    return Sums(
        kernels=Kernels.joined([part.kernels for part in parts]),
        collectives=Collectives.joined([part.collectives for part in parts]),
        stored=StoredBytes.joined([part.stored for part in parts]),
        points=tuple(map(Point.joined, zip(*points, strict=True))),
        buffer=np.concatenate([part.buffer for part in parts]),
        stacks=np.concatenate([part.stacks for part in parts], axis=1),
    )


def sums(
    work: Array,
    resting: Array,
    points: Sequence[Array],
    model: Model,
    pricer: Pricer,
    c: Candidates,
    *,
    stacks: Array | None = None,
) -> Sums:
    """Turns tallies by shape into quantities by candidate.

    Args:
        work: tally of `work_items`, array [segments, rows, shapes].
    """
    shape = c.shape
    work = pricer.corrected(work)

    def role(name: str, *, experts: bool = False) -> Array:
        slots = [s for s in role_slots(name) if SLOTS[s].group.of_experts or not experts]
        counts, sizes = (
            work[:, [COUNTS + slot for slot in slots]],
            work[:, [BYTES + slot for slot in slots]],
        )
        used = [i for i in range(len(slots)) if counts[:, i].any()]
        factors = pricer.waits(slots)[:, 0] * (
            model.reduction if name in ("reduce", "scatter") else 1.0
        )
        seconds = np.zeros((work.shape[0], len(c)))
        for i in used:
            seconds += factors[i] * (
                counts[:, i][:, shape] * c.links.latency[slots[i]]
                + sizes[:, i][:, shape] * c.links.per_byte[slots[i]]
            )
        return seconds

    def point(tally: Array) -> Point:
        tally = pricer.corrected(tally)
        return Point(
            saved=tally[:, Q.SAVED][:, shape],
            temporary=tally[:, Q.TEMPORARY][:, shape],
            gradient=tally[:, Q.GRADIENT][:, shape],
            gradient_cut=tally[:, Q.GRADIENT_CUT][:, shape],
            copy=tally[:, Q.COPY][:, shape],
            copy_cut=tally[:, Q.COPY_CUT][:, shape],
            cast=tally[:, Q.CAST][:, shape],
            gathered=tally[:, Q.GATHERED][:, shape],
        )

    return Sums(
        kernels=Kernels(
            compute=work[:, Q.COMPUTE][:, shape],
            weights=work[:, Q.WEIGHTS].sum(0)[shape],
            host=work[:, Q.HOST][:, shape],
            flops=work[:, Q.FLOPS].sum(0)[shape],
        ),
        collectives=Collectives(
            block=role("block"),
            context=role("context"),
            keys=role("keys"),
            ring=role("ring"),
            exchange=role("exchange"),
            reduce=role("reduce"),
            scatter=role("scatter"),
            gather=role("gather"),
            routed=role("reduce", experts=True),
            passes=role("stage")[OUTSIDE_LAYERS],
            ends=role("ends")[OUTSIDE_LAYERS],
        ),
        stored=StoredBytes(
            parameters=resting[:, Q.PARAMETERS][:, shape],
            parameters_cut=resting[:, Q.PARAMETERS_CUT][:, shape],
            frozen=resting[:, Q.FROZEN][:, shape],
            frozen_cut=resting[:, Q.FROZEN_CUT][:, shape],
            state=resting[:, Q.STATE][:, shape],
            state_cut=resting[:, Q.STATE_CUT][:, shape],
            experts=resting[:, Q.EXPERTS][:, shape],
            kept=resting[:, Q.KEPT][:, shape],
            kept_cut=resting[:, Q.KEPT_CUT][:, shape],
        ),
        points=tuple(map(point, points)),
        buffer=np.where(c.context > 1, _context_buffer(work, model)[shape], 0.0),
        stacks=(
            np.zeros((0, len(shape)))
            if stacks is None
            else pricer.corrected(stacks)[:, Q.SAVED][:, shape]
        ),
    )


def _context_buffer(work: Array, model: Model) -> Array:
    """Bytes of the keys and values of one layer, gathered along the context: half of what forward
    and backward gather.
    """
    rows = [
        BYTES + number
        for number, slot in enumerate(SLOTS)
        if slot.role in ("context", "keys") and slot.kind == "all-gather"
    ]
    largest = np.zeros(work.shape[-1])
    for k, count in enumerate(model.counts):
        largest = np.maximum(largest, work[k, rows].sum(0) / (2 * count))
    return largest
