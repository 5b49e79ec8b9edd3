"""Web pages of a plan: one plan, two side by side, and one as a picture on its machine; the
pictures of a page, and the data for its script; a scaling curve as a picture.

The figures and sentences of a page are those of the text; only the form differs. Without the script
everything but the landscape of plans and the arrays as grids is there. The geometry of a picture is
in its template; its sizes, colours and figures are made here.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardlib.cost.pricing import DeviceBytes
from shardlib.cost.roofline import fitting_bytes
from shardlib.decisions.table import TABLE
from shardlib.errors import ArgumentError, MissingFileError, PlanError, TopologyError
from shardlib.graph import ITEMSIZE
from shardlib.layout import Collective, Layout, MeshShape
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Topology, device_order, place
from shardlib.machines.topology import topology as find_topology
from shardlib.planner.answers import (
    KERNEL_HEAD,
    SHOCK_HEAD,
    Answers,
    Kernels,
    break_text,
    kernel_rows,
    price_row,
    shock_row,
)
from shardlib.planner.parts import ActivationLayout, Move, joined_names
from shardlib.planner.plan import Plan
from shardlib.planner.scaling import ScalingCurve, ScalingPoint
from shardlib.report.changes import change
from shardlib.report.elements import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.report.markup import (
    BLUE,
    GREEN,
    OLIVE,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH,
    Box,
    LogAxis,
    Picture,
    render,
    round_steps,
)
from shardlib.report.text import (
    LABELS,
    NEXT_HEAD,
    TRIAL_HEAD,
    CollectiveRow,
    ParameterRow,
    collective_rows,
    decision_lines,
    in_every_step,
    interval_text,
    lanes,
    limit_bytes,
    next_rows,
    notation,
    parameter_rows,
    parts_of,
    reasons,
    settled,
    trial_rows,
)
from shardlib.report.timelines import Timeline, predicted
from shardlib.schedules import named
from shardlib.untrusted.data import JsonObject


def compared_page(a: Plan, b: Plan) -> str:
    """One self-contained HTML page about what changes from plan `a` to plan `b`."""
    changed = change(a, b)
    plans: list[tuple[str, Picture | None, Picture]] = []
    for name, plan in (("Before", a), ("After", b)):
        machine = _topology(plan)
        drawn = machine and machine_picture(plan.mesh, machine, plan.axis_order)[0]
        plans.append((name, drawn, step_picture(plan)))
    return render(
        "report/templates/compared.html",
        title=changed.title,
        figures=changed.rows(),
        decisions=changed.decisions,
        plans=plans,
    )


def _topology(plan: Plan) -> Topology | None:
    try:
        return find_topology(plan.topology)
    except (TopologyError, MissingFileError):
        return None


# --------------------------------------------------------------------------------------------------
# Predicted beside compiled beside measured.


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A figure of a step from one source: predicted, compiled or measured.

    Attributes:
        source: who: "predicted", "compiled", "measured".
        step_seconds: of a step; None where it is not said.
        peak_bytes: per device; None where it is not said.
        collectives: of a step; () where they are not said.
    """

    source: str
    step_seconds: float | None = None
    peak_bytes: int | None = None
    collectives: tuple[Collective, ...] = ()


def said_of(plan: Plan, others: Sequence[Evidence] = ()) -> tuple[Evidence, ...]:
    """The prediction, what the compiler said when it was asked for the plan, and others."""
    predicted = Evidence(
        source="predicted",
        step_seconds=plan.estimate.step_seconds,
        peak_bytes=plan.estimate.device_bytes.peak,
        collectives=tuple(plan.estimate.collectives),
    )
    refined = plan.refined
    compiled = (
        [
            Evidence(
                source="compiled",
                step_seconds=refined.step_seconds or None,
                peak_bytes=refined.peak_bytes or None,
            )
        ]
        if refined is not None and not any(source.source == "compiled" for source in others)
        else []
    )
    return predicted, *compiled, *others


def evidence_rows(sources: Sequence[Evidence]) -> list[tuple[str, ...]]:
    """Rows of a table under `evidence_head`; the differences are from the prediction."""
    first = sources[0]
    rows = [
        ("seconds per step", *(_seconds(source, first) for source in sources)),
        (
            "peak bytes per device",
            *(_evidence_bytes(source.peak_bytes, first.peak_bytes) for source in sources),
        ),
    ]
    kinds = sorted({(c.kind, c.axes) for source in sources for c in source.collectives})
    for kind, axes in kinds:
        name = f"{kind} over {'·'.join(axes)}"
        totals = [
            sum(c.total_bytes for c in source.collectives if (c.kind, c.axes) == (kind, axes))
            if source.collectives
            else None
            for source in sources
        ]
        rows.append((name, *(_evidence_bytes(total, totals[0]) for total in totals)))
    return rows


def evidence_head(sources: Sequence[Evidence]) -> tuple[str, ...]:
    """The heads of its columns."""
    return ("", *(source.source for source in sources))


def _seconds(source: Evidence, first: Evidence) -> str:
    if source.step_seconds is None:
        return "-"
    return seconds_text(source.step_seconds) + _off(source.step_seconds, first.step_seconds)


def _evidence_bytes(size: int | None, predicted: int | None) -> str:
    return "-" if size is None else bytes_text(size) + _off(size, predicted)


def _off(value: float, predicted: float | None) -> str:
    if not predicted or value == predicted:
        return ""
    change = value / predicted - 1
    return f" ({'+' if change > 0 else '-'}{percent_text(abs(change))})"


# --------------------------------------------------------------------------------------------------
# One plan.

#: Slices of a pipeline that are drawn: a picture of more takes longer to open than to understand.
_MOST_SLICES = 2500
#: Kernels that a page lists.
_MOST_KERNELS = 40


def write_page(
    plan: Plan, path: str | Path | None, *, browser: bool, kernels: Kernels | None
) -> Path:
    """Writes a plan as a web page, and opens it; see `Plan.show`."""
    target = Path(path) if path is not None else Path(tempfile.mkdtemp()) / "plan.html"
    try:
        target.write_text(html_report(plan, answers=Answers(kernels=kernels)), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"the page cannot be written to {target}: {error.strerror or error}\nTry: a file in"
            " a folder that is there and can be written"
        ) from error
    if browser:
        webbrowser.open(target.resolve().as_uri())
    return target


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A page that a notebook shows in a frame of its own.

    Attributes:
        page: HTML.
        height: of the frame, in pixels.
    """

    page: str = field(repr=False)
    height: int

    def _repr_html_(self) -> str:
        return render("report/templates/frame.html", page=self.page, height=self.height)


def grid(plan: Plan) -> Frame:
    """The arrays of a plan as grids; see `Plan.grid`."""
    data = page_data(plan, parameter_rows(plan.parameters), None, None) | {"landscape": None}
    title = f"Arrays of {_title(plan)}"
    return Frame(page=render("report/templates/grid.html", data=data, title=title), height=460)


def html_report(
    plan: Plan,
    *,
    topology: Topology | None = None,
    answers: Answers | None = None,
    evidence: Sequence[Evidence] = (),
) -> str:
    """Returns one self-contained HTML page about a plan.

    Args:
        topology: the machine it is for; None looks it up by the plan's spelling of it.
    """
    machine = topology or _topology(plan)
    usable = None if machine is None else machine.chip.usable_bytes
    rows = parameter_rows(plan.parameters)
    collectives = [(row, parameters, moved(plan, row)) for row, parameters in causes(plan, rows)]
    drawn, links = machine_picture(plan.mesh, machine, plan.axis_order) if machine else (None, [])
    parts = plan.estimate.device_bytes
    sources = said_of(plan, evidence)
    return render(
        "report/templates/page.html",
        plan=plan,
        title=_title(plan),
        figures=_figures(plan),
        data=page_data(plan, rows, usable, None if machine is None else fitting_bytes(machine)),
        decisions=decision_lines(plan),
        reasons=reasons(plan, usable),
        following=next_rows(plan),
        next_head=NEXT_HEAD,
        machine=drawn,
        links=links,
        step=step_picture(plan),
        lanes=lane_rows(plan),
        timeline=_pipeline(plan),
        most_slices=_MOST_SLICES,
        memory=memory_picture(parts, usable and limit_bytes(plan.estimate, usable)),
        memory_legend=memory_legend(parts),
        live_at_peak=memory_rows(parts),
        landscape=_landscape_rows(plan),
        evidence=[evidence_head(sources), *evidence_rows(sources)],
        trials=trial_rows(plan.refined) if plan.refined else (),
        trial_head=TRIAL_HEAD,
        settled=settled(plan, plan.refined) if plan.refined else (),
        collectives=collectives,
        parameters=rows,
        activations=_activations(plan, [row for row, _, _ in collectives]),
        joined_names=joined_names,
        findings=[(str(replace(f, hint="")), f.hint) for f in plan.findings],
        outcomes=", ".join(f"{count:,} {outcome}" for outcome, count in plan.search.counts),
        rejected=[
            (
                str(r.mesh),
                r.summary,
                r.reason,
                seconds_text(r.step_seconds),
                bytes_text(r.peak_bytes) if r.peak_bytes else "",
            )
            for r in plan.search.rejected
        ],
        **_answered(answers or Answers()),
    )


def _title(plan: Plan) -> str:
    return f"{plan.model} on {plan.topology}"


def _figures(plan: Plan) -> list[tuple[str, str]]:
    """(value, what it is) of the main figures."""
    estimate = plan.estimate
    return [
        (
            seconds_text(estimate.step_seconds),
            f"per step, {interval_text(estimate)}" if estimate.interval else "per step",
        ),
        (count_text(estimate.tokens_per_second), "tokens/s"),
        (percent_text(estimate.mfu), "MFU"),
        (bytes_text(estimate.device_bytes.peak), "per device"),
    ]


def _pipeline(plan: Plan) -> Timeline | None:
    """The timeline of a plan with stages; None where it has none, or does not say enough."""
    if not named(plan.schedule).staged:
        return None
    try:
        return predicted(plan)
    except PlanError:
        return None


def _landscape_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            seconds_text(point.step_seconds),
            bytes_text(point.peak_bytes),
            "yes" if point.fits else "no",
            str(point.mesh),
            ", ".join(f"{word.replace('_', ' ')} {value}" for word, value in point.decided),
        )
        for point in plan.search.landscape
    ]


def _activations(plan: Plan, rows: Sequence[CollectiveRow]) -> list[dict[str, Any]]:
    """The activations with the numbers of the collectives that move them."""
    numbers = {(row.kind, row.axes): number for number, row in enumerate(rows)}
    return [
        {
            "name": activation.name,
            "count": activation.count,
            "bytes": math.prod(activation.shape) * ITEMSIZE.get(activation.dtype, 4),
            "layout": notation(activation.colours, activation.shape, activation.held),
            "moves": [(move, numbers.get((move.kind, move.axes))) for move in activation.moves],
        }
        for activation in plan.activations
    ]


def _answered(answers: Answers) -> dict[str, Any]:
    """The answers to questions about a plan as rows of tables; None for questions not asked."""
    kernels, constraints, sensitivity = answers.kernels, answers.constraints, answers.sensitivity
    return {
        "kernels": kernels and kernel_rows(kernels, _MOST_KERNELS),
        "kernel_head": KERNEL_HEAD,
        "roofline": kernels and roofline_picture(kernels),
        "alternatives": answers.alternatives
        and [
            (
                seconds_text(alternative.step_seconds),
                ratio_text(alternative.ratio),
                bytes_text(alternative.peak_bytes),
                str(alternative.mesh),
                alternative.summary,
            )
            for alternative in answers.alternatives
        ],
        "constraints": constraints,
        "staircase": constraints
        and [
            (
                seconds_text(step.step_seconds),
                bytes_text(step.short_bytes),
                str(step.mesh),
                step.summary,
            )
            for step in constraints.staircase
        ],
        "prices": sensitivity and [price_row(price) for price in sensitivity.prices],
        "breaks": sensitivity and [break_text(price) for price in sensitivity.prices],
        "shocks": sensitivity and [shock_row(shock) for shock in sensitivity.shocks],
        "shock_head": SHOCK_HEAD,
    }


# --------------------------------------------------------------------------------------------------
# A plan on its machine as one picture: an SVG file with the figures, the links with their mesh
# axes, and the step.

_LANES = 6


def plan_svg(plan: Plan, topology: Topology) -> str:
    """The picture of a plan, a complete SVG document without scripts; nothing is fetched."""
    machine, _ = machine_picture(plan.mesh, topology, plan.axis_order)
    if machine is None:
        raise PlanError(
            f"the mesh {plan.mesh} has no place on {topology.name}\nTry: the topology for which"
            " the plan was made, or plan again"
        )
    return render(
        "report/templates/overview.svg",
        title=f"{_title(plan)}: mesh {plan.mesh}",
        plan=plan,
        devices=f"{plan.mesh.devices:,} devices",
        width=WIDTH,
        figures=_figures(plan),
        machine=machine,
        step=step_picture(plan, limit=_LANES),
    )


#: Colours of the mesh axes, and of what is written on them.
AXIS_COLOURS = {
    "island": (OLIVE, "#111"),
    "stage": (VERMILION, "#111"),
    "data": (BLUE, "#fff"),
    "fsdp": (GREEN, "#111"),
    "expert": (PURPLE, "#111"),
    "context": (SKY, "#111"),
    "tensor": (ORANGE, "#111"),
}


def _picture(template: str, label: str, height: float, **values: object) -> Picture:
    shapes = render(f"report/templates/{template}", width=WIDTH, height=height, **values)
    return Picture(label, height, shapes)


# --------------------------------------------------------------------------------------------------
# Parameters and activations that cause a collective, and the collectives of each.
#
# A gather names the parameter that it is for. A reduction of gradients does not: it belongs to the
# parameters whose gradient on a device, of one layer or of all, has as many bytes as its result.

#: Bytes of an element of a gradient.
_ITEMS = (4, 2, 1)


def causes(plan: Plan, rows: Sequence[ParameterRow]) -> list[tuple[CollectiveRow, list[int]]]:
    """The kinds of collectives of a step, each with the numbers of the parameters that cause it."""
    collectives = in_every_step(plan.estimate.collectives)
    return [
        (
            row,
            sorted(
                {
                    number
                    for collective in collectives
                    if (collective.kind, collective.axes) == (row.kind, row.axes)
                    for number in _of(collective, plan, rows)
                }
            ),
        )
        for row in collective_rows(collectives)
    ]


def moved(plan: Plan, row: CollectiveRow) -> list[int]:
    """The numbers of the activations that a kind of collective moves."""
    return [
        number
        for number, activation in enumerate(plan.activations)
        if any((move.kind, move.axes) == (row.kind, row.axes) for move in activation.moves)
    ]


def _of(collective: Collective, plan: Plan, rows: Sequence[ParameterRow]) -> Iterator[int]:
    """The numbers of the parameters that a collective is for."""
    for number, row in enumerate(rows):
        if (collective.cause and _same(collective.cause, row)) or (
            collective.kind in ("reduce-scatter", "all-reduce")
            and collective.cause.startswith("gradients of ")
            and row.example.trained
            and len(row.example.shape) > 1
            and collective.bytes in _gradient_bytes(plan, row, collective.kind)
            and _meets(collective, row)
        ):
            yield number


def _same(cause: str, row: ParameterRow) -> bool:
    """Returns whether a cause is the path of a parameter, or of the module that has it."""
    pattern = [part for part in row.pattern.split(".") if part != "*"]
    parts = [part for part in cause.split(".") if part != "*" and not part.isdigit()]
    return bool(parts) and pattern[: len(parts)] == parts and len(pattern) - len(parts) <= 1


def _meets(collective: Collective, row: ParameterRow) -> bool:
    """Returns whether a collective runs along axes that its gradient is a partial sum over."""
    return not set(collective.axes) & row.example.compute.axes


def _gradient_bytes(plan: Plan, row: ParameterRow, kind: str) -> set[int]:
    """Bytes that a device may have of a gradient: of one layer or all, sharded or not."""
    shape = row.example.shape
    layouts = [row.example.gradient, row.example.rest, row.example.state]
    if kind == "all-reduce":
        layouts.append(row.example.compute)
    sizes: set[int] = set()
    for layout in layouts:
        elements = _local(shape, layout, plan)
        for layers in {1, shape[0]}:
            for stages in {1, plan.mesh["stage"]}:
                sizes |= {round(elements * item * stages / layers) for item in _ITEMS}
    return sizes


def _local(shape: Sequence[int], layout: Layout, plan: Plan) -> float:
    degree = math.prod(plan.mesh.ways(axes) for axes in layout)
    return math.prod(shape) / degree


# --------------------------------------------------------------------------------------------------
# Data for the script of a page: the landscape of plans, and arrays as grids.


def page_data(
    plan: Plan, rows: Sequence[ParameterRow], usable: float | None, fitting: float | None
) -> JsonObject:
    """The data of a page.

    Args:
        usable: bytes per device that a program can use; None where they are not known.
        fitting: bytes of them that plans may fill.
    """
    return {
        "axes": [
            {"name": axis, "size": plan.mesh[axis], "colour": AXIS_COLOURS[axis][0]}
            for axis in plan.mesh
        ],
        "arrays": [
            *(_parameter(row) for row in rows),
            *(_activation(activation) for activation in plan.activations),
            *(
                _array("batch", path, (), (), "", [("stored", layout, str(layout))])
                for path, layout in plan.batch_layouts  # a plan does not know their shapes
            ),
        ],
        "microbatches": plan.microbatches,
        "landscape": _landscape(plan),
        "usable": usable,
        "fitting": fitting,
    }


def _landscape(plan: Plan) -> JsonObject:
    """The plans that were priced, and the chosen one."""
    points = plan.search.landscape
    words = list(dict.fromkeys(word for point in points for word, _ in point.decided))
    seconds = plan.estimate.step_seconds
    decided = next(
        (
            dict(point.decided)
            for point in points
            if point.mesh == plan.mesh and math.isclose(point.step_seconds, seconds, rel_tol=1e-5)
        ),
        {
            word: str(value)
            for word in ("zero", "remat", "microbatches", "schedule", "virtual_stages", "attention")
            if (value := getattr(plan, word)) != TABLE[word].default
        },
    )

    def data(
        mesh: MeshShape, decided: dict[str, str], seconds: float, size: int, fits: bool
    ) -> JsonObject:
        return {
            "mesh": str(mesh),
            "axes": dict(mesh),
            "decided": decided,
            "s": seconds,
            "b": size,
            "fits": fits,
        }

    return {
        "points": [
            data(point.mesh, dict(point.decided), point.step_seconds, point.peak_bytes, point.fits)
            for point in points
        ],
        "chosen": data(plan.mesh, decided, seconds, plan.estimate.device_bytes.peak, True),
        "words": words,
        "defaults": {word: str(TABLE[word].default) if word in TABLE else "none" for word in words},
    }


def _parameter(row: ParameterRow) -> JsonObject:
    parameter = row.example
    forms = [("stored", parameter.rest), ("in compute, after its gathers", parameter.compute)]
    if parameter.trained:
        forms += [("gradient, reduced", parameter.gradient), ("optimizer state", parameter.state)]
    shape, names = parameter.shape, parameter.colours
    texts = [(words, layout, notation(names, shape, layout)) for words, layout in forms]
    return _array("parameters", row.pattern, shape, names, parameter.dtype, texts)


def _array(
    group: str,
    name: str,
    shape: Sequence[int],
    names: Sequence[str | None],
    dtype: str,
    forms: Sequence[tuple[str, Layout, str]],
) -> JsonObject:
    """An array of the grids, with (what it is, its layout, the layout as text) of its forms."""
    return {
        "group": group,
        "name": name,
        "shape": list(shape),
        "names": [name or "" for name in names],
        "item": ITEMSIZE.get(dtype, 4) if dtype else 0,
        "dtype": dtype,
        "forms": [
            {"words": words, "dims": [list(axes) for axes in layout], "text": text}
            for words, layout, text in forms
        ],
    }


def _activation(activation: ActivationLayout) -> JsonObject:
    shape, names = activation.shape, activation.colours
    before = [move for move in activation.moves if move.before]
    after = [move for move in activation.moves if not move.before]
    held = ("held between operations", activation.held, notation(names, shape, activation.held))
    forms = [
        *(_moved_form(activation, move) for move in before),
        held,
        *(_moved_form(activation, move) for move in after),
    ]
    array = _array("activations", activation.name, shape, names, activation.dtype, forms)
    for form, move in zip(array["forms"], [*before, None, *after], strict=True):
        if move is not None:
            form["sums"] = list(move.axes) if _sums(move) else []
    return array


def _sums(move: Move) -> bool:
    """Returns whether the shards before a collective are partial sums."""
    return move.before and move.kind in ("reduce-scatter", "all-reduce")


def _moved_form(activation: ActivationLayout, move: Move) -> tuple[str, Layout, str]:
    """An activation on the other side of a collective."""
    over, of = "·".join(move.axes), joined_names(move.of)
    if move.kind == "collective-permute":
        note = f"as {of} hand it on, a shard at a time"
    elif _sums(move):
        note = f"partial sums over {over}, as {of} makes them"
    else:
        note = f"as {of} makes it" if move.before else f"as {of} reads it"
    text = notation(activation.colours, activation.shape, move.layout)
    words = f"{'before' if move.before else 'after'} its {move.kind} over {over}"
    return words, move.layout, f"{text}, {note}"


# --------------------------------------------------------------------------------------------------
# The machine: a row for each tier, the outermost (slowest) first, with the mesh axes that run along
# its links; below it some parts of the innermost tier, its devices by their place along the
# innermost axes.

#: Parts of the innermost tier that are drawn, and devices of one along each dim.
_PARTS, _SIDE = 4, 16
_GAP = 26.0


def machine_picture(
    mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> tuple[Picture | None, list[tuple[str, ...]]]:
    """The picture of a machine under a mesh, None where the mesh has no place; and its rows as a
    table: tier, positions, rate, latency, axes.

    Args:
        order: of the axes on the links; by default the usual one.
    """
    placement = place(mesh, topology, order)
    if placement is None:
        return None, []
    tiers: list[JsonObject] = []
    rows: list[tuple[str, ...]] = []
    for number, tier in enumerate(topology.tiers):
        if tier.devices == 1 and len(topology.tiers) > 1:
            continue
        axes = [
            (axis, span.ways, span.dim)
            for axis in AXIS_COLOURS
            for span in placement.get(axis, ())
            if span.tier == number
        ]
        axes.sort(key=lambda along: along[2])  # the major one first
        widths = [math.log2(ways) for _, ways, _ in axes]
        whole = max(sum(widths), math.log2(tier.devices), 1.0)
        shape, rate = " x ".join(f"{n:,}" for n in tier.shape), count_text(tier.bytes_per_s, "B/s")
        tiers.append(
            {
                "name": tier.name,
                "shape": shape,
                "rate": rate,
                "axes": [
                    (axis, ways, width / whole, f", dim {dim}" if len(tier.shape) > 1 else "")
                    for (axis, ways, dim), width in zip(axes, widths, strict=True)
                ],
            }
        )
        latency = seconds_text(tier.latency_s) if tier.latency_s else "-"
        along = ", ".join(f"{axis}={ways}" for axis, ways, _ in axes) or "none"
        rows.append((tier.name, shape, rate, latency, along))
    description = "; ".join(f"{name} {shape}: {axes}" for name, shape, _, _, axes in rows)
    label = f"{topology.devices:,} devices {topology.chip.name}. {description}"
    devices = _devices(mesh, topology, order)
    height = 8 + 64 * len(tiers) + 18 + devices["rows"] * devices["side"] + 26
    return _picture(
        "machine.svg", label, height, tiers=tiers, mesh=mesh, colours=AXIS_COLOURS, **devices
    ), rows


def _devices(mesh: MeshShape, topology: Topology, order: tuple[str, ...]) -> JsonObject:
    """Some parts of the innermost tier with their devices: (row, column, number, place along each
    mesh axis; None where it is not used).
    """
    numbers = device_order(mesh, topology, order)
    assert numbers is not None, "the mesh has a place"
    places = {int(number): index for index, number in enumerate(numbers.reshape(-1))}
    tier, axis = topology.tiers[-1], _innermost(mesh, topology, order)
    rows, columns = _machine_grid(tier)
    across = tier.shape[-1] if len(tier.shape) > 1 else columns
    count = topology.devices // tier.devices
    shown = list(range(min(count, _PARTS - 1))) + ([count - 1] if count >= _PARTS else [])
    parts: list[tuple[bool, list[Any]]] = []
    for index, part in enumerate(shown):
        devices: list[Any] = []
        for row, column in itertools.product(range(rows), range(columns)):
            inside = row * across + column
            if inside < tier.devices:
                number = part * tier.devices + inside
                position = coordinates(places[number], mesh) if number in places else None
                devices.append((row, column, number, position))
        parts.append((index > 0 and part - shown[index - 1] > 1, devices))
    some = tier.devices > rows * columns or count > _PARTS
    note = (
        f"{tier.name}: "
        + (
            f"{count:,} parts of {tier.devices:,} devices"
            if count > 1
            else f"{tier.devices} devices"
        )
        + (" (some of them are drawn)" if some else "")
        + (f"; numbers and shades are places along {axis}" if axis else "")
    )
    return {
        "parts": parts,
        "rows": rows,
        "columns": columns,
        "side": min(34.0, (WIDTH - _GAP * _PARTS) / (columns * max(len(shown), 1)), 210 / rows),
        "gap": _GAP,
        "torus": len(tier.shape) > 1,
        "axis": axis,
        "note": note,
    }


def _machine_grid(tier: Tier) -> tuple[int, int]:
    """Rows and columns that are drawn of a tier: of a torus two dims, of others a line or two."""
    if len(tier.shape) > 1:
        return min(tier.shape[-2], _SIDE), min(tier.shape[-1], _SIDE)
    n = min(tier.devices, _SIDE * 4)
    return (1, n) if n <= 4 else (2, -(-n // 2)) if n <= 16 else (4, -(-n // 4))


def _innermost(mesh: MeshShape, topology: Topology, order: tuple[str, ...]) -> str:
    """The mesh axis that lies on the innermost links; "" where there is none."""
    placement = place(mesh, topology, order) or {}
    last = len(topology.tiers) - 1
    inner = [axis for axis, spans in placement.items() if any(s.tier == last for s in spans)]
    return inner[-1] if inner else (tuple(mesh) or ("",))[-1]


def coordinates(place_in_mesh: int, mesh: MeshShape) -> dict[str, int]:
    """The place of a device along every axis.

    >>> coordinates(5, MeshShape(data=2, tensor=4))
    {'data': 1, 'tensor': 1}

    Args:
        place_in_mesh: counted through the mesh, the last axis fastest.
        mesh: sizes of the mesh axes.
    """
    position: dict[str, int] = {}
    for axis in reversed(tuple(mesh)):
        place_in_mesh, position[axis] = divmod(place_in_mesh, mesh[axis])
    return {axis: position[axis] for axis in mesh}


# --------------------------------------------------------------------------------------------------
# Memory over time: bytes of the fullest device from the start of a step to its end.
#
# An estimate has the bytes at the point where they are the most, part by part, and which of them
# stay between steps. The curve is drawn through these: what is stored is there all the time,
# activations grow with the forward pass and go with the backward pass, and temporaries and gathered
# parameters come with either. It says so below the picture.

#: Parts in the order in which they are stacked, with their colour.
_MEMORY_COLOURS = {
    "parameters": BLUE,
    "frozen": "#004f7c",
    "optimizer": GREEN,
    "exchange": OLIVE,
    "batch": "#7a7a80",
    "gradients": PURPLE,
    "activations": ORANGE,
    "communication": SKY,
    "temporaries": VERMILION,
}
#: Parts that are there between steps.
_STORED = frozenset({"parameters", "frozen", "optimizer", "exchange", "batch"})
#: Part of each that is there at points of a step: start, soon after, the end of the forward pass,
#: the start of the backward pass, its end, the update, the end.
_TIMES = (0.0, 0.04, 0.36, 0.40, 0.90, 0.94, 1.0)
_SHAPES = {
    "gradients": (0, 0, 0, 1, 1, 1, 0),
    "activations": (0, 0, 1, 1, 0, 0, 0),
    "communication": (0, 1, 1, 1, 1, 0, 0),
    "temporaries": (0, 1, 1, 1, 1, 0, 0),
}
#: Times the peak up to which a picture reaches to what a device has.
_FAR = 4
_MEMORY_LEFT, _MEMORY_TOP, _MEMORY_HEIGHT = 70, 14, 230


def memory_picture(parts: DeviceBytes, usable: float | None) -> Picture:
    """The picture of the memory of a step.

    Args:
        parts: bytes at the peak.
        usable: bytes per device that a plan may fill; None where they are not known.
    """
    near = usable is not None and usable <= _FAR * parts.peak
    top = max(parts.peak, usable if usable and near else 0) * 1.06 or 1.0
    step = 2.0 ** math.ceil(math.log2(top / 6))

    def x(share: float) -> float:
        return _MEMORY_LEFT + (WIDTH - _MEMORY_LEFT - 10) * share

    def y(size: float) -> float:
        return _MEMORY_TOP + _MEMORY_HEIGHT * (1 - size / top)

    shown = memory_legend(parts)
    base = [0.0] * len(_TIMES)
    bands: list[tuple[str, int, str, list[tuple[float, float]]]] = []
    for name, size, colour in shown:
        form = (1,) * len(_TIMES) if name in _STORED else _SHAPES[name]
        above = [low + size * share for low, share in zip(base, form, strict=True)]
        outline = [*zip(_TIMES, above, strict=True), *zip(_TIMES[::-1], base[::-1], strict=True)]
        bands.append((name, size, colour, [(x(time), y(value)) for time, value in outline]))
        base = above
    label = (
        f"Memory of the fullest device over a step, {bytes_text(parts.peak)} at the peak: "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size, _ in shown)
    )
    height = _MEMORY_TOP + _MEMORY_HEIGHT + 34
    return _picture(
        "memory.svg",
        label,
        height,
        bands=bands,
        top=top,
        ticks=[step * k for k in range(int(top / step) + 1)],
        x=x,
        y=y,
        peak=parts.peak,
        usable=usable,
    )


def memory_legend(parts: DeviceBytes) -> list[tuple[str, int, str]]:
    """(part, bytes at the peak, colour) of the picture, in the order in which they are stacked."""
    sizes = ((name, getattr(parts, name), colour) for name, colour in _MEMORY_COLOURS.items())
    return [(name, size, colour) for name, size, colour in sizes if size > 0]


def memory_rows(parts: DeviceBytes) -> list[tuple[str, str, str, str]]:
    """(part, bytes at the peak, share, when it is there) of what is live at the peak, the largest
    first.
    """
    return [
        (
            name,
            text,
            percent_text(size / (parts.peak or 1)),
            "between steps, too" if name in _STORED else "during a step",
        )
        for name, size, text in sorted(parts_of(parts), key=lambda part: -part[1])
    ]


# --------------------------------------------------------------------------------------------------
# The kernels of a step under the roofline of the chip: FLOP/s over FLOPs a byte, both logarithmic;
# the area of a point is its share of the time.

_ROOFLINE = Box(width=WIDTH, height=316, left=80, right=WIDTH - 16, top=16, bottom=276)
#: Points that are drawn; the others take less than a thousandth of the time.
_LEAST = 1e-3
_PHASES = {"forward": BLUE, "backward": ORANGE, "rematerialised": PURPLE}


def roofline_picture(kernels: Kernels) -> Picture | None:
    """The picture of the kernels; None where none has FLOPs."""
    total, box = kernels.seconds or 1.0, _ROOFLINE
    shown = [
        kernel
        for kernel in kernels.kernels
        if kernel.flops > 0 and kernel.intensity > 0 and kernel.seconds > _LEAST * total
    ]
    if not shown:
        return None
    low = math.floor(math.log10(min(1.0, *(kernel.intensity for kernel in shown), 1.0)))
    high = math.ceil(math.log10(max(kernel.intensity for kernel in shown) * 2))
    top = math.log10(max(rate for _, rate in kernels.peak_flops_per_s)) + 0.25
    bottom = math.floor(math.log10(min(kernel.flops / kernel.seconds for kernel in shown)))
    x = LogAxis(
        low=10.0**low,
        high=10.0**high,
        start=box.left,
        end=box.right,
        marks=[
            (10.0**p, count_text(10.0**p) if p >= 0 else f"{10.0**p:g}")
            for p in range(low, high + 1)
        ],
    )
    y = LogAxis(
        low=10.0**bottom,
        high=10.0**top,
        start=box.bottom,
        end=box.top,
        marks=[(10.0**p, count_text(10.0**p)) for p in range(bottom, math.floor(top) + 1)],
    )
    label = f"Roofline of one {kernels.chip}: " + ", ".join(
        f"{kernel.name} {kernel.phase} {percent_text(kernels.bound(kernel) / kernel.seconds)} of"
        " the roofline"
        for kernel in shown[:8]
    )
    return _picture(
        "roofline.svg",
        label,
        box.height,
        box=box,
        x=x,
        y=y,
        kernels=shown,
        total=total,
        bound=kernels.bound,
        roofs=list(_roofs(kernels, x, y)),
        colours=_PHASES,
    )


def _roofs(
    kernels: Kernels, x: LogAxis, y: LogAxis
) -> Iterator[tuple[list[tuple[float, float]], float, float, str]]:
    """Yields the points of each roof, its ridge, its peak, and its label."""
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in kernels.peak_flops_per_s:
        if "float" in dtype or dtype in ("int8", "uint8"):  # what matrix units multiply
            by_peak.setdefault(peak, []).append(dtype)
    for peak, dtypes in by_peak.items():
        ridge = peak / kernels.bytes_per_s
        corners = [(x.low, x.low * kernels.bytes_per_s), (ridge, peak), (x.high, peak)]
        points = [(x(intensity), min(y(rate), y.start)) for intensity, rate in corners]
        yield points, ridge, peak, f"{', '.join(dtypes)} {count_text(peak)}FLOP/s"


# --------------------------------------------------------------------------------------------------
# A step as bars to one scale: busy time of devices, and every kind of collective, hidden and
# exposed.

_ROW, _MOST_LANES = 24, 14
_PART_COLOURS = {
    "compute": BLUE,
    "exposed": VERMILION,
    "bubble": PURPLE,
    "optimizer": GREEN,
    "overhead": OLIVE,
    "exchange": ORANGE,
}


def step_picture(plan: Plan, *, limit: int = _MOST_LANES) -> Picture:
    """The picture of a step.

    Args:
        limit: kinds of collectives that are drawn, the slowest.
    """
    listed, total = lanes(plan), plan.estimate.step_seconds
    longest = max([total, *(lane.row.seconds for lane in listed)]) or 1.0
    seconds = plan.estimate.seconds
    parts = [
        (f.name, LABELS.get(f.name, f.name), getattr(seconds, f.name)) for f in fields(seconds)
    ]
    parts = [part for part in parts if part[2] > 0]
    listed = listed[:limit]
    label = (
        f"A step of {seconds_text(total)}: "
        + ", ".join(f"{name} {seconds_text(value)}" for _, name, value in parts)
        + ". Collectives: "
        + ", ".join(
            f"{lane.row.kind} over {' and '.join(lane.row.axes)} {seconds_text(lane.row.seconds)}"
            for lane in listed
        )
    )
    return _picture(
        "step.svg",
        label,
        44 + _ROW * (1 + len(listed)) + 20,
        row=_ROW,
        lanes=listed,
        parts=parts,
        total=seconds.total or 1.0,
        longest=longest,
        ticks=round_steps(longest, 5),
        colours=_PART_COLOURS,
    )


def lane_rows(plan: Plan) -> list[tuple[str, ...]]:
    """(kind, axes, count, seconds, exposed, hidden) of the collectives of a step."""
    return [
        (
            lane.row.kind,
            "·".join(lane.row.axes),
            f"{lane.row.count:,}",
            seconds_text(lane.row.seconds),
            seconds_text(lane.exposed),
            seconds_text(lane.row.seconds - lane.exposed),
        )
        for lane in lanes(plan)
    ]


# --------------------------------------------------------------------------------------------------
# A scaling curve as one SVG file: tokens per second over devices, both logarithmic, and the
# efficiency of every point. The dashed line is what perfect scaling from the first point would
# bring; hollow crosses on the axis are machines that do not hold the model.

CURVE_BOX = Box(width=760, height=420, left=84, right=736, top=48, bottom=364)


def curve_svg(curve: ScalingCurve) -> str:
    """Returns the picture of a scaling curve, a complete SVG document."""
    last = curve.enough
    note = "" if last is None else "all devices pay"
    if last is not None and curve.reason:
        note = f"more than {last.devices:,} devices do not pay"
    devices = [math.log2(point.devices) for point in curve.points] or [0.0]
    rates = [_rate(point) for point in curve.fitting]
    ideal = [rates[0] * point.devices / curve.fitting[0].devices for point in curve.fitting]
    powers = [math.log2(rate) for rate in (*rates, *ideal) if rate > 0] or [0.0, 1.0]
    first, most = min(devices), max(max(devices), min(devices) + 1)
    low = math.floor(min(powers))
    high = max(math.ceil(max(powers)), low + 1)
    x = LogAxis(
        low=2.0**first,
        high=2.0**most,
        start=CURVE_BOX.left,
        end=CURVE_BOX.right,
        marks=[(2.0**p, f"{2**p:,}") for p in range(math.ceil(first), math.floor(most) + 1)],
    )
    y = LogAxis(
        low=2.0**low,
        high=2.0**high,
        start=CURVE_BOX.bottom,
        end=CURVE_BOX.top,
        marks=[
            (2.0**p, count_text(2.0**p))
            for p in range(low, high + 1, max(1, round((high - low) / 8)))
        ],
    )
    return render(
        "report/templates/curve.svg",
        title=f"{curve.model}, {curve.kind} scaling",
        note=note,
        curve=curve,
        box=CURVE_BOX,
        x=x,
        y=y,
        fitting=[(x(p.devices), y(rate)) for p, rate in zip(curve.fitting, rates, strict=True)],
        ideal=[(x(p.devices), y(rate)) for p, rate in zip(curve.fitting, ideal, strict=True)],
        good=BLUE,
    )


def _rate(point: ScalingPoint) -> float:
    return point.plan.estimate.tokens_per_second if point.plan is not None else 0.0
