"""What was decided, and why, in words that a person understands at a glance.

Shardings are written as the scaling book writes them (jax-ml/scaling-book, `sharding.md`):
[embed_fsdp, mlp_tensor] is a matrix whose dim "embed" is cut over the mesh axis "fsdp" and whose
dim "mlp" is cut over "tensor". A dim without a name shows its size.

>>> notation(("embed", "mlp"), (4096, 16384), Layout(("data", "fsdp"), "tensor"))
'[embed_data·fsdp, mlp_tensor]'
>>> notation((None, "mlp"), (3, 64), Layout((), ()))
'[3, mlp]'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from shardlib.axes import MESH_AXES, LogicalAxes
from shardlib.collective import Collective
from shardlib.errors import MissingFileError, TopologyError
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as find_topology
from shardlib.layout import Layout
from shardlib.planning.decisions.compiled_trials import Refined
from shardlib.planning.decisions.plan_data import ParameterLayout, PlanData, Rejected
from shardlib.planning.units.quantity import (
    bar,
    bytes_text,
    clip,
    count_text,
    parameters_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.schedules.table import named
from shardlib.untrusted import printable

_BAR = 40
_MOST_PARAMETERS = 24
_MOST_COLLECTIVES = 12
_MOST_RUNNERS = 4

_REST_WORDS = {
    0: "ZeRO 0: parameters, gradients and optimizer state cut as in compute",
    1: "ZeRO 1: optimizer state cut over {axes}",
    2: "ZeRO 2: gradients and optimizer state cut over {axes}",
    3: "ZeRO 3: parameters, gradients and optimizer state cut over {axes}",
}
_REMAT_WORDS = {
    "none": "none beyond what the model asks for",
    "dots": "dots: the backward pass computes again all but the results of matmuls",
    "full": "full: the backward pass computes every layer again",
}
_CONTEXT_WORDS = {
    "none": "",
    "all-gather": "keys and values are gathered over context",
    "ring": "keys and values go around the context axis beside the attention",
    "ulysses": "devices of the context axis exchange parts of the sequence for heads",
}
_ATTENTION_WORDS = {
    "traced": "",
    "blocks": "in blocks, whose scores are not kept",
    "splash": "splash attention, one kernel that writes no scores",
    "cudnn": "the kernel of cuDNN, which writes no scores",
}
#: What people call the parts of a step whose field names are too short.
LABELS = {
    "exposed": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "overhead": "launch overhead",
}


def notation(names: LogicalAxes, shape: Sequence[int], layout: Layout) -> str:
    """A layout as the scaling book writes it: [I_X, J_Y]."""
    dims = (
        f"{name or size}{'_' + '·'.join(axes) if axes else ''}"
        for name, size, axes in zip(names, shape, layout, strict=True)
    )
    return f"[{', '.join(dims)}]"


def explain(plan: PlanData, *, topology: Topology | None = None) -> str:
    """Explains a plan in plain text, at most 100 columns wide.

    Args:
        plan: the plan.
        topology: the machine it is for; None looks it up by the plan's spelling of it.
    """
    hbm_bytes = usable_bytes(plan, topology)
    parts = [
        headline(plan),
        _decisions(plan),
        _why(plan, hbm_bytes),
        _compiler(plan),
        _time(plan),
        _memory(plan, hbm_bytes),
        _collectives(plan),
        _parameters(plan),
        _findings(plan),
        _search(plan),
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def usable_bytes(plan: PlanData, topology: Topology | None = None) -> int | None:
    """Memory of a device that a program can use; None where the plan's topology is a file that is
    not on this machine.
    """
    try:
        return (topology or find_topology(plan.topology)).chip.usable_bytes
    except (TopologyError, MissingFileError):
        return None


def headline(plan: PlanData) -> str:
    """Two lines: what runs where, and how fast."""
    estimate, n = plan.estimate, plan.mesh.devices
    return "\n".join(
        [
            f"{plan.model} on {plan.topology}: {n} device{'s' if n > 1 else ''}, mesh {plan.mesh}",
            (
                f"{seconds_text(estimate.step_seconds)} a step ·"
                f" {count_text(estimate.tokens_per_second)} tokens/s · MFU"
                f" {percent_text(estimate.mfu)} · {bytes_text(estimate.device_bytes.peak)} a device"
            ),
        ]
    )


def decision_lines(plan: PlanData) -> list[tuple[str, str]]:
    """(what, decision) for every decision that is not the trivial one."""
    cut = [
        f"{name}_{'·'.join(live)}"
        for name, axes in plan.rules.entries
        if (live := [axis for axis in axes if axis in plan.mesh])
    ]
    axes = _rest_axes(plan)
    lines = [
        ("mesh", str(plan.mesh)),
        ("cut in compute", ", ".join(cut) or "nothing"),
        ("at rest", _REST_WORDS[plan.zero].format(axes="·".join(axes) or "one device")),
        (
            "residual stream",
            (
                "cut along the sequence over tensor (sequence parallelism)"
                if plan.sequence_parallel
                else ""
            ),
        ),
        ("recomputation", _recomputation(plan)),
        (
            "microbatches",
            (
                str(plan.microbatches)
                + (
                    f", in {plan.accumulation} groups, one after the other"
                    if plan.accumulation > 1
                    else ""
                )
                if plan.microbatches > 1
                else ""
            ),
        ),
        (
            "pipeline",
            (
                f"{plan.mesh['stage']} stages,"
                f" {named(plan.schedule).words(plan.virtual_stages)}{_gathered(plan)}{_apart(plan)}"
                if named(plan.schedule).staged
                else ""
            ),
        ),
        ("context", _CONTEXT_WORDS[plan.context]),
        (
            "matmuls over tensor",
            (
                "their operands and results move piece by piece, while others are multiplied"
                if plan.collective_matmul == "loop"
                else ""
            ),
        ),
        ("attention", _ATTENTION_WORDS[plan.attention] if plan.context != "ring" else ""),
        (
            "experts",
            (
                "tokens are routed to the devices that hold their experts"
                if plan.experts != "none"
                else ""
            ),
        ),
        (
            "host memory",
            " and ".join(
                {"optimizer": "optimizer state", "activations": "activations of layers"}[part]
                for part in plan.offload
                if part != "disk"
            ),
        ),
        ("disk", "optimizer state" if "disk" in plan.offload else ""),
        (
            "dtypes",
            ", ".join(f"{word.removesuffix('_dtype')} {dtype}" for word, dtype in plan.dtypes),
        ),
        (
            "links",
            (
                f"{plan.axis_order[0]} on the outermost, {plan.axis_order[-1]} on the innermost"
                if plan.axis_order
                else ""
            ),
        ),
    ]
    return [(label, text) for label, text in lines if text]


def _apart(plan: PlanData) -> str:
    """How stages run, where they are not one program."""
    return "; stages are programs of their own" if plan.pipeline == "programs" else ""


def _gathered(plan: PlanData) -> str:
    """When weights are gathered, where it is not by every operation."""
    if plan.gather != "once":
        return ""
    by_chunk = named(plan.schedule).forward_first and plan.virtual_stages > 1
    return (
        "; weights gathered once for each group of microbatches"
        if by_chunk and plan.accumulation > 1
        else "; weights gathered once a step"
    )


def _recomputation(plan: PlanData) -> str:
    if plan.remat_classes:
        return "on the fullest stage " + "; ".join(
            f"{f'{layers} of ' if layers else ''}{name}: {_REMAT_WORDS.get(policy, policy)}"
            for name, policy, layers in plan.remat_classes
        )
    return _REMAT_WORDS.get(plan.remat, plan.remat) + (
        f"; in {plan.remat_layers} layers of the fullest stage only" if plan.remat_layers else ""
    )


def _rest_axes(plan: PlanData) -> list[str]:
    """Mesh axes that cut optimizer state, and do not cut the same parameter in compute."""
    used = {axis for p in plan.parameters for axis in p.state.axes - p.compute.axes}
    return [axis for axis in MESH_AXES if axis in used] or (["fsdp"] if "fsdp" in plan.mesh else [])


def _decisions(plan: PlanData) -> str:
    lines = decision_lines(plan)
    width = max(len(label) for label, _ in lines)
    return "\n".join(
        [
            "Decisions",
            *(line for label, text in lines for line in wrapped(f"  {label:{width}}  ", text)),
        ]
    )


def reasons(plan: PlanData, hbm_bytes: float | None = None) -> list[str]:
    """One sentence per reason: what limits the step, what memory forces, which meshes come next."""
    estimate, seconds = plan.estimate, plan.estimate.seconds
    total = estimate.step_seconds or 1.0
    name, most = max(
        ((field.name, getattr(seconds, field.name)) for field in fields(seconds)),
        key=lambda item: item[1],
    )
    lines = [
        f"{LABELS.get(name, name).capitalize()} limits the step: {seconds_text(most)} of"
        f" {seconds_text(total)} ({percent_text(most / total)})."
    ]
    if estimate.model_flops:
        again = estimate.hardware_flops / estimate.model_flops - 1
        lines.append(
            f"The step needs {count_text(estimate.model_flops, 'FLOP')}"
            + (
                f" and executes {percent_text(again)} more to recompute activations"
                if again > 0.005
                else ""
            )
            + f"; the devices peak at {count_text(estimate.peak_flops_per_s, 'FLOP/s')} together."
        )
    lines += _communication_reason(plan)
    if hbm_bytes:
        spare = hbm_bytes - estimate.device_bytes.peak
        lines.append(
            f"Memory: {bytes_text(estimate.device_bytes.peak)} of {bytes_text(hbm_bytes)} a"
            " device, "
            + (
                f"{percent_text(spare / hbm_bytes)} spare."
                if spare >= 0
                else f"{bytes_text(-spare)} too much."
            )
        )
    return lines + _runner_reasons(plan)


def _communication_reason(plan: PlanData) -> list[str]:
    by_axes: dict[tuple[str, ...], float] = {}
    for collective in plan.estimate.collectives:
        by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + collective.seconds
    everything = sum(by_axes.values())
    if not everything:
        return [] if plan.mesh.devices > 1 else ["One device needs no communication."]
    axes, most = max(by_axes.items(), key=lambda item: item[1])
    exposed = min(plan.estimate.seconds.exposed, everything)
    return [
        f"Communication takes {seconds_text(everything)}, of which"
        f" {percent_text(1 - exposed / everything)} hides behind compute; the most is over"
        f" {'·'.join(axes)} ({seconds_text(most)})."
    ]


def _runner_reasons(plan: PlanData) -> list[str]:
    slower = [r for r in plan.search.rejected if r.reason in ("slower", "bound")][:_MOST_RUNNERS]
    too_big = [r for r in plan.search.rejected if r.reason == "memory"]
    groups: dict[tuple[str, str], list[str]] = {}
    for r in slower:
        groups.setdefault((r.summary, _speed(plan, r)), []).append(str(r.mesh))
    told = [
        f"{' or '.join(meshes)}{f' ({summary})' if summary else ''}, {speed}"
        for (summary, speed), meshes in groups.items()
    ]
    lines = [f"Next best: {'; '.join(told)}."] if told else []
    if too_big:
        least = min(too_big, key=lambda r: (r.peak_bytes == 0, r.peak_bytes))
        need = f", which needs {bytes_text(least.peak_bytes)} a device" if least.peak_bytes else ""
        many = (
            f"{len(too_big)} other meshes do not fit in memory; the nearest is"
            if len(too_big) > 1
            else "Another mesh does not fit in memory:"
        )
        lines.append(f"{many} {least.mesh}{need}.")
    return lines


def _speed(plan: PlanData, rejected: Rejected) -> str:
    at_least = "at least " if rejected.reason == "bound" else ""
    ratio = rejected.step_seconds / (plan.estimate.step_seconds or 1.0)
    return (
        "equally fast"
        if 0.995 < ratio < 1.005 and not at_least
        else f"{at_least}{ratio_text(ratio)} the time"
    )


def _why(plan: PlanData, hbm_bytes: float | None) -> str:
    return "\n".join(
        ["Why", *(line for reason in reasons(plan, hbm_bytes) for line in wrapped("  - ", reason))]
    )


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
            t.verdict,
            t.summary,
        )
        for t in record.trials
    ]


def _compiler(plan: PlanData) -> str:
    """The plans that were compiled: predicted beside compiled, and the verdict."""
    record = plan.refined
    if record is None:
        return ""
    kernels = {
        "compiler": "kernels and collectives are the compiler's",
        "model": "collectives are the compiler's, the time of kernels is predicted",
    }
    sums = (
        f"A step takes {seconds_text(record.step_seconds)} and {bytes_text(record.peak_bytes)} a"
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
            *(line for text in (sums, *skipped) for line in wrapped("  - ", text)),
        ]
    )


def _bars(rows: Iterable[tuple[str, float, str]], whole: float) -> list[str]:
    kept = [(label, value, text) for label, value, text in rows if value > 0]
    if not kept:
        return []
    width, figure = max(len(label) for label, _, _ in kept), max(len(text) for _, _, text in kept)
    return [
        f"  {label:{width}}  {bar(value / whole, _BAR)} {text:>{figure}} "
        f" {percent_text(value / whole):>6}"
        for label, value, text in kept
    ]


def _time(plan: PlanData) -> str:
    seconds = plan.estimate.seconds
    rows = (
        (
            LABELS.get(f.name, f.name),
            getattr(seconds, f.name),
            seconds_text(getattr(seconds, f.name)),
        )
        for f in fields(seconds)
    )
    return "\n".join(
        [f"Time: {seconds_text(seconds.total)} a step", *_bars(rows, seconds.total or 1.0)]
    )


def _memory(plan: PlanData, hbm_bytes: float | None) -> str:
    parts = plan.estimate.device_bytes
    rows = [
        (f.name, float(getattr(parts, f.name)), bytes_text(getattr(parts, f.name)))
        for f in fields(parts)
    ]
    whole = hbm_bytes or parts.peak or 1.0
    if hbm_bytes and hbm_bytes > parts.peak:
        rows.append(("spare", hbm_bytes - parts.peak, bytes_text(hbm_bytes - parts.peak)))
    of = f" of {bytes_text(hbm_bytes)}" if hbm_bytes else ""
    return "\n".join(
        [
            f"Memory: {bytes_text(parts.peak)}{of} on the fullest device",
            *_bars(rows, max(whole, parts.peak)),
        ]
    )


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


def _collectives(plan: PlanData) -> str:
    rows = collective_rows(plan.estimate.collectives)
    if not rows:
        return ""
    everything = sum(row.seconds for row in rows)
    exposed = min(plan.estimate.seconds.exposed, everything)
    head = (
        f"Collectives: {seconds_text(everything)} a step, {seconds_text(exposed)} exposed,"
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
            *_and_more(len(rows) - _MOST_COLLECTIVES, "kinds of collective"),
        ]
    )


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
        """The layout at rest in the scaling book's notation."""
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
    """The layout in compute, told by what happens to the one at rest where that says it all."""
    rest, compute = row.example.rest, row.example.compute
    gathered = [axis for dim in rest for axis in dim if axis not in compute.axes]
    if rest == compute:
        return "same"
    if compute == Layout(*(tuple(axis for axis in dim if axis not in gathered) for dim in rest)):
        return f"gathers {'·'.join(gathered)}"
    return row.compute


def _parameters(plan: PlanData) -> str:
    rows = parameter_rows(plan.parameters)
    if not rows:
        return ""
    elements = sum(math.prod(p.shape) for p in plan.parameters)
    shown = sorted(sorted(range(len(rows)), key=lambda i: -rows[i].bytes)[:_MOST_PARAMETERS])
    table = [
        ("parameter", "bytes", "at rest", "in compute"),
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
            *_and_more(len(rows) - _MOST_PARAMETERS, "smaller kinds of parameter"),
        ]
    )


def _findings(plan: PlanData) -> str:
    if not plan.findings:
        return ""
    return "\n".join(
        ["Findings", *(line for finding in plan.findings for line in wrapped("  - ", str(finding)))]
    )


def _search(plan: PlanData) -> str:
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


def diff(a: PlanData, b: PlanData) -> str:
    """What changes from plan `a` to plan `b`: decisions, seconds, bytes, layouts of parameters."""
    head = (
        f"{a.model} on {a.topology}"
        if (a.model, a.topology) == (b.model, b.topology)
        else f"{a.model} on {a.topology} -> {b.model} on {b.topology}"
    )
    sections = [head, _changed_decisions(a, b), _changed_figures(a, b), _changed_layouts(a, b)]
    return printable("\n\n".join(section for section in sections if section) + "\n")


def _changed_decisions(a: PlanData, b: PlanData) -> str:
    old, new = dict(decision_lines(a)), dict(decision_lines(b))
    labels = [label for label in dict.fromkeys([*old, *new]) if old.get(label) != new.get(label)]
    if not labels:
        return "Decisions: the same"
    lines = ["Decisions"]
    for label in labels:
        absent = "1" if label == "microbatches" else "none"
        lines += [
            *wrapped(f"  - {label}: ", old.get(label, absent)),
            *wrapped(f"  + {label}: ", new.get(label, absent)),
        ]
    return "\n".join(lines)


def _changed_figures(a: PlanData, b: PlanData) -> str:
    rows = [
        ("", "before", "after", "change"),
        _change("seconds a step", a.estimate.step_seconds, b.estimate.step_seconds, seconds_text),
    ]
    rows += [
        _change(
            f"  {LABELS.get(f.name, f.name)}",
            getattr(a.estimate.seconds, f.name),
            getattr(b.estimate.seconds, f.name),
            seconds_text,
        )
        for f in fields(a.estimate.seconds)
    ]
    rows.append(
        _change(
            "bytes a device", a.estimate.device_bytes.peak, b.estimate.device_bytes.peak, bytes_text
        )
    )
    rows += [
        _change(
            f"  {f.name}",
            getattr(a.estimate.device_bytes, f.name),
            getattr(b.estimate.device_bytes, f.name),
            bytes_text,
        )
        for f in fields(a.estimate.device_bytes)
    ]
    return "\n".join(
        aligned(
            [row for row in rows if row[1:3] not in (("0 s", "0 s"), ("0 B", "0 B"))],
            right={1, 2, 3},
        )
    )


def _change(
    label: str, old: float, new: float, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    change = (
        "="
        if old == new
        else f"{'+' if new > old else '-'}{text(abs(new - old))}"
        + (f" ({ratio_text(new / old)})" if old else "")
    )
    return label, text(old), text(new), change


def _changed_layouts(a: PlanData, b: PlanData) -> str:
    old = {p.path: p for p in a.parameters}
    changed = [
        p
        for p in b.parameters
        if p.path in old and (p.rest, p.compute) != (old[p.path].rest, old[p.path].compute)
    ]
    if not changed:
        return ""
    table = [("parameter", "", "before (-) and after (+)")]
    for row in parameter_rows(changed)[:_MOST_PARAMETERS]:
        was, now = old[row.example.path], row.example
        name = clip(row.pattern, 34) + (f" x{row.count}" if row.count > 1 else "")
        for where, before, after in (
            ("at rest", was.rest, now.rest),
            ("in compute", was.compute, now.compute),
        ):
            if before != after:
                table.append((name, where, f"- {notation(was.colours, was.shape, before)}"))
                table.append(("", "", f"+ {notation(now.colours, now.shape, after)}"))
                name = ""
    return "\n".join(
        [f"Layouts: {len(changed)} of {len(b.parameters)} parameters change", *aligned(table)]
    )


def _and_more(count: int, what: str) -> list[str]:
    return [f"  and {count} {what}"] if count > 0 else []
