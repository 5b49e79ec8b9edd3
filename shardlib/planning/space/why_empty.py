"""Why no plan is legal under the pins, as the error to raise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardlib.axes import BATCH_AXES, INNER_AXES, STORED_AXES, MeshShape
from shardlib.cost.step.routed_experts import expert_colour
from shardlib.decisions.pins import Pins
from shardlib.errors import BatchError, PinError, raise_all
from shardlib.graph.problem import Problem
from shardlib.hardware.placement import divisors
from shardlib.planning.space.limits import (
    MAX_MICROBATCHES,
    batch_size,
    sequence_size,
    sequences_text,
    tensor_colours,
)
from shardlib.propagation.colours import Colouring
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

#: What to try for an expert axis on a model in which no experts are found.
VISIT = "shardlib.functions.experts.visit in the model, or no expert axis"


def explain_empty(
    problem: Problem, colouring: Colouring, pins: Pins, devices: int
) -> BatchError | PinError:
    """Why no plan is legal under the pins, as the error to raise."""
    size = batch_size(problem, colouring)
    sizes = dict(pins.mesh) if pins.mesh is not None else dict(pins.axes)
    wrong = (
        _batch_fault(problem, pins, sizes, size)
        or _pipeline_fault(pins, sizes)
        or _sequence_fault(problem, colouring, pins, sizes)
        or _context_fault(problem, colouring, pins, sizes, devices)
        or _rules_fault(colouring, pins, sizes)
    )
    if wrong is not None:
        return wrong
    tensor, names = sizes.get("tensor", 1), tensor_colours(colouring)[0]
    if tensor > 1 and all(colouring.colours[name].divisor % tensor for name in names):
        return _indivisible(tensor, colouring, names, sequence_size(problem, colouring))
    faults = (misfit(axis, size, problem, colouring) for axis, size in sizes.items())
    if beyond := next(filter(None, faults), ""):
        return PinError(beyond)
    if taken := _devices_fault(sizes, devices):
        return taken
    if stored := _stored_fault(problem, colouring, pins, sizes, devices):
        return stored
    machine = f"{devices} device{'s'[: devices != 1]}"
    return PinError(
        f"no mesh of {machine} over {', '.join(INNER_AXES)} fits {problem.model} with a batch of"
        f" {size} under the pins {pins}\nTry: fewer pins, one after the other, or another"
        " number of devices"
    )


def _devices_fault(sizes: Mapping[str, int], devices: int) -> PinError | None:
    """Whether axes are pinned that take no part of the devices."""
    if devices % (taken := math.prod(sizes.values())) == 0:
        return None
    listed = " and ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return PinError(
        f"{taken} devices are pinned ({listed}), which are no part of the {devices} that there"
        " are\nTry: smaller axes, or another number of devices"
    )


def _batch_fault(
    problem: Problem, pins: Pins, sizes: Mapping[str, int], size: int
) -> BatchError | PinError | None:
    """What is wrong with how the pins split a batch of `size` examples."""
    parts = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    if (
        not any("batch" in axes for _, _, _, axes in problem.batch)
        and parts * (pins.microbatches or 1) > 1
    ):
        return _no_rows(problem, MeshShape(sizes), pins.microbatches or 1)
    if size % parts:
        return PinError(
            f"the mesh {MeshShape(sizes)} splits the batch into {parts} parts, which do not divide"
            f" its {size} examples\nTry: a batch that is a multiple of {parts}, or smaller data and"
            " fsdp axes"
        )
    if pins.microbatches and size % (parts * pins.microbatches):
        return PinError(
            f"microbatches={pins.microbatches} does not divide {_share(size, parts)}\nTry: one of"
            f" {', '.join(map(str, divisors(size // parts, MAX_MICROBATCHES)))}"
        )
    if size // parts % (pins.accumulation or 1):
        return PinError(
            f"accumulation={pins.accumulation} takes microbatches in equal groups, which do not"
            f" divide {_share(size, parts)}\nTry: one of"
            f" {', '.join(map(str, divisors(size // parts, MAX_MICROBATCHES)))}"
        )
    return None


def _share(size: int, parts: int) -> str:
    """The examples that have to be divided further, in words."""
    if parts == 1:
        return f"the {size} examples of the batch"
    return f"the {size // parts} examples of each of the {parts} parts of the batch"


def _pipeline_fault(pins: Pins, sizes: Mapping[str, int]) -> PinError | None:
    """What is wrong with the microbatches that go through pinned stages together."""
    together, stages = (pins.microbatches or 0) // (pins.accumulation or 1), sizes.get("stage", 1)
    if 0 < together < stages and (pins.virtual_stages or 1) > 1:
        return PinError(
            f"stages of several chunks of layers need a microbatch for each of the {stages} stages,"
            f" and {together} go through them together\nTry: more microbatches, or virtual_stages=1"
        )
    if pins.pipeline == "programs" and not _in_order(pins, stages, together):
        return PinError(
            f"pipeline='programs' interleaves whole groups of {stages} microbatches, one for each"
            f" stage, and {together} go through the stages together\nTry: a multiple of that, or"
            " pipeline='lockstep'"
        )
    return None


def _sequence_fault(
    problem: Problem, colouring: Colouring, pins: Pins, sizes: Mapping[str, int]
) -> PinError | None:
    """Why the sequence cannot be sharded over tensor, as is pinned."""
    tensor = sizes.get("tensor", 1)
    has_sequence = colouring.sequence_colour is not None
    if pins.sequence_parallel and not (
        has_sequence and sequence_size(problem, colouring) % tensor == 0
    ):
        sequences = sequences_text(problem, colouring, f"{tensor} parts do")
        return PinError(
            f"sequence_parallel=True shards the sequence over tensor={tensor}, and {problem.model}"
            f' {sequences}\nTry: sequence_parallel=False, or name the dim "seq" in batch_axes'
        )
    return None


def _context_fault(
    problem: Problem, colouring: Colouring, pins: Pins, sizes: Mapping[str, int], devices: int
) -> PinError | None:
    """Why no context axis can be that a pin asks for; one of a pinned size is looked at apart."""
    if pins.context in (None, "none") or "context" in sizes:
        return None
    if math.gcd(sequence_size(problem, colouring), devices) > 1:
        return None
    sequences = sequences_text(problem, colouring, f"parts of {devices} devices do")
    return PinError(
        f"context={pins.context!r} shards the sequence, and {problem.model} {sequences}\nTry:"
        " context='none', or name the dim \"seq\" in batch_axes"
    )


def _stored_fault(
    problem: Problem, colouring: Colouring, pins: Pins, sizes: Mapping[str, int], devices: int
) -> PinError | None:
    """Why nothing can be stored sharded, as pinned `zero` asks."""
    lacking = {
        "expert": expert_colour(problem.forward, colouring.forward) is None,
        "context": sequence_size(problem, colouring) == 1,
    }
    taken = math.prod(sizes.values()) * 2 > devices
    why: dict[str, list[str]] = {}
    for axis in STORED_AXES:
        if sizes.get(axis) == 1:
            why.setdefault("pinned to 1", []).append(axis)
        elif axis not in sizes and lacking.get(axis):
            why.setdefault(f"of no use for {problem.model}", []).append(axis)
        elif axis not in sizes and taken:
            why.setdefault("no devices left", []).append(axis)
        else:
            return None
    if not pins.zero:
        return None
    reasons = "; ".join(f"{reason}: {', '.join(axes)}" for reason, axes in why.items())
    enough = "mesh.fsdp=2 or more" if sizes.get("fsdp") == 1 else "more devices"
    return PinError(
        f"zero={pins.zero} shards what is stored over {', '.join(STORED_AXES)}, and none of them"
        f" can be 2 or more ({reasons})\nTry: {enough}, or zero=0"
    )


def _rules_fault(colouring: Colouring, pins: Pins, sizes: Mapping[str, int]) -> PinError | None:
    """Why the pinned rules cannot use the pinned tensor axis."""
    tensor = sizes.get("tensor", 1)
    if tensor == 1 or pins.rules is None:
        return None
    cut = {name: colouring.canonical(name) for name, axes in pins.rules.entries if "tensor" in axes}
    undivided = [
        f"{name!r} -> tensor: its dims have the largest common size"
        f" {colouring.colours[colour].divisor}, which {tensor} parts do not divide"
        for name, colour in cut.items()
        if colour is not None and colouring.colours[colour].divisor % tensor
    ]
    if undivided:
        raise_all(
            PinError,
            f"pinned rules do not fit the pinned mesh {MeshShape(sizes)}",
            undivided,
            hint="a tensor axis that divides them, or the rule to None",
        )
    if not cut:
        return PinError(
            f"tensor={tensor} is pinned, and the pinned rules shard nothing over tensor\nTry: a"
            f" rule (name, 'tensor') among {', '.join(tensor_colours(colouring)[0]) or 'none'},"
            " or no rules"
        )
    return None


def _in_order(pins: Pins, stages: int, together: int) -> bool:
    """Whether stages that wait for their neighbours alone can take so many microbatches in the
    order of the pinned schedule.
    """
    if not (pins.schedule and together):
        return True
    shape = Pipelines.one(stages=stages, microbatches=together)
    return bool(named(pins.schedule).fits(shape)[0])


def _no_rows(problem: Problem, mesh: MeshShape, parts: int) -> BatchError:
    """A batch is to be sharded that has nothing to shard."""
    arrays = ", ".join(f"{path} {list(shape)}" for path, shape, _, _ in problem.batch)
    request = " and ".join(
        [
            *([f"the mesh {mesh}"] if mesh.devices > 1 else []),
            *([f"microbatches={parts}"] if parts > 1 else []),
        ]
    )
    return BatchError(
        f"{request} would shard the rows of the batch, and it has"
        f" {f'no dim called batch: {arrays}' if arrays else 'no arrays'}\nTry: a batch whose arrays"
        " have their rows along the first dim, or batch_axes that say where they are"
    )


def _indivisible(tensor: int, colouring: Colouring, names: Sequence[str], length: int) -> PinError:
    """No colour that the tensor axis may shard divides into its parts; those that do, and why they
    are not sharded.
    """
    listed = ", ".join(f"{name} ({colouring.colours[name].divisor})" for name in names)
    carried = [
        c.name
        for c in colouring.colours.values()
        if c.matmuls and c.carried and colouring.sequence_colour and c.divisor % tensor == 0
    ]
    aside = (
        f"\nNot among them: {', '.join(carried)}, which layers hand on; the sequence ({length}) is"
        " sharded in its place, beside another dimension"
        if carried
        else ""
    )
    return PinError(
        f"tensor={tensor} divides no dimension that it could shard; dimensions with their largest"
        f" common size are {listed or 'none'}{aside}\nTry: a tensor axis that divides one of them"
    )


def misfit(axis: str, size: int, problem: Problem, colouring: Colouring) -> str:
    """Why a pinned axis fits no plan of a model; empty where it may."""
    length = sequence_size(problem, colouring)
    if axis == "context" and (colouring.sequence_colour is None or length % size):
        reason = sequences_text(problem, colouring, f"{size} parts do")
        return (
            f"context={size} shards the sequence, and {problem.model} {reason}\nTry: a context axis"
            ' that divides it, or name the dim "seq" in batch_axes'
        )
    if axis == "expert" and size > 1:
        name = expert_colour(problem.forward, colouring.forward)
        reason, hint = "has none that a grouped matmul (jax.lax.ragged_dot) uses", VISIT
        if name:
            count = colouring.colours[name].divisor
            reason = f"has {count} of them, which {size} parts do not divide"
            hint = "an expert axis that divides them, or none"
        return f"expert={size} shards experts, and {problem.model} {reason}\nTry: {hint}"
    return ""
