"""Errors where there is no plan: messages about pins that allow none, and about a problem that does
not fit in memory.

Pins that need more layers than a model repeats are an error:

>>> pins = Pins.parse({"schedule": "1f1b"})
>>> print(too_few_layers("mlp", LayerCounts(names=(), counts=()), pins))
schedule='1f1b' splits layers into stages, and the model 'mlp' has no layers that repeat
Try: layers with parameters of equal shapes, in a list or under a scan, or no such pin
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardlib.cost.experts import expert_colour
from shardlib.cost.facts import repeated_calls
from shardlib.cost.pricing import Totals
from shardlib.cost.roofline import fitting_bytes, margin
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import ANY_GROUP
from shardlib.errors import BatchError, InfeasibleError, PinError, TopologyError, raise_all
from shardlib.graph import Problem
from shardlib.layout import BATCH_AXES, INNER_AXES, STORED_AXES, MeshShape
from shardlib.machines.topology import Topology, divisors
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.parts import Candidate
from shardlib.planner.workload import (
    MAX_MICROBATCHES,
    Workload,
    batch_size,
    framework_colours,
    sequence_size,
    sequences_text,
    tensor_colours,
)
from shardlib.propagation.colours import Colouring
from shardlib.report.elements import bytes_text, percent_text
from shardlib.schedules import Pipelines, named

# --------------------------------------------------------------------------------------------------
# No plan is legal under the pins.

#: Hint for an expert axis on a model without experts.
EXPERTS_HINT = "shardlib.functions.experts.visit in the model, or no expert axis"
_EQUAL = "layers with parameters of equal shapes, in a list or under a scan"


@dataclass(frozen=True, kw_only=True)
class PinnedProblem:
    """A problem, and the pins under which it has no plan on `devices` devices."""

    problem: Problem
    colouring: Colouring
    pins: Pins
    devices: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Pinned sizes of mesh axes."""
        return dict(self.pins.mesh if self.pins.mesh is not None else self.pins.axes)

    @cached_property
    def rows(self) -> int:
        """Examples per batch."""
        return batch_size(self.problem, self.colouring)

    @property
    def parts(self) -> int:
        """Number of parts into which the pinned axes split the batch."""
        return math.prod(self.sizes.get(axis, 1) for axis in BATCH_AXES)

    @property
    def tensor(self) -> int:
        """The pinned tensor axis."""
        return self.sizes.get("tensor", 1)

    def sequences(self, parts: str) -> str:
        """Message part: the model and its sequences, which `parts` do not divide."""
        return f"{self.problem.model} {sequences_text(self.problem, self.colouring, parts)}"


def explain_empty(workload: Workload, pins: Pins, devices: int) -> BatchError | PinError:
    """The error for pins under which no plan is legal."""
    message_of_layers = too_few_layers(workload.problem.model, layer_counts_of(workload), pins)
    if message_of_layers:
        return PinError(message_of_layers)
    request = PinnedProblem(
        problem=workload.problem, colouring=workload.colouring, pins=pins, devices=devices
    )
    message = _no_rows(request)
    if message:
        return BatchError(message)
    message = _framework_tensor(workload, request.tensor)
    message = message or next(filter(None, (check(request) for check in CHECKS)), "")
    machine = f"{devices} device{'s'[: devices != 1]}"
    return PinError(
        message
        or f"no mesh of {machine} over {', '.join(INNER_AXES)} fits {workload.problem.model} with a"
        f" batch of {request.rows} under the pins {pins}\nTry: fewer pins, one after the other, or"
        " another number of devices"
    )


def _framework_tensor(workload: Workload, tensor: int) -> str:
    """The message where the pinned tensor axis does not divide all that a framework shards."""
    framework, colours = workload.framework, workload.colouring.colours
    if framework is None or framework.abilities.tensor == "any":
        return ""
    names = framework_colours(workload.colouring, workload.expert)
    undivided = [
        f"{name} ({colours[name].divisor})" for name in names if colours[name].divisor % tensor
    ]
    if not undivided:
        return ""
    return (
        f"{framework.name} shards {', '.join(names)} over tensor together, and tensor={tensor} does"
        f" not divide {', '.join(undivided)}\nTry: a tensor axis that does, or a model whose dims"
        " are padded, as vocabularies commonly are"
    )


def _no_rows(request: PinnedProblem) -> str:
    """The message where a batch without rows is to be sharded."""
    batch, microbatches, mesh = request.problem.batch, request.pins.microbatches or 1, request.sizes
    if any("batch" in axes for _, _, _, axes in batch) or request.parts * microbatches == 1:
        return ""
    arrays = ", ".join(f"{path} {list(shape)}" for path, shape, _, _ in batch)
    wanted = " and ".join(
        [
            *([f"the mesh {MeshShape(mesh)}"] if MeshShape(mesh).devices > 1 else []),
            *([f"microbatches={microbatches}"] if microbatches > 1 else []),
        ]
    )
    return (
        f"{wanted} would shard the rows of the batch, and it has"
        f" {f'no dim called batch: {arrays}' if arrays else 'no arrays'}\nTry: a batch whose arrays"
        " have their rows along the first dim, or batch_axes that say where they are"
    )


def _batch(request: PinnedProblem) -> str:
    """The message where pins cannot split the examples of the batch."""
    size, parts, pins = request.rows, request.parts, request.pins
    if size % parts:
        return (
            f"the mesh {MeshShape(request.sizes)} splits the batch into {parts} parts, which do not"
            f" divide its {size} examples\nTry: a batch that is a multiple of {parts}, or smaller"
            " data and fsdp axes"
        )
    if pins.microbatches and size % (parts * pins.microbatches):
        fault = f"microbatches={pins.microbatches} does not divide"
    elif size // parts % (pins.accumulation or 1):
        fault = f"accumulation={pins.accumulation} takes microbatches in equal groups, which do not"
        fault += " divide"
    else:
        return ""
    share = (
        f"the {size} examples of the batch"
        if parts == 1
        else f"the {size // parts} examples of each of the {parts} parts of the batch"
    )
    options = ", ".join(map(str, divisors(size // parts, MAX_MICROBATCHES)))
    return f"{fault} {share}\nTry: one of {options}"


def _pipeline(request: PinnedProblem) -> str:
    """The message where microbatches cannot go through the pinned stages together."""
    pins, stages = request.pins, request.sizes.get("stage", 1)
    concurrent = (pins.microbatches or 0) // (pins.accumulation or 1)
    if 0 < concurrent < stages and (pins.virtual_stages or 1) > 1:
        return (
            f"stages of several chunks of layers need a microbatch for each of the {stages} stages,"
            f" and {concurrent} go through them together\nTry: more microbatches, or"
            " virtual_stages=1"
        )
    if pins.pipeline == "programs" and pins.schedule and concurrent:
        pipeline = Pipelines.one(stages=stages, microbatches=concurrent)
        if not named(pins.schedule).fits(pipeline)[0]:
            return (
                f"pipeline='programs' interleaves whole groups of {stages} microbatches, one for"
                f" each stage, and {concurrent} go through the stages together\nTry: a multiple of"
                " that, or pipeline='lockstep'"
            )
    return ""


def _sequence(request: PinnedProblem) -> str:
    """The message where the sequence cannot be sharded over tensor as pinned."""
    length = sequence_size(request.problem, request.colouring)
    if not request.pins.sequence_parallel or (
        request.colouring.sequence_colour is not None and length % request.tensor == 0
    ):
        return ""
    return (
        f"sequence_parallel=True shards the sequence over tensor={request.tensor}, and"
        f" {request.sequences(f'{request.tensor} parts do')}\nTry: sequence_parallel=False, or name"
        ' the dim "seq" in batch_axes'
    )


def _context(request: PinnedProblem) -> str:
    """The message where a context axis is pinned without a size, and none is possible."""
    pins, length = request.pins, sequence_size(request.problem, request.colouring)
    if (
        pins.context in (None, "none")
        or "context" in request.sizes
        or math.gcd(length, request.devices) > 1
    ):
        return ""
    return (
        f"context={pins.context!r} shards the sequence, and"
        f" {request.sequences(f'parts of {request.devices} devices do')}\nTry: context='none', or"
        ' name the dim "seq" in batch_axes'
    )


def _rules(request: PinnedProblem) -> str:
    """The message where pinned rules cannot use the pinned tensor axis."""
    pins, tensor, colouring = request.pins, request.tensor, request.colouring
    if tensor == 1 or pins.rules is None:
        return ""
    sharded = {
        name: colouring.canonical(name) for name, axes in pins.rules.entries if "tensor" in axes
    }
    undivided = [
        f"{name!r} -> tensor: its dims have the largest common size"
        f" {colouring.colours[colour].divisor}, which {tensor} parts do not divide"
        for name, colour in sharded.items()
        if colour is not None and colouring.colours[colour].divisor % tensor
    ]
    if undivided:
        raise_all(
            PinError,
            f"pinned rules do not fit the pinned mesh {MeshShape(request.sizes)}",
            undivided,
            hint="a tensor axis that divides them, or the rule to None",
        )
    if sharded:
        return ""
    return (
        f"tensor={tensor} is pinned, and the pinned rules shard nothing over tensor\nTry: a"
        f" rule (name, 'tensor') among {', '.join(tensor_colours(colouring)[0]) or 'none'},"
        " or no rules"
    )


def _indivisible(request: PinnedProblem) -> str:
    """The message where the tensor axis divides no colour that it may shard, with those that it
    divides and may not shard.
    """
    tensor, colouring = request.tensor, request.colouring
    names = tensor_colours(colouring)[0]
    if tensor == 1 or any(colouring.colours[name].divisor % tensor == 0 for name in names):
        return ""
    listed = ", ".join(f"{name} ({colouring.colours[name].divisor})" for name in names)
    carried = [
        c.name
        for c in colouring.colours.values()
        if c.matmuls and c.carried and colouring.sequence_colour and c.divisor % tensor == 0
    ]
    note = (
        f"\nNot among them: {', '.join(carried)}, carried from layer to layer; the sequence"
        f" ({sequence_size(request.problem, colouring)}) is sharded in its place, beside another"
        " dimension"
        if carried
        else ""
    )
    return (
        f"tensor={tensor} divides no dimension that it could shard; dimensions with their largest"
        f" common size are {listed or 'none'}{note}\nTry: a tensor axis that divides one of them"
    )


def _axes(request: PinnedProblem) -> str:
    """The message where a pinned axis fits no plan of the model."""
    faults = (
        axis_misfit(axis, size, request.problem, request.colouring)
        for axis, size in request.sizes.items()
    )
    return next(filter(None, faults), "")


def axis_misfit(axis: str, size: int, problem: Problem, colouring: Colouring) -> str:
    """The reason why a pinned axis fits no plan of a model; empty where it may."""
    length = sequence_size(problem, colouring)
    if axis == "context" and (colouring.sequence_colour is None or length % size):
        reason = sequences_text(problem, colouring, f"{size} parts do")
        return (
            f"context={size} shards the sequence, and {problem.model} {reason}\nTry: a context axis"
            ' that divides it, or name the dim "seq" in batch_axes'
        )
    if axis == "expert" and size > 1:
        name = expert_colour(problem.forward, colouring.forward)
        reason, hint = "has none that a grouped matmul (jax.lax.ragged_dot) uses", EXPERTS_HINT
        if name:
            count = colouring.colours[name].divisor
            reason = f"has {count} of them, which {size} parts do not divide"
            hint = "an expert axis that divides them, or none"
        return f"expert={size} shards experts, and {problem.model} {reason}\nTry: {hint}"
    return ""


def _devices(request: PinnedProblem) -> str:
    """The message where the pinned axes do not divide the number of devices."""
    pinned = math.prod(request.sizes.values())
    if request.devices % pinned == 0:
        return ""
    listed = " and ".join(f"{axis}={size}" for axis, size in request.sizes.items() if size > 1)
    return (
        f"the pinned axes ({listed}) need {pinned} devices, which do not divide the"
        f" {request.devices} available\nTry: smaller axes, or another number of devices"
    )


def _stored(request: PinnedProblem) -> str:
    """The message where ZeRO is pinned and nothing can be stored sharded."""
    problem, sizes, zero = request.problem, request.sizes, request.pins.zero
    lacking = {
        "expert": expert_colour(problem.forward, request.colouring.forward) is None,
        "context": sequence_size(problem, request.colouring) == 1,
    }
    no_devices_left = math.prod(sizes.values()) * 2 > request.devices
    why: dict[str, list[str]] = {}
    for axis in STORED_AXES:
        if sizes.get(axis) == 1:
            why.setdefault("pinned to 1", []).append(axis)
        elif axis not in sizes and lacking.get(axis):
            why.setdefault(f"of no use for {problem.model}", []).append(axis)
        elif axis not in sizes and no_devices_left:
            why.setdefault("no devices left", []).append(axis)
        else:
            return ""
    if not zero:
        return ""
    reasons = "; ".join(f"{reason}: {', '.join(axes)}" for reason, axes in why.items())
    enough = "mesh.fsdp=2 or more" if sizes.get("fsdp") == 1 else "more devices"
    return (
        f"zero={zero} shards what is stored over {', '.join(STORED_AXES)}, and none of them"
        f" can be 2 or more ({reasons})\nTry: {enough}, or zero=0"
    )


#: Checks in order of precedence: each returns a message, or "" where nothing is wrong.
CHECKS: tuple[Callable[[PinnedProblem], str], ...] = (
    _batch,
    _pipeline,
    _sequence,
    _context,
    _rules,
    _indivisible,
    _axes,
    _devices,
    _stored,
)


# --------------------------------------------------------------------------------------------------
# A model has too few layers for the pins.

#: A limit above the number of chunks of any schedule.
_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """The names and layer counts of the layer groups of a model, and the number of uses of the same
    parameters outside of all groups.
    """

    names: Sequence[str]
    counts: Sequence[int]
    calls: int = 1


def layer_counts_of(workload: Workload) -> LayerCounts:
    """The layers of a model, for messages."""
    facts = next(iter(workload.programs.values())).facts
    return LayerCounts(
        names=workload.group_names,
        counts=workload.layer_counts,
        calls=repeated_calls(facts.graph, facts.layers, facts.weights),
    )


def too_few_layers(model: str, groups: LayerCounts, pins: Pins) -> str:
    """The message that a model has too few layers for its pins, with a hint; empty where it has
    enough.
    """
    model = f"the model {model!r}"
    if not groups.counts and groups.calls > 1 and (pins.always_staged or pins.remat_layers):
        return _repeated_calls(model, groups.calls, pins)
    return _too_few_for_stages(model, groups.counts, pins) or _too_few_to_rematerialise(
        model, groups.names, groups.counts, pins
    )


def _repeated_calls(model: str, calls: int, pins: Pins) -> str:
    """The message for a loss that runs the same layers several times, which leaves none to
    split.
    """
    wanted = (
        f"{_stage_pins(pins)} splits layers into stages"
        if pins.always_staged
        else f"remat_layers={pins.remat_layers} rematerialises some of the layers"
    )
    times = "twice" if calls == 2 else f"{calls} times"
    return (
        f"{wanted}, and the loss runs the layers of {model}, or some of them, {times} with the"
        " same parameters, as where it calls the model or one of its layers more than once; they"
        " have to run once, each layer with its own parameters\nTry: one call of the model for"
        " all rows, no layer that is used again, or no such pin"
    )


def _too_few_for_stages(model: str, counts: Sequence[int], pins: Pins) -> str:
    """The message where pinned stages, or their chunks, outnumber the layers; else empty."""
    if not pins.always_staged:
        return ""
    layers, stages = max(counts, default=0), dict(pins.mesh or pins.axes).get("stage", 1)
    if layers < max(2, stages):
        hint = f"{_EQUAL}, or no such pin" if layers < 2 else f"stage={layers} at most"
        each = "; each stage has at least one" if layers > 1 else ""
        return (
            f"{_stage_pins(pins)} splits layers into stages, and {model} has {_repeated(layers)}"
            f"{each}\nTry: {hint}"
        )
    chunks, stage_count = _chunks(pins), max(stages, 2)
    if chunks * stage_count <= layers:
        return ""
    source = (
        f"virtual_stages={chunks}"
        if pins.virtual_stages
        else f"schedule={pins.schedule!r} has at least virtual_stages={chunks}, and that"
    )
    limit = layers // stage_count
    hint = (
        f"virtual_stages of at most {limit}"
        if limit > 1 and pins.virtual_stages
        else "a schedule without chunks of layers, such as '1f1b'"
    )
    return (
        f"{source} splits the layers of each of {stage_count} stages into {chunks} chunks:"
        f" {chunks * stage_count} chunks in all, and {model} has {_repeated(layers)}\nTry:"
        f" {hint}, or fewer stages"
    )


def _stage_pins(pins: Pins) -> str:
    """The pins that require stages, as text."""
    stages = dict(pins.mesh or pins.axes).get("stage", 1)
    if stages > 1:
        return f"stage={stages}"
    pinned = {
        "schedule": pins.schedule if pins.schedule and named(pins.schedule).staged else None,
        "pipeline": pins.pipeline if pins.pipeline == "programs" else None,
        "accumulation": pins.accumulation if (pins.accumulation or 1) > 1 else None,
        "virtual_stages": pins.virtual_stages if (pins.virtual_stages or 1) > 1 else None,
        "gather": pins.gather if pins.gather == "once" else None,
    }
    return " with ".join(f"{key}={value!r}" for key, value in pinned.items() if value is not None)


def _chunks(pins: Pins) -> int:
    """The fewest chunks of layers per stage under the pins."""
    if pins.virtual_stages or pins.schedule is None:
        return pins.virtual_stages or 1
    tried = named(pins.schedule).chunk_options(
        pinned=True, chunks=None, policy="none", limit=_LIMIT
    )
    return min(tried, default=1)


def _too_few_to_rematerialise(
    model: str, names: Sequence[str], counts: Sequence[int], pins: Pins
) -> str:
    """The message where a pinned number of rematerialised layers is not below the number of layers;
    else empty.
    """
    if not counts and pins.remat_layers:
        return (
            f"remat_layers={pins.remat_layers} rematerialises some of the layers, and {model} has"
            f" no layers that repeat\nTry: {_EQUAL}, or no such pin"
        )
    groups = {} if pins.remat_classes == ANY_GROUP else {n: c for n, _, c in pins.remat_classes}
    stages = dict(pins.mesh or pins.axes).get("stage", 1)
    chunks = stages * (pins.virtual_stages or 1)
    layers_per_stage = [(pins.virtual_stages or 1) * -(-count // chunks) for count in counts]
    location = f"a stage of {model}" if stages > 1 else model
    faults = [
        f"remat_classes rematerialises {requested} of the layers of {name!r}, and {location} has"
        f" {count} there"
        for name, count in zip(names, layers_per_stage, strict=True)
        if (requested := groups.get(name)) and requested > count - (len(names) == 1)
    ]
    if pins.remat_layers and counts and pins.remat_layers >= sum(layers_per_stage):
        faults.append(
            f"remat_layers={pins.remat_layers} rematerialises some of the layers, and {location}"
            f" has {_repeated(sum(layers_per_stage))}"
        )
    if not faults:
        return ""
    return "; ".join(faults) + "\nTry: fewer, or a remat policy without a number for all of them"


def _repeated(layers: int) -> str:
    return f"{layers or 'no'} layer{'s'[: layers != 1]} that repeat{'s'[: layers == 1]}"


# --------------------------------------------------------------------------------------------------
# Nothing fits: the missing memory, and the smallest change that would help.


def infeasible(
    workload: Workload,
    topology: Topology,
    pins: Pins,
    candidate: Candidate,
    totals: Totals,
    fits: Callable[[Topology, Pins], bool],
) -> InfeasibleError:
    """The error for a problem that does not fit: the missing memory, and single changes that would
    help.

    Args:
        candidate, totals: the minimum-memory plan, and its price.
        fits: True if the problem fits a machine under pins.
    """
    memory_margin, usable = margin(topology), topology.chip.usable_bytes
    capacity, peak = fitting_bytes(topology), float(totals.peak_bytes[0])
    parts = sorted(
        ((float(values[0]), name) for name, values in totals.device_bytes.items()), reverse=True
    )
    shares = ", ".join(f"{name} {bytes_text(size)}" for size, name in parts if size > 0.01 * peak)
    hints = [
        *(
            f"leaving {name} to the planner"
            for name, relaxed in pins.without().items()
            if fits(topology, relaxed)
        ),
        *_larger(topology, lambda machine: fits(machine, pins)),
        *_smaller_batch(totals, capacity),
    ]
    available = (
        f"the {bytes_text(usable)} it has"
        if memory_margin == 1
        else f"the {bytes_text(capacity)} that a plan may fill of {bytes_text(usable)}, as a"
        f" program may need {percent_text(memory_margin - 1)} more than predicted"
    )
    summary = f"{candidate.mesh}{', ' + candidate.summary if candidate.summary else ''}"
    return InfeasibleError(
        f"{workload.problem.model} does not fit on {topology.name}: the leanest plan ({summary})"
        f" needs {bytes_text(peak)} on each device, {bytes_text(peak - capacity)} more than"
        f" {available} ({shares})\nTry:"
        f" {'; or '.join(hints) if hints else 'a larger topology and a smaller batch together'}",
        short_bytes=math.ceil(peak * memory_margin - usable),
    )


def _larger(topology: Topology, fits: Callable[[Topology], bool]) -> Iterator[str]:
    """The smallest doubling of the number of fast domains that fits, up to 64 times the size, as a
    hint; for machines joined by a slow link, of each of them.
    """
    joined, separator, inner = topology.name.partition("@")
    link, _, inner = inner.partition("*") if separator else ("", "", joined)
    count, star, domain = inner.partition("*")
    number, domain = (int(count), domain) if star else (1, inner)
    prefix = f"{joined}@{link}*" if separator else ""
    for factor in (2, 4, 8, 16, 32, 64):
        try:
            larger = replace(
                parse_topology(f"{prefix}{number * factor}*{domain}"), chip=topology.chip
            )
        except TopologyError:
            return
        if fits(larger):
            yield f"the topology {larger.name} ({larger.devices} devices)"
            return


def _smaller_batch(totals: Totals, capacity: float) -> Iterator[str]:
    """A hint for a smaller batch, if everything that grows with it shrinks in proportion."""
    scaling = sum(
        float(totals.device_bytes[name][0]) for name in ("activations", "temporaries", "batch")
    )
    fixed = float(totals.peak_bytes[0]) - scaling
    moved = 0.0 if totals.device_bytes["optimizer"][0] else float(totals.largest_state[0])
    if fixed + moved < capacity and scaling > 0:
        share = (capacity - fixed) / scaling
        part = f"{share:.0%}" if share >= 0.01 else f"{share:.1g}"
        yield f"a batch or sequence at most {part} of this one"
