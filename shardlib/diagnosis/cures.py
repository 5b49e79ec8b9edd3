"""Cures: edits of a program that remove communication, each compiled and measured.

Candidates follow from the shardings that meet: the value laid out where it is made as it is needed,
without an axis, or with the axis on another dim; an argument stored so; a layout of the program
left out; and, first of all, values that have lost the batch's sharding laid out over it again.
Shardy propagates the shardings of every candidate, which takes a second and no compiler; the
best of them are compiled, and what is kept has to help there: fewer bytes sent, a shorter
step by the compiler's kernels and the links, and no more memory. Where no edit helps, pairs of them
are tried the same way: two layouts of a program, of which each alone moves what the other asks for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.cost.pricing import collective_seconds
from shardlib.diagnosis.edits import LAYOUTS, Edit, Spec
from shardlib.diagnosis.program import Argument, TracedFunction
from shardlib.diagnosis.rows import (
    Meeting,
    Row,
    ValueOrigin,
    batch_dim,
    read_meetings,
    shards_of,
)
from shardlib.diagnosis.source import read_source
from shardlib.machines.topology import Topology
from shardlib.planner.compiler_flags import LARGEST, OptionValue
from shardlib.untrusted.data import JsonObject
from shardlib.verification.hlo import BITS

#: A cure takes at least this share of a program's bytes away.
LEAST = 0.02
#: Candidates that Shardy looks at in one round.
MOST_CANDIDATES = 24
#: An option of the compiler saves at least this share of a step.
LEAST_SAVING = 0.01
#: Sets of options of the compiler that are tried.
MOST_OPTIONS = 2
#: Edits, the best by Shardy's shardings, of which pairs are made.
MOST_SEEDS = 8
#: Layouts of the program that are left out one by one.
MOST_LAYOUTS = 6


@dataclass(frozen=True, kw_only=True)
class Change:
    """What to change.

    Attributes:
        place: the line, "model.py:41", the argument, or the options of the compiler.
        before: the line as it is; "" where there is none.
        text: the line as it should be, or the new sharding of the argument.
    """

    place: str
    before: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Cure:
    """Edits that help, as they were measured by the compiler; none of them can be left out.

    Attributes:
        edits: what was edited; () for options of the compiler.
        changes: the same as a user writes it.
        bytes: sent per device and call, (before, after).
        seconds: of the step, (before, after): kernels where the compiler estimates them, and
            communication that nothing hides.
        memory: bytes per device at the peak without the program's code, (before, after).
        options: of the compiler.
        types: of results whose type has another sharding with it, in explicit mode: one sentence.
    """

    edits: tuple[Edit, ...]
    changes: tuple[Change, ...]
    bytes: tuple[float, float]
    seconds: tuple[float, float]
    memory: tuple[int, int]
    options: Mapping[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    types: str = ""

    @property
    def place(self) -> str:
        """The lines."""
        return " and ".join(change.place for change in self.changes)

    @property
    def text(self) -> str:
        """The lines as they should be."""
        return " and ".join(change.text for change in self.changes)


def candidates(
    rows: Sequence[Row], shardings: JsonObject, function: TracedFunction, batch: frozenset[str]
) -> list[Edit]:
    """Edits that may remove the communication of rows that are not inherent, the most promising
    first.
    """
    edits: dict[Edit, None] = {}
    for edit in _batch_edits(shardings, function, batch):
        edits.setdefault(edit)
    for row in rows:
        if row.inherent is not True and row.meeting is not None:
            edits |= dict.fromkeys(_edits_of(row.meeting, function))
    written = dict.fromkeys(read_source(place).user for place in shardings.get("layouts", ()))
    for frame in list(filter(None, written))[:MOST_LAYOUTS]:
        edits.setdefault(Edit(spec=(), frame=frame, removes=True))
    return list(edits)[:MOST_CANDIDATES]


def _batch_edits(
    shardings: JsonObject, function: TracedFunction, batch: frozenset[str]
) -> Iterator[Edit]:
    """Values of the forward pass whose first dim is the batch's and has lost its sharding."""
    data = {
        a.shape[dim]: a.spec[dim]
        for a in function.arguments
        if a.shape and set(a.spec[dim := batch_dim(a)]) & batch
    }
    seen = set[tuple[str, int, int]]()
    for value in shardings.get("values", ()):
        source = read_source(value["location"])
        shape = tuple(value["shape"])
        if source.operation.backward or source.user is None or not shape or len(shape) < 2:
            continue
        axes = data.get(shape[0])
        spec: Spec = tuple(tuple(a) for a in value["spec"])
        if not axes or set(axes) & set(spec[0]) or source.user.key in seen:
            continue
        seen.add(source.user.key)
        others = tuple(tuple(a for a in dim if a not in axes) for dim in spec[1:])
        yield Edit(spec=(axes, *others), frame=source.user, shape=shape)


def pairs(
    singles: Sequence[tuple[Edit, TracedFunction, JsonObject]], topology: Topology
) -> list[tuple[Edit, Edit]]:
    """Pairs of edits, those of the best first.

    Args:
        singles: edits, each with its program and shardings, the best first.
    """
    ranked: dict[tuple[Edit, Edit], int] = {}
    edits = [edit for edit, _, _ in singles]
    for number, (edit, function, shardings) in enumerate(singles[:MOST_SEEDS]):
        meetings = sorted(
            read_meetings(shardings, function),
            key=lambda meeting: -meeting_seconds(meeting, function, topology),
        )
        left = dict.fromkeys(
            partner for meeting in meetings for partner in _edits_of(meeting, function)
        )  # of what this edit alone leaves or makes
        following = [partner for partner in left if partner not in edits][:MOST_SEEDS]
        later = edits[number + 1 :]
        for partners, start in ((following, number), (later, 2 * number + 1)):
            for place, partner in enumerate(partners):
                if _together(edit, partner):
                    ranked.setdefault((edit, partner), start + place)
    return sorted(ranked, key=lambda pair: ranked[pair])[:MOST_CANDIDATES]


def _together(edit: Edit, partner: Edit) -> bool:
    """Whether two edits are of different expressions and arguments."""
    if edit.frame and partner.frame and edit.frame.key == partner.frame.key:
        return edit.removes != partner.removes
    return not set(edit.arguments) & set(partner.arguments)


def _edits_of(meeting: Meeting, function: TracedFunction) -> Iterator[Edit]:
    """Edits that may remove a meeting, without those whose layout has parts of axes."""
    for edit in _all_edits_of(meeting, function):
        if edit.removes or not any(":" in axis for dim in edit.spec for axis in dim):
            yield edit


def _all_edits_of(meeting: Meeting, function: TracedFunction) -> Iterator[Edit]:
    layouts = [
        source
        for source in (meeting.source, *meeting.users)
        if source.operation.primitive in LAYOUTS
    ]
    for source in layouts:
        if source.user:
            yield Edit(spec=(), frame=source.user, removes=True)
    user = next((user.user for user in meeting.users if not user.operation.backward), None)
    made, sizes, value = meeting.result, dict(function.mesh), meeting.value
    if user and len(made) == len(meeting.part) and _divides(made, meeting.part, sizes):
        yield Edit(spec=meeting.part, frame=user, shape=made)
        argument = None if value.argument is None else function.arguments[value.argument]
        yield Edit(
            spec=meeting.part,
            frame=user,
            shape=value.shape,
            manual=True,
            name=meeting.users[0].operation.primitive,
            written=argument and _stored(value, meeting.part, argument),
        )
    parts = [function.arguments[number] for number in meeting.parts]
    is_made = len(parts) > 1 or value.argument is None
    if parts and is_made and {part.spec for part in parts} == {meeting.produced}:
        name = ", ".join(part.name for part in parts)
        yield Edit(spec=meeting.needed, arguments=meeting.parts, name=name)
    yield from _on(value, meeting.needed, meeting.axes, function)
    for user in meeting.users[:1]:
        if user.user and not user.operation.backward and user not in layouts:
            yield Edit(spec=meeting.produced, frame=user.user, shape=meeting.value.shape)
    if meeting.contraction:
        for operand in meeting.contraction.operands:
            yield from _on(operand, None, meeting.axes, function)


def _on(
    value: ValueOrigin, needed: Spec | None, axes: frozenset[str], function: TracedFunction
) -> Iterator[Edit]:
    """Layouts of a value where it is made, of an argument where it is stored."""
    sizes, argument = dict(function.mesh), value.argument
    layouts = list(_layouts(value, needed, axes, sizes))
    if argument is not None:  # those first that take no more memory
        layouts.sort(key=lambda layout: sum(map(len, layout)) < sum(map(len, value.spec)))
    for layout in layouts:
        if argument is not None:
            stored = _stored(value, layout, function.arguments[argument])
            if stored not in (None, function.arguments[argument].spec) and _divides(
                function.arguments[argument].shape, stored, sizes
            ):
                yield Edit(spec=stored, arguments=(argument,), name=value.name)
        if value.source.user and not value.source.operation.backward:
            yield Edit(spec=layout, frame=value.source.user, shape=value.shape)


def _layouts(
    value: ValueOrigin, needed: Spec | None, axes: frozenset[str], sizes: dict[str, int]
) -> Iterator[Spec]:
    """Layouts of a value: as it is needed, without mesh axes, or with all or one of them on another
    dim, one that is not sharded before one that is.
    """
    spec = tuple(tuple(a for a in dim if ":" not in a) for dim in value.spec)
    if needed is not None and not any(":" in a for dim in needed for a in dim):
        yield needed
    yield tuple(tuple(a for a in dim if a not in axes) for dim in spec)
    on = [axis for axis in sizes if axis in axes and _has(value.spec, axis)]
    for moved in dict.fromkeys((tuple(on), *((axis,) for axis in on))):
        without = tuple(tuple(a for a in dim if a not in moved) for dim in spec)
        dims = sorted(range(len(spec)), key=lambda dim: (len(without[dim]), dim))
        for dim in dims:
            layout = (*without[:dim], (*without[dim], *moved), *without[dim + 1 :])
            if moved and layout != value.spec and _divides(value.shape, layout, sizes):
                yield layout


def _has(spec: Spec, axis: str) -> bool:
    return any(a.partition(":")[0] == axis for dim in spec for a in dim)


def _divides(shape: tuple[int, ...], spec: Spec, sizes: dict[str, int]) -> bool:
    return all(
        size % math.prod(sizes.get(axis, 1) for axis in axes) == 0
        for size, axes in zip(shape, spec, strict=True)
    )


def _stored(value: ValueOrigin, layout: Spec, argument: Argument) -> Spec | None:
    """The sharding of an argument with which a value that shows it has a layout."""
    laid = {axis for dim in layout for axis in dim}
    spec = [
        () if dim in value.dims else tuple(a for a in axes if a not in laid)
        for dim, axes in enumerate(argument.spec)
    ]
    for dim, axes in zip(value.dims, layout, strict=True):
        if dim is None and axes:
            return None
        if dim is not None:
            spec[dim] = (*spec[dim], *axes)
    return tuple(spec)


#: Options of TPU compilers that make collectives of a kind asynchronous.
_ASYNCHRONOUS: Mapping[str, Mapping[str, OptionValue]] = {
    "all-reduce": {
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_enable_async_all_reduce": True,
    },
    "reduce-scatter": {
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_enable_async_reduce_scatter_fusion": True,
    },
}
#: Kinds of collectives that GPU compilers combine and pipeline.
_COMBINED = ("all-gather", "all-reduce", "reduce-scatter")


def compiler_options(
    rows: Sequence[Row], vendor: str, step_seconds: float
) -> list[Mapping[str, OptionValue]]:
    """Options of the compiler that may hide communication which nothing hides, the most exposed
    seconds first: for GPUs to combine collectives of a kind over the same axes, and to pipeline
    those of a loop; for TPUs to make them asynchronous.

    Args:
        vendor: of the chips.
        step_seconds: kernels and exposed communication; kinds that take less than
            `LEAST_SAVING` of it are left out.
    """
    exposed, groups = (
        defaultdict[str, float](float),
        defaultdict[str, Counter[tuple[str, ...]]](Counter),
    )
    looped = set[str]()
    for row in rows:
        exposed[row.kind] += row.exposed or 0.0
        groups[row.kind][row.axes] += len(set(row.instructions))
        if row.count > len(row.instructions):
            looped.add(row.kind)
    sets = list[Mapping[str, OptionValue]]()
    for kind, seconds in sorted(exposed.items(), key=lambda entry: -entry[1]):
        name = kind.replace("-", "_")
        if seconds < LEAST_SAVING * step_seconds or not seconds:
            continue
        if vendor == "nvidia" and kind in _COMBINED:
            if max(groups[kind].values()) > 1:
                sets.append({f"xla_gpu_{name}_combine_threshold_bytes": LARGEST})
            if kind in looped:
                sets.append({f"xla_gpu_enable_pipelined_{name}": True})
        elif vendor == "google" and kind in _ASYNCHRONOUS:
            sets.append(_ASYNCHRONOUS[kind])
    return sets[:MOST_OPTIONS]


#: An operation that XLA computes, and the dims of its operand that it works along.
Worked = tuple[object, tuple[int, ...]]


def local_work(rows: Sequence[Row], meetings: Sequence[Meeting]) -> frozenset[Worked]:
    """What XLA computes without the collectives that Shardy's shardings ask for: operations that
    have rows, but none for these dims.
    """
    compiled = {_worked(row.meeting) for row in rows if row.meeting is not None}
    listed = {_worked(meeting) for meeting in meetings if meeting.computed}
    return frozenset(work for work in listed - compiled if work[0] in {key for key, _ in compiled})


def _worked(meeting: Meeting) -> Worked:
    pairs = enumerate(zip(meeting.produced, meeting.needed, strict=True))
    return meeting.source.key, tuple(
        dim for dim, (compiled, needed) in pairs if compiled and not needed
    )


def propagated_seconds(
    shardings: JsonObject,
    function: TracedFunction,
    topology: Topology,
    local: frozenset[Worked] = frozenset(),
) -> float:
    """Seconds of the communication that Shardy's shardings ask for, before any compiler: what
    candidates are compared by.

    Args:
        local: operations that XLA is known to compute without, `local_work`.
    """
    return sum(
        meeting_seconds(meeting, function, topology)
        for meeting in read_meetings(shardings, function)
        if not (meeting.computed and _worked(meeting) in local)
    )


def meeting_seconds(meeting: Meeting, function: TracedFunction, topology: Topology) -> float:
    """Seconds of the collective that a meeting asks for, in all executions."""
    mesh, names = function.shape, {v: k for k, v in function.axis_names.items()}
    sizes = dict(function.mesh)
    bits = BITS.get(meeting.value.dtype.replace("i1", "pred"), 32)
    total_bytes = math.prod(meeting.value.shape) * bits / 8.0
    axes = tuple(names[a] for a in sorted(meeting.axes) if sizes.get(a, 1) > 1)
    if not axes:
        return 0.0
    produced, needed = (
        total_bytes / shards_of(spec, sizes) for spec in (meeting.produced, meeting.needed)
    )
    if meeting.reduced:
        kind, size = "all-reduce", needed
    elif needed > produced:
        kind, size = "all-gather", needed
    elif needed == produced:
        # where axes leave more than one dim, or go to more than one, XLA replicates the value
        sides = list(zip(meeting.produced, meeting.needed, strict=True))
        moves = (
            sum(bool(set(a) - set(b)) for a, b in sides),
            sum(bool(set(b) - set(a)) for a, b in sides),
        )
        kind, size = ("all-to-all", produced) if moves == (1, 1) else ("all-gather", total_bytes)
    else:
        return 0.0  # each device keeps a part of what it has
    return meeting.count * collective_seconds(
        kind, axes, mesh.ways(axes), size, mesh, topology, tuple(function.axis_names)
    )
