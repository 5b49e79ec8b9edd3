"""What do the quantities of a step cost, on many candidates at once?

A candidate is a mesh with its place on the links and a number of microbatches. `combine` does
everything that is no sum: hiding communication behind compute, pipeline bubbles, the largest of
several memory points.

With m microbatches and S stages, a stage is busy for `tick` seconds with one microbatch, forward
and backward: its layers and its part of the ends of the model.

    step = m x tick + groups x waiting(schedule) + exposed parameters and gradients + optimizer + overhead

`Seconds.compute` and `exposed` are what a stage is busy with on the average; `bubble` is the rest:
waiting, and stages that have less work than the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from shardlib.axes import TOKEN_AXES
from shardlib.cost.machine.collective_tables import SLOTS, Slot, role_slots, stored
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.gradient_reduction import in_the_last, once_a_step, scatters
from shardlib.cost.pricing.pipeline_stages import (
    bottleneck,
    passes_over_weights,
    slowest,
)
from shardlib.cost.tables.coefficients import BYTES, COUNTS, Pricer, Q
from shardlib.cost.terms.framework import XLA, Stack
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import ENDS
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Priced candidates, as arrays; the names are those of `Seconds` and `DeviceBytes`.

    Attributes:
        seconds: parts of the step time per candidate.
        device_bytes: parts of the memory per candidate.
        flops: executed per device and step, on the average of all stages.
        stacks: bytes that the forward pass saves of layers, less two layers: what offloading can
            move.
        held: microbatches whose activations are there at once.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    flops: Array
    stacks: Array
    held: Array

    @cached_property
    def step_seconds(self) -> Array:
        """Seconds of a step per candidate."""
        return sum(self.seconds.values(), np.zeros_like(self.flops))

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes per device per candidate."""
        return sum(self.device_bytes.values(), np.zeros_like(self.flops))

    def take(self, which: Array) -> Totals:
        """Some of the candidates."""
        return Totals(
            stacks=self.stacks[which],
            held=self.held[which],
            seconds={k: v[which] for k, v in self.seconds.items()},
            device_bytes={k: v[which] for k, v in self.device_bytes.items()},
            flops=self.flops[which],
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """What pricing knows of a model beside its items.

    Attributes:
        counts: layers of each class.
        batch_bytes: bytes of the global batch.
        state_bytes: bytes of model state that is replicated.
        largest_end: the largest share that one array has of the parameters outside of all layers.
        reduction: bytes of gradients on the wire over those as traced.
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
class Point:
    """Bytes by segment at a point where memory may peak, arrays [segments, candidates]; names as in
    `shardlib.cost.tables.coefficients.Q`.
    """

    saved: Array
    temporary: Array
    gradient: Array
    gradient_cut: Array
    copy: Array
    copy_cut: Array
    cast: Array
    gathered: Array


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The quantities of one remat policy under one choice, by segment and candidate, with
    collectives as seconds: what all ZeRO stages and schedules share.

    Attributes:
        compute, block, context, keys, ring, exchange, reduce, scatter, gather: seconds of kernels
            and of the collectives of each role, a microbatch; arrays [segments, candidates].
        routed: those of `reduce` that are gradients of experts on their devices.
        passes: seconds of handing activations to the next stage and cotangents back, a microbatch
            and chunk.
        weights: seconds of kernels for gradients of weights, all segments.
        host: seconds that the host takes to launch the kernels, a microbatch; array [segments,
            candidates].
        flops: all segments.
        parameters, parameters_cut, frozen, frozen_cut, state, state_cut, experts, kept, kept_cut:
            bytes at rest; arrays [segments, candidates].
        buffer: bytes of keys and values gathered along the context.
        stacks: bytes that loops over layers have saved when the last one ends, array [segments,
            candidates]; [0, candidates] where nobody asks.
        points: memory.
        ticks: seconds of one microbatch on the slowest stage by (how keys and values meet queries,
            chunks a stage), filled as they are asked for.
    """

    compute: Array
    block: Array
    context: Array
    keys: Array
    ring: Array
    exchange: Array
    reduce: Array
    scatter: Array
    gather: Array
    routed: Array
    passes: Array
    weights: Array
    host: Array
    flops: Array
    parameters: Array
    parameters_cut: Array
    frozen: Array
    frozen_cut: Array
    state: Array
    state_cut: Array
    experts: Array
    kept: Array
    kept_cut: Array
    buffer: Array
    stacks: Array
    points: tuple[Point, ...]
    ticks: dict[tuple[str, int], Array] = field(
        default_factory=dict[tuple[str, int], Array], init=False, compare=False, repr=False
    )

    def along(self, how: Knobs) -> Array:
        """Seconds of collectives along the sequence that compute waits for."""
        return self.context + (
            self.keys
            if how.context == "all-gather"
            else self.exchange
            if how.context == "ulysses"
            else 0.0
        )

    def take(self, which: Array) -> Sums:
        """Some of the candidates."""
        found = Sums(
            points=tuple(
                Point(**{one.name: getattr(point, one.name)[:, which] for one in fields(Point)})
                for point in self.points
            ),
            **{name: getattr(self, name)[..., which] for name in _ARRAYS},
        )
        found.ticks.update({key: tick[which] for key, tick in self.ticks.items()})
        return found


#: The fields of `Sums` that are arrays, the last dim candidates.
_ARRAYS: tuple[str, ...] = tuple(
    one.name for one in fields(Sums) if one.name not in ("points", "ticks")
)


def joined(parts: Sequence[Sums]) -> Sums:
    """The candidates of several, one after the other; where one has fewer points of memory than
    others, its first stands for the others.
    """
    count = max(len(part.points) for part in parts)
    points = [(*part.points, *part.points[:1] * (count - len(part.points))) for part in parts]
    return Sums(
        points=tuple(
            Point(
                **{
                    one.name: np.concatenate(
                        [getattr(listed[i], one.name) for listed in points], axis=1
                    )
                    for one in fields(Point)
                }
            )
            for i in range(count)
        ),
        **{
            name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in _ARRAYS
        },
    )


def sums(
    work: Array,
    rest: Array,
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
        rest: tally of `rest_items`.
        points: tallies of memory items at each point where memory may peak.
        model: layers.
        pricer: the corrections.
        c: the candidates.
        stacks: tally of what loops over layers have saved.
    """
    at = c.shape
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
        found = np.zeros((work.shape[0], len(c)))
        for i in used:
            found += factors[i] * (
                counts[:, i][:, at] * c.links.latency[slots[i]]
                + sizes[:, i][:, at] * c.links.per_byte[slots[i]]
            )
        return found

    def point(tally: Array) -> Point:
        tally = pricer.corrected(tally)
        return Point(
            saved=tally[:, Q.SAVED][:, at],
            temporary=tally[:, Q.TEMPORARY][:, at],
            gradient=tally[:, Q.GRADIENT][:, at],
            gradient_cut=tally[:, Q.GRADIENT_CUT][:, at],
            copy=tally[:, Q.COPY][:, at],
            copy_cut=tally[:, Q.COPY_CUT][:, at],
            cast=tally[:, Q.CAST][:, at],
            gathered=tally[:, Q.GATHERED][:, at],
        )

    return Sums(
        compute=work[:, Q.COMPUTE][:, at],
        block=role("block"),
        context=role("context"),
        keys=role("keys"),
        ring=role("ring"),
        exchange=role("exchange"),
        reduce=role("reduce"),
        scatter=role("scatter"),
        gather=role("gather"),
        routed=role("reduce", experts=True),
        passes=role("stage")[ENDS],
        weights=work[:, Q.WEIGHTS].sum(0)[at],
        host=work[:, Q.HOST][:, at],
        flops=work[:, Q.FLOPS].sum(0)[at],
        parameters=rest[:, Q.PARAMETERS][:, at],
        parameters_cut=rest[:, Q.PARAMETERS_CUT][:, at],
        frozen=rest[:, Q.FROZEN][:, at],
        frozen_cut=rest[:, Q.FROZEN_CUT][:, at],
        state=rest[:, Q.STATE][:, at],
        state_cut=rest[:, Q.STATE_CUT][:, at],
        experts=rest[:, Q.EXPERTS][:, at],
        kept=rest[:, Q.KEPT][:, at],
        kept_cut=rest[:, Q.KEPT_CUT][:, at],
        buffer=np.where(c.context > 1, _context_buffer(work, model)[at], 0.0),
        stacks=(
            np.zeros((0, len(at)))
            if stacks is None
            else pricer.corrected(stacks)[:, Q.SAVED][:, at]
        ),
        points=tuple(map(point, points)),
    )


def combine(s: Sums, how: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Totals:
    """Turns quantities into the parts of time and memory.

    Args:
        s: the quantities.
        how: the other decisions, but for what is in host memory (`offloaded`).
        model: layers, and bytes of the batch.
        pricer: constants.
        c: the candidates.
    """
    stack = pricer.stack
    scale, resting = shares_of(how, model, c, stack), shares_at_rest(how, model, c, stack)
    held = named(how.schedule).in_flight(_pipelines(how, c, stack))
    parameters, frozen, gradients, state = _at_rest(s, resting, how, model, stack, c)
    seconds, flops = _time(s, scale, how, model, pricer, c)
    memory, stacks = _memory(s, gradients, scale, held, how, model, c, stack)
    memory |= {
        "parameters": parameters,
        "frozen": frozen,
        "optimizer": state,
        "batch": model.batch_bytes / c.ways(TOKEN_AXES) + model.state_bytes,
    }
    updated = _on_stage(s.parameters_cut if how.zero >= 1 else s.parameters, resting)
    update = (3 * updated + 2 * state) / (
        pricer.topology.chip.hbm_bytes_per_s * pricer.constants.update_share
    )
    seconds["overhead"] = (
        seconds["overhead"]
        + pricer.constants.step_s
        + pricer.constants.microbatch_s * (c.micro + how.accumulation * (c.stage - 1))
    )
    memory["temporaries"] = (
        memory["temporaries"]
        + (stack.fragmentation - 1) * sum(memory.values())
        + stack.runtime_bytes
    )
    return Totals(
        seconds={**seconds, "optimizer": update},
        device_bytes=memory,
        flops=flops,
        stacks=stacks,
        held=held,
    )


def _virtual(how: Knobs, c: Candidates) -> Array:
    return np.where(c.stage > 1, how.virtual, 1)


def _pipelines(how: Knobs, c: Candidates, stack: Stack) -> Pipelines:
    """The pipelines of candidates, each with the microbatches of one group."""
    return Pipelines(
        stages=c.stage,
        chunks=_virtual(how, c),
        microbatches=c.micro // how.accumulation,
        lockstep=stack.pipeline == "lockstep",
    )


def shares_of(how: Knobs, model: Model, c: Candidates, stack: Stack = XLA) -> Array:
    """Part of each segment that the fullest stage has: whole layers of every class, and of the ends
    an equal part or an array; array [segments, candidates].
    """
    virtual = _virtual(how, c)
    layers = [_most(count, c, virtual, model, stack) / count for count in model.counts]
    ends = np.where(c.stage > 1, model.largest_end, 1.0) if stack.ends == "owners" else 1 / c.stage
    return np.stack([*layers, np.ones(len(c)), ends])


def shares_at_rest(how: Knobs, model: Model, c: Candidates, stack: Stack = XLA) -> Array:
    """Part of each segment's parameters, gradients and optimizer state that the fullest stage has:
    as `shares_of`, but every stage has all of ends whose work is spread over the sequence.
    """
    found = shares_of(how, model, c, stack)
    if stack.ends == "spread":
        found[ENDS] = 1.0
    return found


def _most(count: int, c: Candidates, virtual: Array, model: Model, stack: Stack) -> Array:
    """Layers of a class that the fullest stage has: equally many, or, where stages are cut by work,
    those that begin before its part of the work is done.
    """
    equal = virtual * np.ceil(count / (c.stage * virtual))
    if stack.balance == "layers":
        return equal
    return np.where(
        (c.stage > 1) & (virtual == 1),
        np.minimum(count, np.floor((count + model.head_layers) / c.stage) + 1),
        equal,
    )


def _on_stage(quantity: Array, scale: Array) -> Array:
    """What the fullest stage has of a quantity by segment."""
    return (quantity * scale).sum(0)


def least_seconds(s: Sums, how: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of a step with all gathers of parameters and reductions of gradients hidden: what no
    ZeRO stage changes.
    """
    stages = c.stage
    tick = tick_seconds(s, how, model, pricer, c)
    each = named(how.schedule).waiting(_pipelines(how, c, pricer.stack), tick, s.weights / stages)
    return c.micro * tick + np.where(stages > 1, how.accumulation * each, 0.0)


def _passes(s: Sums, how: Knobs, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of handing a microbatch from stage to stage and back, that nothing hides."""
    return np.where(c.stage > 1, s.passes * _virtual(how, c), 0.0) * (1 - pricer.stack.send_overlap)


def tick_seconds(s: Sums, how: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of one microbatch on the slowest stage, forward and backward."""
    key = how.context, how.virtual
    if key not in s.ticks:
        stages, virtual = c.stage, _virtual(how, c)
        busy = s.compute + s.block + s.along(how)
        layers = [busy[k] / count for k, count in enumerate(model.counts)]
        if pricer.stack.ends == "owners":
            tick = slowest(layers, model.counts, busy[ENDS], stages, virtual)
        else:
            tick = (
                virtual * bottleneck(layers, model.counts, stages * virtual) + busy[ENDS] / stages
            )
        s.ticks[key] = tick + _passes(s, how, pricer, c) + _starved(s, busy, c)
    return s.ticks[key]


def _starved(s: Sums, busy: Array, c: Candidates) -> Array:
    """Seconds of a microbatch that a stage waits for the host to launch kernels: where launching
    takes longer than running them.
    """
    return np.maximum(0.0, s.host.sum(0) - busy.sum(0)) / c.stage


def _time(
    s: Sums, scale: Array, how: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> tuple[dict[str, Array], Array]:
    """Seconds of compute, exposed communication and bubble; and FLOPs."""
    stages, micro = c.stage, c.micro
    block = s.block + s.along(how)
    compute, blocked = s.compute.sum(0) / stages, block.sum(0) / stages + _passes(s, how, pricer, c)
    starved = _starved(s, s.compute + block, c)
    bubble = np.where(
        stages > 1,
        least_seconds(s, how, model, pricer, c) - micro * (compute + blocked + starved),
        0.0,
    )
    exposed = blocked * micro + _exposed(s, scale, how, c, pricer, compute)
    return {
        "compute": compute * micro,
        "exposed": exposed,
        "bubble": np.maximum(bubble, 0.0),
        "overhead": starved * micro,
    }, s.flops / stages * micro


def _exposed(
    s: Sums, scale: Array, how: Knobs, c: Candidates, pricer: Pricer, compute: Array
) -> Array:
    """Seconds of gathers of parameters, reductions of gradients and rings of keys and values that
    compute does not hide, in a step.

    XLA hides all of them behind all of compute. A stack that says what it hides has its gathers in
    the forward pass (a third of compute) or, under ZeRO 3, in both, and its reductions in the
    backward pass (two thirds), of the last microbatch where it reduces once a step.
    """
    stack, micro, constants = pricer.stack, c.micro, pricer.constants
    reduced, gathered = _reduced(s, scale, how, c, stack), np.zeros(len(c))
    if how.zero:
        gathered = (
            _on_stage(s.gather, scale) * _passes_over(how, c)[0]
            if how.zero >= 3
            else _updated_gather(s, scale, c)
        )
    ring = s.ring.sum(0) / c.stage * micro if how.ring else np.zeros(len(c))
    if stack.gather_overlap is None and stack.reduce_overlap is None:
        if in_the_last(
            stack, how
        ):  # without stages, beside the backward pass of the last microbatch
            late = np.maximum(0.0, reduced - constants.overlap * compute) + np.maximum(
                0.0, gathered + ring - constants.overlap * compute * (micro - 1)
            )
            return np.where(
                (c.stage > 1) | (micro == 1),
                np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro),
                late,
            )
        return np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro)
    gathers, reduces = (
        constants.overlap if share is None else share
        for share in (stack.gather_overlap, stack.reduce_overlap)
    )
    beside = compute * micro if how.zero >= 3 else compute / 3
    backward = compute * (1 if once_a_step(stack, how) else micro) * 2 / 3
    apart = np.maximum(0.0, gathered - gathers * beside) + np.maximum(
        0.0, reduced - reduces * backward
    )
    together = (
        gathered + reduced - max(gathers, reduces) * compute * micro
    )  # nothing hides two of them at once
    return np.maximum(apart, together) + np.maximum(0.0, ring - constants.overlap * compute * micro)


def saved_by_gathering_once(
    s: Sums, how: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> Array:
    """Seconds of a step that a pipeline with ZeRO 3 saves which gathers weights and reduces
    gradients once for all microbatches, and not at every use.
    """
    scale, compute = shares_of(how, model, c, pricer.stack), s.compute.sum(0) / c.stage
    use, once = (
        _exposed(s, scale, replace(how, gather=gather), c, pricer, compute)
        for gather in ("use", "once")
    )
    return use - once


def _reduced(s: Sums, scale: Array, how: Knobs, c: Candidates, stack: Stack) -> Array:
    """Seconds of reductions of gradients: in every microbatch; once a step in a pipeline without
    ZeRO 2 and 3, and where the stack does so, but for those of experts on their devices.
    """
    seconds = _on_stage(s.scatter if scatters(stack, how) else s.reduce, scale)
    if once_a_step(stack, how):
        return seconds
    if how.zero >= 2:
        return seconds * _passes_over(how, c)[1]
    if in_the_last(stack, how):
        return seconds + np.where(c.stage > 1, 0.0, _on_stage(s.routed, scale) * (c.micro - 1))
    return seconds * np.where(c.stage > 1, 1, c.micro)


def _passes_over(how: Knobs, c: Candidates) -> tuple[Array, Array, float]:
    return passes_over_weights(how.schedule, how.gather, how.virtual, c.micro, how.accumulation)


def _updated_gather(s: Sums, scale: Array, c: Candidates) -> Array:
    """Seconds of the gather of updated parameters after the optimizer (ZeRO 1, 2)."""
    experts = _on_stage(s.experts, scale)
    dense = _on_stage(s.parameters, scale) - experts
    found = np.zeros(len(c))
    for group, size in ((stored(), dense), (stored(experts=True), experts)):
        at = SLOTS.index(Slot("gather", group, "all-gather"))
        found += np.where(size > 0, c.links.latency[at] + size * c.links.per_byte[at], 0.0)
    return found


def _at_rest(
    s: Sums, scale: Array, how: Knobs, model: Model, stack: Stack, c: Candidates
) -> tuple[Array, Array, Array, Array]:
    """Bytes of trained and of frozen parameters, of gradients and of optimizer state at rest; whole
    ones beside the pieces where a stage gathers and reduces once a step.
    """
    frozen = _on_stage(s.frozen_cut if how.zero >= 3 else s.frozen, scale)
    parameters, gradients = (
        _on_stage(s.parameters_cut if how.zero >= 3 else s.parameters, scale),
        _on_stage(s.kept_cut if how.zero >= 2 else s.kept, scale),
    )
    whole = (
        (1.0 if stack.stage_gathers == "step" else _passes_over(how, c)[2])
        if how.zero >= 3
        else 0.0
    )
    if whole:
        parameters = parameters + np.where(
            c.stage > 1, _on_stage(s.parameters, scale) * model.working * whole, 0.0
        )
        gradients = gradients + np.where(c.stage > 1, _on_stage(s.kept, scale) * whole, 0.0)
    return (
        parameters,
        frozen,
        gradients,
        _on_stage(s.state_cut if how.zero >= 1 else s.state, scale),
    )


def least_bytes(
    s: Sums, how: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> tuple[Array, Array, Array]:
    """Bytes that a device has at the least when the forward pass ends: of arrays at rest but for
    the optimizer's state, of that state, and of each class's saved layers.

    Returns:
        Arrays [candidates], [candidates] and [classes, candidates].
    """
    stack = pricer.stack
    scale, layers = shares_of(how, model, c, stack), len(model.counts)
    held = named(how.schedule).in_flight(_pipelines(how, c, stack))
    parameters, frozen, gradients, state = _at_rest(
        s, shares_at_rest(how, model, c, stack), how, model, stack, c
    )
    batch = model.batch_bytes / c.ways(TOKEN_AXES) + model.state_bytes
    return (
        parameters
        + frozen
        + batch
        + (gradients if stack.gradient_buffer else np.where(c.micro > 1, gradients, 0.0)),
        state,
        s.stacks[:layers] * scale[:layers] * held,
    )


def _memory(
    s: Sums,
    gradients: Array,
    scale: Array,
    held: Array,
    how: Knobs,
    model: Model,
    c: Candidates,
    stack: Stack,
) -> tuple[dict[str, Array], Array]:
    """Bytes of what a step makes, by part; and those of the stacks that the forward pass saves,
    less two layers, which offloading could move.
    """
    zeros, together = np.zeros(len(c)), stack.collected == "together"

    def parts(
        point: Point, scale: Array, flying: Array, resting: Array
    ) -> tuple[Array, Array, Array, Array]:
        saved = _on_stage(point.saved, flying) + _on_stage(
            point.copy_cut if how.zero >= 3 else point.copy, resting
        )
        if how.zero < 3:
            saved = saved + np.where(c.stage > 1, 0.0, _on_stage(point.cast, resting))
        alive = (
            zeros
            if stack.gradient_buffer
            else _on_stage(
                point.gradient if together or how.zero < 2 else point.gradient_cut, resting
            )
        )
        return saved, _on_stage(point.temporary, scale), alive, in_use(point, resting, alive)

    def in_use(point: Point, scale: Array, alive: Array) -> Array:
        if how.zero < 3:
            return zeros
        return (
            np.maximum(0.0, _on_stage(s.parameters + s.frozen, scale) - alive)
            if together
            else _on_stage(point.gathered, scale)
        )

    occupied = _occupied(scale, held, how, c, stack)
    listed = [parts(point, *stage) for stage in occupied for point in s.points]
    saved, temporaries, alive, gathered = listed[0] if listed else (zeros,) * 4
    if len(listed) > 1:
        at = np.argmax(np.stack([sum(point) for point in listed]), axis=0)
        saved, temporaries, alive, gathered = (
            np.choose(at, list(part)) for part in zip(*listed, strict=True)
        )
    stacks, flying = zeros, occupied[0][1]
    for point in s.points:
        stacks = np.maximum(
            stacks,
            sum(
                (
                    point.saved[k] * flying[k] * np.maximum(0.0, 1 - 2 / (n * scale[k]))
                    for k, n in enumerate(model.counts)
                ),
                zeros,
            ),
        )
    memory = {
        "gradients": (
            alive + (gradients if stack.gradient_buffer else np.where(c.micro > 1, gradients, 0.0))
        ),
        "activations": saved,
        "temporaries": temporaries,
        "communication": gathered + (s.buffer if how.context == "all-gather" else 0.0),
    }
    return memory, np.minimum(stacks, saved)


def _occupied(
    scale: Array, held: Array, how: Knobs, c: Candidates, stack: Stack
) -> list[tuple[Array, Array, Array]]:
    """Stages whose memory may be the fullest, as parts of each segment: of values made once, of
    values that every microbatch in flight has, and of parameters and gradients.

    Where the ends are spread all stages are alike. Otherwise the first holds the most microbatches,
    and the last the logits.
    """
    layers = len(scale) - 2
    first = scale.copy()
    first[:layers] *= held
    if stack.ends == "spread":
        resting = scale.copy()
        resting[ENDS] = 1.0
        return [(scale, first, resting)]
    with_head, without = scale.copy(), scale.copy()
    with_head[ENDS], without[ENDS] = 1.0, np.where(c.stage > 1, 0.0, 1.0)
    first[ENDS] = without[ENDS]
    last = with_head.copy()
    last[:layers] *= named(how.schedule).held_by_last(_pipelines(how, c, stack))
    return [(without, first, without), (with_head, last, with_head)]


def _context_buffer(work: Array, model: Model) -> Array:
    """Bytes of the keys and values of one layer, gathered along the context: half of what forward
    and backward gather.
    """
    rows = [
        BYTES + number
        for number, slot in enumerate(SLOTS)
        if slot.role in ("context", "keys") and slot.kind == "all-gather"
    ]
    found = np.zeros(work.shape[-1])
    for k, count in enumerate(model.counts):
        found = np.maximum(found, work[k, rows].sum(0) / (2 * count))
    return found
