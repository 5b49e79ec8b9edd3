"""The explanation of a plan as text: its decisions, seconds, bytes, collectives and reasons, and
the plan in one line or as a card.

Shardings are written as the scaling book writes them (jax-ml/scaling-book, `sharding.md`):
[embed_fsdp, mlp_tensor] is a matrix whose dim "embed" is sharded over the mesh axis "fsdp" and
whose dim "mlp" is sharded over "tensor". A dim without a name shows its size.

>>> notation(("embed", "mlp"), (4096, 16384), Layout(("data", "fsdp"), "tensor"))
'[embed_data·fsdp, mlp_tensor]'
>>> notation((None, "mlp"), (3, 64), Layout((), ()))
'[3, mlp]'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from shardlib.cost.framework import INDISTINGUISHABLE
from shardlib.cost.pricing import DeviceBytes, Estimate, Seconds
from shardlib.decisions.table import TABLE
from shardlib.errors import MissingFileError, TopologyError
from shardlib.graph import ITEMSIZE
from shardlib.layout import AXES, MESH_AXES, Collective, Layout, LogicalAxes
from shardlib.machines.topology import Topology
from shardlib.machines.topology import topology as find_topology
from shardlib.planner.parts import CHOSEN, Refined, Trial
from shardlib.planner.plan import ParameterLayout, Plan, Rejected
from shardlib.report.elements import (
    aligned,
    and_more,
    bytes_text,
    clip,
    count_text,
    parameters_text,
    percent_text,
    ratio_text,
    seconds_text,
    short,
    wrapped,
)
from shardlib.report.markup import Part, card
from shardlib.schedules import named
from shardlib.untrusted.data import printable

# --------------------------------------------------------------------------------------------------
# Decisions of a plan, a line for each that is not the trivial one.
#
# Labels and words come from the table of decisions. Most lines tell several decisions together,
# such as a pipeline with its schedule and chunks; a decision without such a line has one of its
# own, after the others.


def decision_lines(plan: Plan) -> list[tuple[str, str]]:
    """(label, decision) for every decision that is not the trivial one."""
    lines = {label: line(plan) for label, line in _LINES.items()}
    for word, entry in TABLE.items():
        if (entry.label or word) not in lines:
            lines[entry.label or word] = _told(word)(plan)
    return [(label, text) for label, text in lines.items() if text]


def untold(label: str, plan: Plan) -> str:
    """Describes a decision whose label has no line: the meaning of the default."""
    if label in _UNTOLD:
        return _UNTOLD[label](plan)
    meanings = (
        entry.choices.get(entry.default)
        for word, entry in TABLE.items()
        if (entry.label or word) == label
    )
    return next(filter(None, meanings), "none")


def decisions_section(plan: Plan) -> str:
    """The decisions of a plan as text."""
    lines = decision_lines(plan)
    width = max(len(label) for label, _ in lines)
    return "\n".join(
        [
            "Decisions",
            *(line for label, text in lines for line in wrapped(f"  {label:{width}}  ", text)),
        ]
    )


def _told(word: str) -> Callable[[Plan], str]:
    """The words of one decision where it is not its default."""

    def line(plan: Plan) -> str:
        value = getattr(plan, word)
        return TABLE[word].choices.get(value, str(value)) if value != TABLE[word].default else ""

    return line


def _sharded(plan: Plan) -> str:
    sharded = [
        f"{name}_{'·'.join(live)}"
        for name, axes in plan.rules.entries
        if (live := [axis for axis in axes if axis in plan.mesh])
    ]
    return ", ".join(sharded) or "nothing"


def _stored(plan: Plan) -> str:
    if not plan.zero:
        return "ZeRO 0: parameters, gradients and optimizer state sharded as in compute"
    axes = "·".join(_stored_axes(plan)) or "one device"
    return f"ZeRO {plan.zero}: {TABLE['zero'].choices[plan.zero]} sharded over {axes}"


def _stored_axes(plan: Plan) -> list[str]:
    """Mesh axes that shard optimizer state, and do not shard the same parameter in compute."""
    used = {axis for p in plan.parameters for axis in p.state.axes - p.compute.axes}
    return [axis for axis in MESH_AXES if axis in used] or (["fsdp"] if "fsdp" in plan.mesh else [])


def _remat(plan: Plan) -> str:
    words = TABLE["remat"].choices
    if plan.remat_classes:
        return "on the fullest stage " + "; ".join(
            f"{f'{layers} of ' if layers else ''}{name}: {words.get(policy, policy)}"
            for name, policy, layers in plan.remat_classes
        )
    return words.get(plan.remat, plan.remat) + (
        f"; in {layers} layer{'s' if layers > 1 else ''} of the fullest stage only"
        if (layers := plan.remat_layers)
        else ""
    )


def _microbatches(plan: Plan) -> str:
    if plan.microbatches == 1:
        return ""
    groups = plan.accumulation
    return str(plan.microbatches) + (
        f", in {groups} groups, one after the other" if groups > 1 else ""
    )


def _pipeline(plan: Plan) -> str:
    schedule = named(plan.schedule)
    if not schedule.staged:
        return ""
    parts = [f"{plan.mesh['stage']} stages, {schedule.label(plan.virtual_stages)}"]
    if plan.gather == "once":
        by_group = schedule.forward_first and plan.virtual_stages > 1 and plan.accumulation > 1
        often = "for each group of microbatches" if by_group else "per step"
        parts.append(f"weights gathered once {often}")
    return "; ".join([*parts, *filter(None, [_told("pipeline")(plan)])])


def _attention(plan: Plan) -> str:
    return "" if plan.ring else _told("attention")(plan)


def _offloaded(plan: Plan) -> str:
    words = {"optimizer": "optimizer state", "activations": "activations of layers"}
    return " and ".join(words[part] for part in plan.offload if part != "disk")


def _disk(plan: Plan) -> str:
    return "optimizer state" if "disk" in plan.offload else ""


def _over_tensor(word: str) -> Callable[[Plan], str]:
    """The meaning of the default of a decision about the tensor axis."""

    def line(plan: Plan) -> str:
        entry = TABLE[word]
        return entry.choices[entry.default] if "tensor" in plan.mesh else "no tensor axis"

    return line


def _dtypes(plan: Plan) -> str:
    return ", ".join(f"{word.removesuffix('_dtype')} {dtype}" for word, dtype in plan.dtypes)


def _links(plan: Plan) -> str:
    order = plan.axis_order
    return f"{order[0]} on the outermost, {order[-1]} on the innermost" if order else ""


#: Lines by label, in their order.
_LINES: Mapping[str, Callable[[Plan], str]] = {
    "mesh": lambda plan: str(plan.mesh),
    "compute layout": _sharded,
    "stored layout": _stored,
    "residual stream": _told("sequence_parallel"),
    "remat policy": _remat,
    "microbatches": _microbatches,
    "pipeline": _pipeline,
    "context": _told("context"),
    "matmuls over tensor": _told("collective_matmul"),
    "attention": _attention,
    "experts": _told("experts"),
    "host memory": _offloaded,
    "disk": _disk,
    "dtypes": _dtypes,
    "links": _links,
    "compiler flags": lambda plan: ", ".join(
        f"{flag.name}={flag.value}" for flag in plan.compiler_flags
    ),
}

#: What plans decide that do not have a line, by its label, where the table does not say it alone.
_UNTOLD: Mapping[str, Callable[[Plan], str]] = {
    "residual stream": _over_tensor("sequence_parallel"),
    "microbatches": lambda plan: "1",
    "matmuls over tensor": _over_tensor("collective_matmul"),
    "attention": lambda plan: TABLE["context" if plan.ring else "attention"].choices[
        "ring" if plan.ring else "traced"
    ],
    "dtypes": lambda plan: "those of the model",
    "links": lambda plan: "the usual order",
    "compiler flags": lambda plan: "those of the compiler",
}


# --------------------------------------------------------------------------------------------------
# Seconds, bytes and collectives of a plan, as bars and tables.

_BAR = 40
_MOST_COLLECTIVES = 12
#: What people call the parts of a step whose field names are too short.
LABELS = {
    "exposed": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "overhead": "launch overhead",
}


def parts_of(value: Seconds | DeviceBytes) -> list[Part]:
    """(label, size, text) of the parts of a step or of the memory of a device that are not zero."""
    labels, words = (LABELS, seconds_text) if isinstance(value, Seconds) else ({}, bytes_text)
    return [
        (labels.get(field.name, field.name), float(size), words(size))
        for field in fields(value)
        if (size := getattr(value, field.name)) > 0
    ]


def _bars(parts: Sequence[Part], total: float) -> list[str]:
    if not parts:
        return []
    width, figure = max(len(label) for label, _, _ in parts), max(len(text) for _, _, text in parts)
    return [
        f"  {label:{width}}  {quantity_bar(value / total, _BAR)} {text:>{figure}} "
        f" {percent_text(value / total):>6}"
        for label, value, text in parts
    ]


def time_section(plan: Plan) -> str:
    """Returns the section about the seconds of a step."""
    seconds = plan.estimate.seconds
    bars = _bars(parts_of(seconds), seconds.total or 1.0)
    return "\n".join([f"Time: {seconds_text(seconds.total)} per step", *bars])


def memory_section(plan: Plan, hbm_bytes: float | None) -> str:
    """Returns the section about the bytes of the fullest device.

    Args:
        hbm_bytes: what a device has; None where that is not known.
    """
    parts = plan.estimate.device_bytes
    rows = parts_of(parts)
    total = hbm_bytes or parts.peak or 1.0
    if hbm_bytes and hbm_bytes > parts.peak:
        rows += spare_rows(plan.estimate, hbm_bytes)
    of = f" of {bytes_text(limit_bytes(plan.estimate, hbm_bytes))}" if hbm_bytes else ""
    return "\n".join(
        [
            f"Memory: {bytes_text(parts.peak)}{of} on the fullest device",
            *_bars(rows, max(total, parts.peak)),
        ]
    )


def limit_bytes(estimate: Estimate, hbm_bytes: float) -> float:
    """Bytes of a device that a plan may fill, as a program may need more than predicted.

    Args:
        hbm_bytes: what a device has.
    """
    return hbm_bytes / estimate.margin


def spare_rows(estimate: Estimate, hbm_bytes: float) -> list[Part]:
    """Returns the free memory of a device: (label, bytes, text).

    Args:
        hbm_bytes: what a device has.
    """
    limit, peak = limit_bytes(estimate, hbm_bytes), estimate.device_bytes.peak
    rows = (("margin", hbm_bytes - max(limit, peak)), ("spare", limit - peak))
    return [(label, size, bytes_text(size)) for label, size in rows if size > 0]


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """All collectives of one kind over the same mesh axes.

    Attributes:
        kind: what XLA calls it.
        axes: the mesh axes it spans.
        count: executions in one step.
        bytes: bytes of all executions in one step on a device.
        seconds: time of all executions, hidden or not.
        cause: what most of the time is for.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    cause: str


def collective_rows(collectives: Iterable[Collective]) -> list[CollectiveRow]:
    """Collectives added up by mesh axes and kind, the largest time first."""
    groups: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.axes, collective.kind), []).append(collective)
    rows = [
        CollectiveRow(
            kind=kind,
            axes=axes,
            count=sum(c.count for c in group),
            bytes=sum(c.total_bytes for c in group),
            seconds=sum(c.seconds for c in group),
            cause=_cause(max(group, key=lambda c: (c.seconds, c.total_bytes)).cause),
        )
        for (axes, kind), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, -row.bytes, row.axes, row.kind))


def _cause(scope: str) -> str:
    """A name scope without the words that automatic differentiation adds: transpose(jvp(loss)) is
    "loss, backward".
    """
    for front, which in (("transpose(jvp(", "backward"), ("jvp(", "forward")):
        if scope.startswith(front):
            inner = scope.removeprefix(front).replace(")", "").strip("/")
            return f"{inner}, {which}" if inner else f"activations, {which}"
    return scope


def collectives_section(plan: Plan) -> str:
    """Returns the section about the collectives of a step; empty where there are none."""
    rows = collective_rows(in_every_step(plan.estimate.collectives))
    if not rows:
        return meetings_section(plan)
    everything = sum(row.seconds for row in rows)
    exposed = min(plan.estimate.seconds.exposed, everything)
    head = (
        f"Collectives: {seconds_text(everything)} per step, {seconds_text(exposed)} exposed,"
        f" {seconds_text(everything - exposed)} hidden behind compute"
        if everything
        else "Collectives"
    )
    table = [
        ("over", "kind", "count", "bytes", "time", "mostly for"),
        *(
            (
                "·".join(row.axes),
                row.kind,
                f"{row.count:,}",
                bytes_text(row.bytes),
                seconds_text(row.seconds),
                clip(row.cause, 40),
            )
            for row in rows[:_MOST_COLLECTIVES]
        ),
    ]
    return "\n".join(
        [
            head,
            *aligned(table, right={2, 3, 4}),
            *and_more(len(rows) - _MOST_COLLECTIVES, "kinds of collective"),
            *([meetings] if (meetings := meetings_section(plan)) else []),
        ]
    )


def in_every_step(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives of a step, without those of meetings of islands."""
    return [collective for collective in collectives if not collective.every]


# An estimate says how long each collective takes and how much of all of them is exposed.
# Collectives over axes that compute waits for (`shardlib.layout.Axis.waits`) are exposed; what is
# left of the exposed time is shared out among the others by their seconds.
@dataclass(frozen=True, kw_only=True)
class Lane:
    """All collectives of one kind over the same axes.

    Attributes:
        row: the collectives.
        exposed: seconds of them that devices wait.
    """

    row: CollectiveRow
    exposed: float


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """The kinds of collectives of a step with what is exposed of each, the slowest first; exposed
    seconds add up to no more than the estimate's.
    """
    rows = collective_rows(in_every_step(plan.estimate.collectives))
    waiting = {id(row): all(AXES[axis].waits for axis in row.axes) for row in rows}
    left = plan.estimate.seconds.exposed
    blocked = sum(row.seconds for row in rows if waiting[id(row)])
    others = sum(row.seconds for row in rows) - blocked
    part = min(1.0, left / blocked) if blocked else 0.0
    remaining = max(0.0, left - blocked)
    share = min(1.0, remaining / others) if others else 0.0
    return tuple(
        Lane(row=row, exposed=row.seconds * (part if waiting[id(row)] else share)) for row in rows
    )


def meetings_section(plan: Plan) -> str:
    """Returns the section about the traffic of a meeting of islands; empty where there is none."""
    met = [collective for collective in plan.estimate.collectives if collective.every]
    listed = "; ".join(
        f"{collective.kind} over {'·'.join(collective.axes)}, {bytes_text(collective.total_bytes)}"
        f" in {seconds_text(collective.seconds)}"
        for collective in met
    )
    if not met:
        return ""
    exchange, interval = plan.exchange, met[0].every
    waits = "all of it exposed"
    if exchange.delay:
        waiting = seconds_text(plan.estimate.seconds.exchange * interval)
        waits = f"of which steps wait for {waiting}, as {exchange.delay} hide what crosses"
    return f"Every {interval} steps a meeting, {waits}: {listed}"


#: Rows that a text lists.
MOST_PARAMETERS = 24


def notation(names: LogicalAxes, shape: Sequence[int], layout: Layout) -> str:
    """A layout as the scaling book writes it: [I_X, J_Y].

    Args:
        names: colour per dim; None where it has none.
    """
    dims = (
        f"{name or size}{'_' + '·'.join(axes) if axes else ''}"
        for name, size, axes in zip(names, shape, layout, strict=True)
    )
    return f"[{', '.join(dims)}]"


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """Parameters that differ only in the number of their layer.

    Attributes:
        pattern: tree path with `*` for layer numbers.
        count: how many parameters.
        bytes: bytes of all of them, uncut.
        example: one of them.
    """

    pattern: str
    count: int
    bytes: int
    example: ParameterLayout

    @property
    def rest(self) -> str:
        """The stored layout in the scaling book's notation."""
        return notation(self.example.colours, self.example.shape, self.example.rest)

    @property
    def compute(self) -> str:
        """The layout in compute in the scaling book's notation."""
        return notation(self.example.colours, self.example.shape, self.example.compute)


def parameter_rows(parameters: Iterable[ParameterLayout]) -> list[ParameterRow]:
    """Parameters folded by pattern, in the order of their first appearance."""
    groups: dict[tuple[object, ...], list[ParameterLayout]] = {}
    for parameter in parameters:
        pattern = ".".join("*" if part.isdigit() else part for part in parameter.path.split("."))
        key = (
            pattern,
            parameter.shape,
            parameter.dtype,
            parameter.colours,
            parameter.compute,
            parameter.rest,
            parameter.gradient,
            parameter.state,
            parameter.role,
        )
        groups.setdefault(key, []).append(parameter)
    return [
        ParameterRow(
            pattern=str(key[0]) if len(group) > 1 else group[0].path,
            count=len(group),
            example=group[0],
            bytes=sum(math.prod(p.shape) * ITEMSIZE.get(p.dtype, 4) for p in group),
        )
        for key, group in groups.items()
    ]


def _compute_text(row: ParameterRow) -> str:
    """The layout in compute, told by what happens to the stored one where that says it all."""
    stored, compute = row.example.rest, row.example.compute
    gathered = [axis for dim in stored for axis in dim if axis not in compute.axes]
    if stored == compute:
        return "same"
    if compute == Layout(*(tuple(axis for axis in dim if axis not in gathered) for dim in stored)):
        return f"gathers {'·'.join(gathered)}"
    return row.compute


def parameters_section(plan: Plan) -> str:
    """The parameters of a plan, the largest kinds of them; empty without any."""
    rows = parameter_rows(plan.parameters)
    if not rows:
        return ""
    elements = sum(math.prod(p.shape) for p in plan.parameters)
    shown = sorted(sorted(range(len(rows)), key=lambda i: -rows[i].bytes)[:MOST_PARAMETERS])
    table = [
        ("parameter", "bytes", "stored", "in compute"),
        *(
            (
                clip(row.pattern, 32)
                + (f" x{row.count}" if row.count > 1 else "")
                + ("" if row.example.trained else f" ({row.example.role})"),
                bytes_text(row.bytes),
                row.rest,
                _compute_text(row),
            )
            for row in (rows[i] for i in shown)
        ),
    ]
    frozen = sum(math.prod(p.shape) for p in plan.parameters if not p.trained)
    head = (
        f"Parameters: {parameters_text(elements)}, {bytes_text(sum(row.bytes for row in rows))} in"
        f" all{f'; {parameters_text(frozen)} are frozen' if frozen else ''}"
    )
    return "\n".join(
        [
            head,
            *aligned(table, right={1}),
            *and_more(len(rows) - MOST_PARAMETERS, "smaller kinds of parameter"),
        ]
    )


# --------------------------------------------------------------------------------------------------
# Reasons of a choice: the limits of the step, the decisions that memory forces, the next best
# meshes.

_MOST_RUNNERS = 4
#: Share of the kernels' time that FLOPs take at the peak where they are what limits them.
_MOSTLY = 0.5


def reasons(plan: Plan, hbm_bytes: float | None = None) -> list[str]:
    """One sentence per reason: what limits the step, what memory forces, which meshes come next.

    Args:
        hbm_bytes: that a program can use of a device; None where it is not known.
    """
    estimate, seconds = plan.estimate, plan.estimate.seconds
    total = estimate.step_seconds or 1.0
    name, largest = max(
        ((field.name, getattr(seconds, field.name)) for field in fields(seconds)),
        key=lambda item: item[1],
    )
    share = f"{seconds_text(largest)} of {seconds_text(total)} ({percent_text(largest / total)})"
    lines = [
        _kernels_reason(estimate, largest, share)
        if name == "compute"
        else f"{LABELS.get(name, name).capitalize()} limits the step: {share}."
    ]
    if estimate.model_flops:
        more = estimate.hardware_flops / estimate.model_flops - 1
        cause = (
            " in element-wise operations and what the model or its kernels recompute"
            if plan.remat == "none" and not plan.remat_classes
            else " to recompute activations"
        )
        lines.append(
            f"The step needs {count_text(estimate.model_flops, 'FLOP')}"
            + (f" and executes {percent_text(more)} more{cause}" if more > 0.005 else "")
            + f"; the devices peak at {count_text(estimate.peak_flops_per_s, 'FLOP/s')} together."
        )
    lines += [*_communication_reason(plan), *_sure_reason(plan), *_prices_reason(plan)]
    if hbm_bytes:
        limit, peak = limit_bytes(estimate, hbm_bytes), estimate.device_bytes.peak
        lines.append(
            f"Memory: {bytes_text(peak)} of {bytes_text(limit)} per device, "
            + (
                f"{percent_text((limit - peak) / limit)} spare"
                if limit >= peak
                else f"{bytes_text(peak - limit)} too much"
            )
            + (
                f": of {bytes_text(hbm_bytes)} that programs can use a plan may fill so much, as"
                f" they may need {percent_text(estimate.margin - 1)} more than predicted."
                if estimate.margin > 1
                else "."
            )
        )
    idle = [f.message for f in plan.findings if f.code == "idle-devices"]
    lines += [f"{message[:1].upper()}{message[1:]}." for message in idle]
    return lines + _offload_reason(plan, hbm_bytes) + _too_big_reason(plan)


def _kernels_reason(estimate: Estimate, seconds: float, share: str) -> str:
    """Names the limit of a step of kernels: their FLOPs, where these alone take most of that time
    at the peak of the chips.

    Args:
        seconds: of its kernels.
    """
    at_peak = estimate.hardware_flops / (estimate.peak_flops_per_s or 1.0)
    if not at_peak or at_peak >= _MOSTLY * seconds:
        return f"Compute limits the step: {share}."
    return (
        f"Kernels (compute and memory traffic) limit the step: {share}. At the peak of the chips"
        f" their FLOPs alone would take {seconds_text(at_peak)}; the rest is memory traffic,"
        " launches and matmuls that do not reach that peak."
    )


def _communication_reason(plan: Plan) -> list[str]:
    by_axes: dict[tuple[str, ...], float] = {}
    for collective in in_every_step(plan.estimate.collectives):
        by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + collective.seconds
    everything = sum(by_axes.values())
    if not everything:
        return [] if plan.mesh.devices > 1 else ["One device needs no communication."]
    axes, largest = max(by_axes.items(), key=lambda item: item[1])
    exposed = min(plan.estimate.seconds.exposed, everything)
    return [
        f"Communication takes {seconds_text(everything)}, of which"
        f" {percent_text(1 - exposed / everything)} hides behind compute; the most is over"
        f" {'·'.join(axes)} ({seconds_text(largest)})."
    ]


def _offload_reason(plan: Plan, hbm_bytes: float | None) -> list[str]:
    """Gives the reason why something is offloaded, however much memory is spare with it."""
    offloaded = plan.estimate.offloaded
    if offloaded is None:
        return []
    needed = plan.estimate.device_bytes.peak + offloaded.device_bytes
    limit = hbm_bytes / plan.estimate.margin if hbm_bytes else None
    why = (
        f"more than the {bytes_text(limit)} that a plan may take"
        if limit is not None and needed > limit
        else "which would fit"
    )
    what = " and ".join(
        {"optimizer": "optimizer state", "disk": "optimizer state"}.get(part, part)
        for part in plan.offload
    )
    return [
        f"Offloaded: {what}, {bytes_text(offloaded.device_bytes)} per device. With that in device"
        f" memory the same plan would need {bytes_text(needed)}, {why}; all of it is moved or"
        f" nothing, which costs {seconds_text(offloaded.seconds)} of a step."
    ]


def _too_big_reason(plan: Plan) -> list[str]:
    too_big = [r for r in plan.search.rejected if r.reason == "memory"]
    if not too_big:
        return []
    smallest = min(too_big, key=lambda r: (r.peak_bytes == 0, r.peak_bytes))
    need = (
        f", which needs {bytes_text(smallest.peak_bytes)} per device" if smallest.peak_bytes else ""
    )
    many = (
        f"{len(too_big)} other meshes do not fit in memory; the nearest is"
        if len(too_big) > 1
        else "Another mesh does not fit in memory:"
    )
    return [f"{many} {smallest.mesh}{need}."]


#: The head of a table of `next_rows`.
NEXT_HEAD = ("the time", "per device", "mesh", "with")


def next_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """The next best plans: (time beside the plan's, bytes per device, mesh, other decisions). Those
    that are predicted even with it come first and say so, the least memory first.
    """
    slower = [r for r in plan.search.rejected if r.reason in ("slower", "bound")][:_MOST_RUNNERS]
    most = (1 + INDISTINGUISHABLE) * plan.estimate.step_seconds
    even = [r for r in slower if r.reason == "slower" and r.step_seconds < most]
    even.sort(key=lambda r: r.peak_bytes)
    return [
        (
            _speed(plan, r) + ", even" * (r in even),
            bytes_text(r.peak_bytes) if r.peak_bytes else "",
            str(r.mesh),
            r.summary,
        )
        for r in (*even, *(r for r in slower if r not in even))
    ]


def _next_section(plan: Plan) -> str:
    rows = next_rows(plan)
    even = f" (even: predicted within {INDISTINGUISHABLE:.0%})"
    head = "Next best" + even * any(time.endswith("even") for time, *_ in rows)
    return "\n".join([head, *aligned([NEXT_HEAD, *rows], right=(0, 1))]) if rows else ""


def _sure_reason(plan: Plan) -> list[str]:
    """Gives how sure the step time is."""
    known = plan.estimate.interval
    if known is None:
        return []
    return [
        f"Of {known.runs} published runs of {known.sources} sources that no price had seen,"
        f" {known.share:.0%} took {known.low:.2f} to {known.high:.2f} times as long as"
        f" predicted: here {interval_text(plan.estimate)}."
    ]


def _prices_reason(plan: Plan) -> list[str]:
    """Says when the prices were measured, where they are not those of the catalogue."""
    measured = plan.source.topology.measured if plan.source is not None else None
    return [] if measured is None else [f"The prices of {plan.topology} were {measured}."]


def interval_text(estimate: Estimate) -> str:
    """The interval of the step time: "1.17 to 1.90 s"; "" for an estimate without one."""
    low, high = (seconds_text(bound).split() for bound in estimate.step_interval or (0.0, 0.0))
    unit = [] if low[1:] == high[1:] else low[1:]
    return " ".join([low[0], *unit, "to", *high]) if estimate.step_interval else ""


def _speed(plan: Plan, rejected: Rejected) -> str:
    at_least = "at least " if rejected.reason == "bound" else ""
    return f"{at_least}{ratio_text(rejected.step_seconds / (plan.estimate.step_seconds or 1.0))}"


def why_section(plan: Plan, hbm_bytes: float | None) -> str:
    """The reasons as text.

    Args:
        hbm_bytes: that a program can use of a device; None where it is not known.
    """
    return "\n".join(
        ["Why", *(line for reason in reasons(plan, hbm_bytes) for line in wrapped("  - ", reason))]
    )


# --------------------------------------------------------------------------------------------------
# The decisions and their reasons at a glance.


def explain(plan: Plan, *, topology: Topology | None = None) -> str:
    """Explains a plan in plain text, at most 100 columns wide.

    Args:
        topology: the machine it is for; None looks it up by the plan's spelling of it.
    """
    hbm_bytes = usable_bytes(plan, topology)
    parts = [
        headline(plan),
        decisions_section(plan),
        why_section(plan, hbm_bytes),
        _next_section(plan),
        _compiler(plan),
        time_section(plan),
        memory_section(plan, hbm_bytes),
        collectives_section(plan),
        parameters_section(plan),
        _findings(plan),
        _search(plan),
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def usable_bytes(plan: Plan, topology: Topology | None = None) -> int | None:
    """Memory of a device that a program can use; None where the plan's topology is a file that is
    not on this machine.
    """
    try:
        return (topology or find_topology(plan.topology)).chip.usable_bytes
    except (TopologyError, MissingFileError):
        return None


def headline(plan: Plan) -> str:
    """Two lines: what runs where, and how fast."""
    estimate, n = plan.estimate, plan.mesh.devices
    return "\n".join(
        [
            f"{subject(plan)}: {n} device{'s' if n > 1 else ''}, mesh {plan.mesh}",
            (
                f"{seconds_text(estimate.step_seconds)} per step ·"
                f" {count_text(estimate.tokens_per_second)} tokens/s · MFU"
                f" {percent_text(estimate.mfu)} · {bytes_text(estimate.device_bytes.peak)}"
                " per device"
            ),
        ]
    )


def subject(plan: Plan) -> str:
    """What a plan is a plan of: the model, the machine, and the framework where there is one."""
    software = f" under {plan.framework.name}" if plan.framework is not None else ""
    return f"{plan.model} on {plan.topology}{software}"


TRIAL_HEAD = ("mesh", "step", "compiled", "memory", "compiled", "verdict", "other decisions")


def trial_rows(record: Refined) -> list[tuple[str, ...]]:
    """The plans that were compiled, a row for each under `TRIAL_HEAD`."""
    return [
        (
            str(t.mesh),
            seconds_text(t.predicted_seconds),
            seconds_text(t.compiled_seconds) if t.compiled_seconds else "-",
            bytes_text(t.predicted_bytes),
            bytes_text(t.compiled_bytes) if t.compiled_bytes else "-",
            t.verdict + (f", {seconds_text(t.run_seconds)} when run" if t.run_seconds else ""),
            t.summary,
        )
        for t in record.trials
    ]


def _compiler(plan: Plan) -> str:
    """The plans that were compiled: predicted beside compiled, and the verdict."""
    record = plan.refined
    if record is None:
        return ""
    kernels = {
        "compiler": "kernels and collectives are the compiler's",
        "model": "collectives are the compiler's, the time of kernels is predicted",
    }
    sums = (
        f"A step takes {seconds_text(record.step_seconds)} and {bytes_text(record.peak_bytes)} per"
        f" device; {kernels[record.kernels]}"
        + (
            f", {', '.join(' '.join(pair) for pair in record.versions)}."
            if record.versions
            else "."
        )
    )
    skipped = (
        [
            f"{record.passed_over:,} more candidates were passed over: the compiler found plans"
            " like them too large."
        ]
        if record.passed_over
        else []
    )
    return "\n".join(
        [
            "What the compiler said",
            *aligned([TRIAL_HEAD, *trial_rows(record)], right={1, 2, 3, 4}),
            *(
                line
                for text in (sums, *settled(plan, record), *skipped)
                for line in wrapped("  - ", text)
            ),
        ]
    )


def settled(plan: Plan, record: Refined) -> list[str]:
    """What compiling or running plans removed of the doubt that predictions leave."""
    chosen = next((trial for trial in record.trials if trial.verdict == CHOSEN), None)
    if chosen is None:
        return []

    def apart(a: float, b: float) -> float:
        return max(a, b) / (min(a, b) or 1.0) - 1

    def known(trial: Trial) -> float:
        return trial.run_seconds or trial.compiled_seconds

    even = [
        trial
        for trial in record.trials
        if trial is not chosen
        and apart(trial.predicted_seconds, chosen.predicted_seconds) <= INDISTINGUISHABLE
    ]
    left = [t for t in even if t.survived and apart(known(t), known(chosen)) <= INDISTINGUISHABLE]
    out = [trial for trial in even if not trial.survived]
    lines = list[str]()
    if even:
        lines.append(
            f"Others predicted within {INDISTINGUISHABLE:.0%} of it: {len(even)}; still within"
            f" {INDISTINGUISHABLE:.0%}: {len(left)}; further apart:"
            f" {len(even) - len(left) - len(out)}; cannot run: {len(out)}."
        )
    if chosen.compiled_bytes:
        lines.append(
            "Peak memory is known, not predicted:"
            f" {chosen.compiled_bytes / chosen.predicted_bytes - 1:+.1%} beside the prediction,"
            f" which allows for {percent_text(plan.estimate.margin - 1)}."
        )
    if chosen.run_seconds:
        lines.append(
            f"It was run: {seconds_text(chosen.run_seconds)} per step, predicted"
            f" {seconds_text(chosen.predicted_seconds)}."
        )
    elif plan.estimate.interval:
        lines.append(
            "Still open is how fast kernels and links are: the step time keeps its interval,"
            f" {interval_text(plan.estimate)}."
        )
    return lines


def _findings(plan: Plan) -> str:
    if not plan.findings:
        return ""
    return "\n".join(
        ["Findings", *(line for finding in plan.findings for line in wrapped("  - ", str(finding)))]
    )


def _search(plan: Plan) -> str:
    search = plan.search
    if not search.evaluations:
        return ""
    proof = (
        "no plan in the space is faster within the cost model"
        if search.gap <= 0
        else (
            f"no plan in the space can beat {seconds_text(search.lower_bound)} (gap"
            f" {percent_text(search.gap)})"
        )
    )
    text = (
        f"{search.evaluations:,} of {search.candidates:,} candidates priced in"
        f" {seconds_text(search.seconds)}; {proof}."
    )
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in search.counts)
    return "\n".join(
        [
            "Search",
            *wrapped("  - ", text),
            *(wrapped("  - ", f"Candidates by outcome: {counts}.") if counts else []),
        ]
    )


# --------------------------------------------------------------------------------------------------
# A plan in one line, and as a card in a notebook.


def plan_line(plan: Plan, name: str = "Plan") -> str:
    """A plan in one line."""
    estimate = plan.estimate
    return short(
        name,
        f"{plan.model} on {plan.topology}: {plan.mesh}",
        f"zero {plan.zero}" if plan.zero else "",
        f"{seconds_text(estimate.step_seconds)} per step",
        f"{bytes_text(estimate.device_bytes.peak)} per device",
    )


def plan_card(plan: Plan) -> str:
    """A plan as HTML for a notebook."""
    first, *lines = headline(plan).splitlines()
    usable = usable_bytes(plan)
    memory = parts_of(plan.estimate.device_bytes)
    spare = 0.0 if usable is None else usable - plan.estimate.device_bytes.peak
    if spare > 0:
        memory.append(("spare", spare, bytes_text(spare)))
    return card(
        first,
        lines,
        bars=(
            ("time per step", parts_of(plan.estimate.seconds)),
            ("memory per device", memory),
        ),
        rows=decision_lines(plan),
        text=explain(plan),
    )


_EIGHTHS = " ▏▎▍▌▋▊▉"


def quantity_bar(share: float, width: int) -> str:
    """A horizontal bar of Unicode blocks, `width` columns for a share of 1, exact to an eighth of a
    column; padded.

    >>> quantity_bar(0.5, 8), quantity_bar(0.28, 4)
    ('████    ', '█▏  ')
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if share > 0 else 0
    full, remainder = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[remainder] if remainder else "")).ljust(width)
