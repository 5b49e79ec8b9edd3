"""The panels of a report: pictures, each a figure with its caption and, behind a click, its table;
tables that link to each other; and the trace of a step.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape

from shardlib.collective import KINDS, Collective
from shardlib.cost.estimate import DeviceBytes
from shardlib.decisions.table import TABLE
from shardlib.errors import PlanError
from shardlib.graph import ITEMSIZE
from shardlib.layout import AXES, Layout, MeshShape
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Placement, Topology, device_order, place
from shardlib.planner.answers import (
    KERNEL_HEAD,
    SHOCK_HEAD,
    Answers,
    Kernels,
    KernelTime,
    break_text,
    kernel_rows,
    price_row,
    shock_row,
)
from shardlib.planner.plan import Plan
from shardlib.planner.stored import ActivationLayout, Move, together
from shardlib.report.elements import (
    bytes_text,
    clip,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
    table,
)
from shardlib.report.text import (
    LABELS,
    CollectiveRow,
    ParameterRow,
    collective_rows,
    in_every_step,
    notation,
)
from shardlib.report.timelines import Timeline, events, predicted, span, timeline_svg
from shardlib.schedules import named
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# Predicted beside compiled beside measured, of one plan.


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
        ("seconds a step", *(_seconds(source, first) for source in sources)),
        (
            "peak bytes a device",
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
            and collective.cause.startswith("transpose(")
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
# Parts of a page that its script fills: the landscape of plans, and arrays as grids.


def landscape_panel(plan: Plan) -> str:
    """The place of the landscape, with its points as a table; empty without any."""
    points = plan.search.landscape
    if len(points) < 2:
        return ""
    rows = [
        (
            seconds_text(point.step_seconds),
            bytes_text(point.peak_bytes),
            "yes" if point.fits else "no",
            str(point.mesh),
            ", ".join(f"{word.replace('_', ' ')} {value}" for word, value in point.decided),
        )
        for point in points
    ]
    head = ("a step", "a device", "fits", "mesh", "other decisions")
    search = plan.search
    note = (
        f"{len(points)} of the {search.evaluations:,} plans that were priced, spread over time and"
        f" memory; the dotted line joins those that need less memory than every faster one."
        f" {search.candidates:,} plans are in the space: a bound says of those that were not"
        " priced that they are no faster than the chosen one."
    )
    return (
        '<div class="controls"><label for="landscape-colour">colour by'
        '<select id="landscape-colour"></select></label></div>'
        '<figure><div id="landscape-picture"></div>'
        '<div class="legend" id="landscape-legend"></div>'
        f'<figcaption class="soft">{note}</figcaption></figure>'
        '<p class="panel" id="landscape-panel" role="status">Point at a plan, or go through them'
        " with the arrow keys; a click or Enter compares it with the chosen one.</p>"
        '<div id="landscape-compared" aria-live="polite"></div>'
        f"<details><summary>as a table</summary>{table(rows, head, right={0, 1})}</details>"
    )


def array_panel(present: bool) -> str:
    """The place of arrays as grids; empty where a plan has none."""
    if not present:
        return ""
    return (
        '<div class="controls"><label for="array-choose">array'
        '<select id="array-choose"></select></label>'
        '<div id="array-forms" role="group" aria-label="form of the array" class="controls"></div>'
        '</div><div class="controls" id="array-device" role="group"'
        ' aria-label="place of the device"></div>'
        '<figure><div id="array-picture"></div></figure>'
        '<p class="panel" id="array-panel" role="status"></p>'
    )


# --------------------------------------------------------------------------------------------------
# The picture of a pipeline inside of a page.

#: Slices that are drawn: a picture of more takes longer to open than to understand.
_PIPELINE_MOST = 2500


def pipeline_picture(plan: Plan) -> str:
    """The timeline of a plan with stages; empty where it has none, or too much happens to draw."""
    if not named(plan.schedule).staged:
        return ""
    try:
        timeline = predicted(plan)
    except PlanError:
        return ""
    if len(timeline.slices) > _PIPELINE_MOST:
        return (
            f'<p class="soft">The pipeline has {len(timeline.slices):,} slices a step, more than a'
            " page draws: shardlib timeline plan.json --svg timeline.svg</p>"
        )
    image = base64.b64encode(timeline_svg(timeline).encode()).decode()
    caption = escape(str(timeline).strip().splitlines()[-1])
    return (
        f'<figure><img alt="{escape(timeline.title)}. {caption}" style="width: 100%"'
        f' src="data:image/svg+xml;base64,{image}"><figcaption class="soft">{caption}</figcaption>'
        "</figure>"
    )


# --------------------------------------------------------------------------------------------------
# Shapes of a picture, the colours of mesh axes, and a figure with its caption.

#: A colour for each mesh axis, which people who see no red or green can tell apart (Okabe and Ito,
#: 2008), and what is written on it.
AXIS_COLOURS = {
    "island": ("#b2a000", "#111"),
    "stage": ("#d55e00", "#111"),
    "data": ("#0072b2", "#fff"),
    "fsdp": ("#009e73", "#111"),
    "expert": ("#cc79a7", "#111"),
    "context": ("#56b4e9", "#111"),
    "tensor": ("#e69f00", "#111"),
}
#: User units of a picture.
WIDTH = 860


def picture(label: str, height: float, shapes: Sequence[str]) -> str:
    """An SVG element that is as wide as the page."""
    return (
        f'<svg class="picture" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        f' aria-label="{escape(label)}">\n' + "\n".join(shapes) + "\n</svg>"
    )


def rect(
    x: float, y: float, width: float, height: float, *, fill: str = "", cls: str = "", tip: str = ""
) -> str:
    """A rectangle."""
    style = f' style="fill: {fill}"' if fill else ""
    name = f' class="{cls}"' if cls else ""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect{name} x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}"'
        f' height="{height:.1f}"{style}>{inner}</rect>'
    )


def words(x: float, y: float, text: str, *, cls: str = "", anchor: str = "", fill: str = "") -> str:
    """Text.

    Args:
        fill: its colour; by default that of the page's text.
    """
    name = f' class="{cls}"' if cls else ""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    style = f' style="fill: {fill}"' if fill else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}"{anchored}{style}>{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, cls: str = "grid") -> str:
    """A line from one point to another."""
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def figure(content: str, note: str, more: str = "") -> str:
    """A picture with what it means, and a table behind a click."""
    behind = f"<details><summary>as a table</summary>{more}</details>" if more else ""
    return f'<figure>{content}<figcaption class="soft">{escape(note)}</figcaption></figure>{behind}'


# --------------------------------------------------------------------------------------------------
# Data for the scripts of a page: the landscape of plans, and arrays as grids. It stands in the page
# once, as JSON.


def page_data(
    plan: Plan, rows: Sequence[ParameterRow], usable: float | None, fitting: float | None
) -> str:
    """The data of a page as a JSON element that no text in it can close.

    Args:
        usable: bytes of a device that a program can use; None where they are not known.
        fitting: bytes that plans may fill of them.
    """
    data: JsonObject = {
        "axes": [
            {"name": axis, "size": plan.mesh[axis], "colour": AXIS_COLOURS[axis][0]}
            for axis in plan.mesh
        ],
        "arrays": [
            *(_array(row) for row in rows),
            *(_activation(activation) for activation in plan.activations),
            *_batch(plan),
        ],
        "microbatches": plan.microbatches,
        "landscape": landscape(plan),
        "usable": usable,
        "fitting": fitting,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def landscape(plan: Plan) -> JsonObject:
    """The plans that were priced, the chosen one apart."""
    chosen = plan.estimate
    words: dict[str, None] = {}
    points: list[JsonObject] = []
    for point in plan.search.landscape:
        words |= dict.fromkeys(word for word, _ in point.decided)
        points.append(
            {
                "mesh": str(point.mesh),
                "axes": dict(point.mesh),
                "decided": dict(point.decided),
                "s": point.step_seconds,
                "b": point.peak_bytes,
                "fits": point.fits,
            }
        )
    chosen_point = next(
        (
            point
            for point in plan.search.landscape
            if point.mesh == plan.mesh
            and math.isclose(point.step_seconds, chosen.step_seconds, rel_tol=1e-5)
        ),
        None,
    )
    return {
        "points": points,
        "chosen": {
            "mesh": str(plan.mesh),
            "axes": dict(plan.mesh),
            "decided": dict(chosen_point.decided) if chosen_point else _decided(plan),
            "s": chosen.step_seconds,
            "b": chosen.device_bytes.peak,
            "fits": True,
        },
        "words": list(words),
        "defaults": {word: str(TABLE[word].default) if word in TABLE else "none" for word in words},
    }


def _decided(plan: Plan) -> dict[str, str]:
    """Decisions of the plan in the words of the landscape."""
    decided: dict[str, str] = {}
    for word in ("zero", "remat", "microbatches", "schedule", "virtual_stages", "attention"):
        value = getattr(plan, word)
        if value != TABLE[word].default:
            decided[word] = str(value)
    return decided


def _array(row: ParameterRow) -> JsonObject:
    parameter = row.example
    forms = [
        ("stored", parameter.rest),
        ("in compute, after its gathers", parameter.compute),
        *([("gradient, reduced", parameter.gradient)] if parameter.trained else []),
        *([("optimizer state", parameter.state)] if parameter.trained else []),
    ]
    return {
        "group": "parameters",
        "name": row.pattern,
        "shape": list(parameter.shape),
        "names": [name or "" for name in parameter.colours],
        "item": ITEMSIZE.get(parameter.dtype, 4),
        "dtype": parameter.dtype,
        "forms": [_form(words, layout, row) for words, layout in forms],
    }


def _form(words: str, layout: Layout, row: ParameterRow) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(row.example.colours, row.example.shape, layout),
    }


def _activation(activation: ActivationLayout) -> JsonObject:
    return {
        "group": "activations",
        "name": activation.name,
        "shape": list(activation.shape),
        "names": [name or "" for name in activation.colours],
        "item": ITEMSIZE.get(activation.dtype, 4),
        "dtype": activation.dtype,
        "forms": [
            *(_data_moved(activation, move) for move in activation.moves if move.before),
            _side(activation, "held between operations", activation.held, ""),
            *(_data_moved(activation, move) for move in activation.moves if not move.before),
        ],
    }


def _data_moved(activation: ActivationLayout, move: Move) -> JsonObject:
    """An activation on the other side of a collective."""
    over, of = "·".join(move.axes), together(move.of)
    words = f"{'before' if move.before else 'after'} its {move.kind} over {over}"
    sums = move.before and move.kind in ("reduce-scatter", "all-reduce")
    if move.kind == "collective-permute":
        note = f"as {of} hand it on, a shard at a time"
    elif move.before:
        note = f"partial sums over {over}, as {of} makes them" if sums else f"as {of} makes it"
    else:
        note = f"as {of} reads it"
    return {**_side(activation, words, move.layout, note), "sums": list(move.axes) if sums else []}


def _side(activation: ActivationLayout, words: str, layout: Layout, note: str) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(activation.colours, activation.shape, layout)
        + (f", {note}" if note else ""),
    }


def _batch(plan: Plan) -> list[JsonObject]:
    """Arrays of the batch, whose shapes a plan does not know."""
    return [
        {
            "group": "batch",
            "name": path,
            "shape": [],
            "names": [],
            "item": 0,
            "dtype": "",
            "forms": [
                {"words": "stored", "dims": [list(axes) for axes in layout], "text": str(layout)}
            ],
        }
        for path, layout in plan.batch_layouts
    ]


# --------------------------------------------------------------------------------------------------
# The machine, its links, and where each mesh axis lies on them.
#
# Every tier is a row, the outermost (slowest) first, with the mesh axes that run along its links.
# Below it some of its parts are drawn, the devices of the innermost tier by their place along the
# innermost axes.

#: Parts of the innermost tier that are drawn, and devices of one along each dim.
_PARTS, _SIDE = 4, 16
_MACHINE_LEFT, _BAR = 190, 26


def machine_picture(
    mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, ...]]]:
    """The picture of a machine under a mesh, and its rows as a table: tier, positions, rate,
    latency, axes.

    Args:
        order: of the axes on the links; by default the usual one.
    """
    placement = place(mesh, topology, order)
    if placement is None:
        return "", []
    shapes: list[str] = []
    rows: list[tuple[str, ...]] = []
    y = 8.0
    for number, tier in enumerate(topology.tiers):
        if tier.devices == 1 and len(topology.tiers) > 1:
            continue
        axes = _along(placement, number)
        shapes += _tier(tier, axes, y)
        rows.append(
            (
                tier.name,
                " x ".join(f"{n:,}" for n in tier.shape),
                f"{count_text(tier.bytes_per_s)}B/s",
                seconds_text(tier.latency_s) if tier.latency_s else "-",
                ", ".join(f"{axis}={degree}" for axis, degree, _ in axes) or "none",
            )
        )
        y += 2 * _BAR + 12
    drawn, height = _devices(mesh, topology, order, y)
    description = "; ".join(f"{name} {shape}: {axes}" for name, shape, _, _, axes in rows)
    label = f"{topology.devices:,} devices {topology.chip.name}. {description}"
    return picture(label, height, [*shapes, *drawn]), rows


def _along(placement: Placement, tier: int) -> list[tuple[str, int, int]]:
    """(axis, ways, dim) of what runs along a tier, the major one first."""
    return sorted(
        (
            (axis, span.ways, span.dim)
            for axis, spans in placement.items()
            for span in spans
            if span.tier == tier
        ),
        key=lambda axis_span: (axis_span[2], list(AXIS_COLOURS).index(axis_span[0])),
    )


def _tier(tier: Tier, axes: list[tuple[str, int, int]], y: float) -> Iterator[str]:
    """A row of the picture: what the links are, and the axes on them by their ways."""
    yield words(0, y + 16, tier.name, cls="strong")
    shape = " x ".join(f"{n:,}" for n in tier.shape)
    yield words(0, y + 33, f"{shape} · {count_text(tier.bytes_per_s)}B/s", cls="soft")
    width_left = WIDTH - _MACHINE_LEFT
    used = sum(math.log2(degree) for _, degree, _ in axes)
    span = max(used, math.log2(tier.devices), 1.0)
    yield rect(_MACHINE_LEFT, y, width_left, _BAR, cls="faint", tip=f"{tier.name}: {shape}")
    if not axes:
        yield words(_MACHINE_LEFT + 8, y + 17, "no mesh axis", cls="soft")
    x = float(_MACHINE_LEFT)
    for axis, degree, dim in axes:
        width = width_left * math.log2(degree) / span
        fill, ink = AXIS_COLOURS[axis]
        along = f", dim {dim}" if len(tier.shape) > 1 else ""
        yield rect(x, y, width, _BAR, fill=fill, tip=f"{axis}: {degree} along {tier.name}{along}")
        text = f"{axis} {degree:,}"
        if width > 7.4 * len(text):
            yield words(x + width / 2, y + 17, text, anchor="middle", fill=ink)
        x += width


def _devices(
    mesh: MeshShape, topology: Topology, order: tuple[str, ...], top: float
) -> tuple[list[str], float]:
    """Some parts of the innermost tier with their devices, and the height of the picture."""
    numbers = device_order(mesh, topology, order)
    assert numbers is not None, "the mesh has a place"
    places = {int(number): index for index, number in enumerate(numbers.reshape(-1))}
    tier = topology.tiers[-1]
    rows, columns = _machine_grid(tier)
    parts = topology.devices // tier.devices
    shown = list(range(min(parts, _PARTS - 1))) + ([parts - 1] if parts >= _PARTS else [])
    gap = 26.0
    side = min(34.0, (WIDTH - gap * _PARTS) / (columns * max(len(shown), 1)), 210 / rows)
    axis = _innermost(mesh, topology, order)
    shapes, x = [words(0, top + 6, _told(tier, parts, axis), cls="soft")], 0.0
    for index, part in enumerate(shown):
        if index and part - shown[index - 1] > 1:
            shapes.append(words(x, top + 24 + rows * side / 2, "…", cls="strong"))
            x += gap
        shapes += _part(tier, part, (x, top + 18, side), (rows, columns), places, mesh, axis)
        x += columns * side + gap
    return shapes, top + 18 + rows * side + 26


def _machine_grid(tier: Tier) -> tuple[int, int]:
    """Rows and columns that are drawn of a tier: of a torus two dims, of others a line or two."""
    if len(tier.shape) > 1:
        return min(tier.shape[-2], _SIDE), min(tier.shape[-1], _SIDE)
    n = min(tier.devices, _SIDE * 4)
    return (1, n) if n <= 4 else (2, -(-n // 2)) if n <= 16 else (4, -(-n // 4))


def _told(tier: Tier, parts: int, axis: str) -> str:
    many = (
        f"{parts:,} parts of {tier.devices:,} devices" if parts > 1 else f"{tier.devices} devices"
    )
    cut = (
        " (some of them are drawn)"
        if tier.devices > math.prod(_machine_grid(tier)) or parts > 4
        else ""
    )
    shade = f"; numbers and shades are places along {axis}" if axis else ""
    return f"{tier.name}: {many}{cut}{shade}"


def _part(
    tier: Tier,
    part: int,
    corner: tuple[float, float, float],
    grid: tuple[int, int],
    places: dict[int, int],
    mesh: MeshShape,
    axis: str,
) -> Iterator[str]:
    """The devices of one part."""
    (x, y, side), (rows, columns) = corner, grid
    yield rect(x - 4, y - 4, columns * side + 8, rows * side + 8, cls="frame")
    across = tier.shape[-1] if len(tier.shape) > 1 else columns
    for row in range(rows):
        for column in range(columns):
            inside = row * across + column
            if inside >= tier.devices:
                continue
            number = part * tier.devices + inside
            yield from _machine_device(
                number, (x + column * side, y + row * side, side), places, mesh, axis
            )
    if len(tier.shape) > 1:  # neighbours of a torus
        for row in range(rows):
            yield line(x, y + (row + 0.5) * side, x + columns * side, y + (row + 0.5) * side)


def _machine_device(
    number: int,
    corner: tuple[float, float, float],
    places: dict[int, int],
    mesh: MeshShape,
    axis: str,
) -> Iterator[str]:
    x, y, side = corner
    if number not in places:
        yield rect(x + 1, y + 1, side - 2, side - 2, cls="faint", tip=f"device {number}: not used")
        return
    position = coordinates(places[number], mesh)
    tip = ", ".join(f"{name} {value}" for name, value in position.items())
    colour = AXIS_COLOURS[axis][0] if axis else AXIS_COLOURS["data"][0]
    share = position.get(axis, 0) / max(1, mesh[axis] - 1) if axis else 1.0
    yield (
        f'<rect class="device" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{side - 2:.1f}"'
        f' height="{side - 2:.1f}" style="fill: {colour}; fill-opacity: {0.25 + 0.75 * share:.2f}">'
        f"<title>{escape(f'device {number}: {tip}' if tip else f'device {number}')}</title></rect>"
    )
    if axis and side >= 16:
        middle = y + side / 2 + 4
        ink = "#111" if share > 0.45 else ""
        yield words(x + side / 2, middle, str(position[axis]), cls="on", anchor="middle", fill=ink)


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
    "parameters": "#0072b2",
    "frozen": "#004f7c",
    "optimizer": "#009e73",
    "exchange": "#b2a000",
    "batch": "#7a7a80",
    "gradients": "#cc79a7",
    "activations": "#e69f00",
    "communication": "#56b4e9",
    "temporaries": "#d55e00",
}
#: Parts that are there between steps.
_STORED = frozenset({"parameters", "frozen", "optimizer", "exchange", "batch"})
#: Part of each that is there at points of a step: start, soon after, the end of the forward pass,
#: the start of the backward pass, its end, the update, the end.
_AT = (0.0, 0.04, 0.36, 0.40, 0.90, 0.94, 1.0)
_SHAPES = {
    "gradients": (0, 0, 0, 1, 1, 1, 0),
    "activations": (0, 0, 1, 1, 0, 0, 0),
    "communication": (0, 1, 1, 1, 1, 0, 0),
    "temporaries": (0, 1, 1, 1, 1, 0, 0),
}
#: Times the peak up to which a picture reaches to what a device has.
_FAR = 4
_MEMORY_LEFT, _MEMORY_TOP, _MEMORY_HEIGHT = 70, 14, 230
NOTE = (
    "Known are the stored parts, and all parts at the peak; in between straight lines are"
    " drawn: saved activations grow in the forward pass and are freed in the backward pass."
    " Gradients that are accumulated over microbatches are there from the first on."
)


def memory_picture(parts: DeviceBytes, usable: float | None) -> str:
    """The picture of the memory of a step.

    Args:
        parts: bytes at the peak.
        usable: bytes of a device that a program can use; None where it is not known.
    """
    near = usable is not None and usable <= _FAR * parts.peak
    top_bytes = max(parts.peak, usable if usable and near else 0) * 1.06 or 1.0
    shapes = list(_memory_grid(top_bytes))
    base = [0.0] * len(_AT)
    shown: list[tuple[str, int]] = []
    for name, colour in _MEMORY_COLOURS.items():
        size = getattr(parts, name)
        if size <= 0:
            continue
        shown.append((name, size))
        form = (1,) * len(_AT) if name in _STORED else _SHAPES[name]
        top = [low + size * share for low, share in zip(base, form, strict=True)]
        shapes.append(_band(name, size, colour, base, top, top_bytes))
        base = top
    shapes += _marks(parts, usable, top_bytes)
    label = (
        f"Memory of the fullest device over a step, {bytes_text(parts.peak)} at the peak: "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size in shown)
    )
    return picture(label, _MEMORY_TOP + _MEMORY_HEIGHT + 34, shapes)


def _x(share: float) -> float:
    return _MEMORY_LEFT + (WIDTH - _MEMORY_LEFT - 10) * share


def _y(size: float, top_bytes: float) -> float:
    return _MEMORY_TOP + _MEMORY_HEIGHT * (1 - size / top_bytes)


def _band(
    name: str, size: int, colour: str, base: list[float], top: list[float], top_bytes: float
) -> str:
    up = " ".join(
        f"{_x(time):.1f},{_y(value, top_bytes):.1f}" for time, value in zip(_AT, top, strict=True)
    )
    down = " ".join(
        f"{_x(time):.1f},{_y(value, top_bytes):.1f}"
        for time, value in zip(reversed(_AT), reversed(base), strict=True)
    )
    return (
        f'<polygon points="{up} {down}" style="fill: {colour}"><title>{name}:'
        f" {bytes_text(size)} at the peak</title></polygon>"
    )


def _memory_grid(top_bytes: float) -> Iterator[str]:
    for k in range(5):
        y = _y(top_bytes * k / 4, top_bytes)
        yield line(_MEMORY_LEFT, y, WIDTH - 10, y)
        yield words(
            _MEMORY_LEFT - 6, y + 4, bytes_text(top_bytes * k / 4), cls="soft", anchor="end"
        )
    for time, text in ((0.2, "forward"), (0.65, "backward"), (0.97, "update")):
        yield words(_x(time), _MEMORY_TOP + _MEMORY_HEIGHT + 18, text, cls="soft", anchor="middle")
    for time in (0.38, 0.92):
        yield line(_x(time), _MEMORY_TOP, _x(time), _MEMORY_TOP + _MEMORY_HEIGHT)


def _marks(parts: DeviceBytes, usable: float | None, top_bytes: float) -> Iterator[str]:
    label = f"usable: {bytes_text(usable)}" if usable else ""
    if usable and usable <= top_bytes:
        y = _y(usable, top_bytes)
        yield line(_MEMORY_LEFT, y, WIDTH - 10, y, cls="limit")
        yield words(WIDTH - 12, y - 4, label, anchor="end")
    elif usable:
        yield words(WIDTH - 12, _MEMORY_TOP + 12, f"{label}, far above", anchor="end")
    y = _y(parts.peak, top_bytes)
    yield rect(_x(0.40) - 3, y - 3, 6, 6, cls="ink", tip=f"peak: {bytes_text(parts.peak)}")
    yield words(
        _x(0.40) + 8, max(y - 4, _MEMORY_TOP + 10), f"peak {bytes_text(parts.peak)}", cls="halo"
    )


def memory_legend(parts: DeviceBytes) -> str:
    """The colours of the picture, HTML.

    Args:
        parts: bytes at the peak.
    """
    entries = "".join(
        f'<span><i style="background: {colour}"></i>{name}'
        f' <span class="soft">{bytes_text(getattr(parts, name))}</span></span>'
        for name, colour in _MEMORY_COLOURS.items()
        if getattr(parts, name) > 0
    )
    return f'<div class="legend">{entries}</div>'


def memory_rows(parts: DeviceBytes) -> list[tuple[str, str, str, str]]:
    """(part, bytes at the peak, share, when it is there) of what is live at the peak, the largest
    first.

    Args:
        parts: bytes at the peak.
    """
    sizes = [(field.name, getattr(parts, field.name)) for field in fields(parts)]
    return [
        (
            name,
            bytes_text(size),
            percent_text(size / (parts.peak or 1)),
            "between steps, too" if name in _STORED else "during a step",
        )
        for name, size in sorted(sizes, key=lambda part: -part[1])
        if size > 0
    ]


# --------------------------------------------------------------------------------------------------
# The kernels of a step under the roofline of the chip: FLOP/s over FLOPs a byte, both logarithmic;
# the area of a point is its share of the time.

_ROOFLINE_LEFT, _ROOFLINE_TOP, _ROOFLINE_HEIGHT, _BOTTOM = 80, 16, 260, 40
#: Points that are drawn; the others take less than a thousandth of the time.
_LEAST = 1e-3
_ROOFLINE_COLOURS = {"forward": "#0072b2", "backward": "#e69f00", "rematerialised": "#cc79a7"}


def roofline_picture(kernels: Kernels) -> str:
    """The picture of the kernels."""
    total = kernels.seconds or 1.0
    shown = [
        kernel
        for kernel in kernels.kernels
        if kernel.flops > 0 and kernel.intensity > 0 and kernel.seconds > _LEAST * total
    ]
    if not shown:
        return ""
    low = math.floor(math.log10(min(1.0, *(kernel.intensity for kernel in shown), 1.0)))
    high = math.ceil(math.log10(max(kernel.intensity for kernel in shown) * 2))
    peak = max(rate for _, rate in kernels.peak_flops_per_s)
    bottom = math.floor(math.log10(min(kernel.flops / kernel.seconds for kernel in shown)))
    scale = _Scale(low, high, bottom, math.log10(peak) + 0.25)
    shapes = [*_roofline_grid(scale), *_roofs(kernels, scale)]
    shapes += [_mark(kernel, kernels, total, scale) for kernel in shown]
    for k, (phase, colour) in enumerate(_ROOFLINE_COLOURS.items()):
        x = _ROOFLINE_LEFT + 12 + 130 * k
        shapes.append(f'<circle cx="{x}" cy="{_ROOFLINE_TOP - 10}" r="5" style="fill: {colour}"/>')
        shapes.append(words(x + 10, _ROOFLINE_TOP - 6, phase))
    label = f"Roofline of one {kernels.chip}: " + ", ".join(
        f"{kernel.name} {kernel.phase} {percent_text(kernels.bound(kernel) / kernel.seconds)} of"
        " the roofline"
        for kernel in shown[:8]
    )
    return picture(label, _ROOFLINE_TOP + _ROOFLINE_HEIGHT + _BOTTOM, shapes)


class _Scale:
    """Coordinates of intensities and rates; both logarithmic."""

    def __init__(self, low: float, high: float, bottom: float, top: float) -> None:
        self.low, self.high, self.bottom, self.top = low, high, bottom, top

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.low) / (self.high - self.low)
        return _ROOFLINE_LEFT + (WIDTH - _ROOFLINE_LEFT - 16) * share

    def y(self, rate: float) -> float:
        share = (math.log10(max(rate, 1e-9)) - self.bottom) / (self.top - self.bottom)
        return _ROOFLINE_TOP + _ROOFLINE_HEIGHT * (1 - max(share, 0.0))


def _roofline_grid(scale: _Scale) -> Iterator[str]:
    for power in range(math.ceil(scale.low), math.floor(scale.high) + 1):
        x = scale.x(10.0**power)
        yield line(x, _ROOFLINE_TOP, x, _ROOFLINE_TOP + _ROOFLINE_HEIGHT)
        text = count_text(10.0**power) if power >= 0 else f"{10.0**power:g}"
        anchor = "middle" if x < WIDTH - 24 else "end"
        yield words(x, _ROOFLINE_TOP + _ROOFLINE_HEIGHT + 16, text, cls="soft", anchor=anchor)
    for power in range(math.ceil(scale.bottom), math.floor(scale.top) + 1):
        y = scale.y(10.0**power)
        yield line(_ROOFLINE_LEFT, y, WIDTH - 16, y)
        yield words(_ROOFLINE_LEFT - 6, y + 4, count_text(10.0**power), cls="soft", anchor="end")
    y = _ROOFLINE_TOP + _ROOFLINE_HEIGHT + 34
    yield words(
        (_ROOFLINE_LEFT + WIDTH) / 2,
        y,
        "FLOP a byte of memory traffic",
        cls="soft",
        anchor="middle",
    )
    yield words(0, _ROOFLINE_TOP - 6, "FLOP/s", cls="soft")


def _roofs(kernels: Kernels, scale: _Scale) -> Iterator[str]:
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in kernels.peak_flops_per_s:
        if "float" in dtype or dtype in ("int8", "uint8"):  # what matrix units multiply
            by_peak.setdefault(peak, []).append(dtype)
    for peak, dtypes in by_peak.items():
        ridge = peak / kernels.bytes_per_s
        left = 10.0**scale.low
        points = [(left, left * kernels.bytes_per_s), (ridge, peak), (10.0**scale.high, peak)]
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
        yield f'<polyline class="roof" points="{path}"/>'
        text = f"{', '.join(dtypes)} {count_text(peak)}FLOP/s"
        yield words(scale.x(ridge) - 10, scale.y(peak) + 4, text, cls="halo", anchor="end")


def _mark(kernel: KernelTime, kernels: Kernels, total: float, scale: _Scale) -> str:
    radius = 3 + 22 * math.sqrt(kernel.seconds / total)
    tip = (
        f"{kernel.name}, {kernel.phase}: {seconds_text(kernel.seconds)} a step"
        f" ({percent_text(kernel.seconds / total)}),"
        f" {count_text(kernel.flops / kernel.seconds)}FLOP/s,"
        f" {percent_text(kernels.bound(kernel) / kernel.seconds)} of the roofline"
    )
    return (
        f'<circle class="kernel" cx="{scale.x(kernel.intensity):.1f}"'
        f' cy="{scale.y(kernel.flops / kernel.seconds):.1f}" r="{radius:.1f}" style="fill:'
        f' {_ROOFLINE_COLOURS[kernel.phase]}"><title>{escape(tip)}</title></circle>'
    )


# --------------------------------------------------------------------------------------------------
# Answers to questions about a plan, as sections of its page.

#: Kernels that a page lists.
_MOST_KERNELS = 40
_NOTE = (
    "Each point is a kind of kernel, as large as its share of the time. Left of the corner memory"
    " limits a kernel, right of it the matrix units; kernels without FLOPs are in the table alone."
)


def answered(answers: Answers, *, kernels_only: bool = False) -> Iterator[tuple[str, str, str]]:
    """(name, heading, HTML) of each answer."""
    if kernels_only:
        if answers.kernels is not None:
            rows = table(
                kernel_rows(answers.kernels, _MOST_KERNELS), KERNEL_HEAD, right={2, 3, 4, 5, 6}
            )
            yield "kernels", "Kernels", figure(roofline_picture(answers.kernels), _NOTE, rows)
        return
    if answers.alternatives is not None:
        rows = [
            [
                seconds_text(alternative.step_seconds),
                ratio_text(alternative.ratio),
                bytes_text(alternative.peak_bytes),
                str(alternative.mesh),
                alternative.summary,
            ]
            for alternative in answers.alternatives
        ]
        head = ("a step", "time", "a device", "mesh", "with")
        yield "alternatives", "Alternatives", table(rows, head, right={0, 1, 2})
    yield "constraints", "What holds the plan back", _constraints(answers)
    yield from _sensitivity(answers)


def _constraints(answers: Answers) -> str:
    if answers.constraints is None:
        return ""
    bindings = [f"<li>{escape(binding.message)}</li>" for binding in answers.constraints.binding]
    steps = [
        [
            seconds_text(step.step_seconds),
            bytes_text(step.short_bytes),
            str(step.mesh),
            step.summary,
        ]
        for step in answers.constraints.staircase
    ]
    text = f"<ul>{''.join(bindings)}</ul>" if bindings else "<p>Nothing.</p>"
    head = ("a step", "lacking", "mesh", "with")
    return text + (table(steps, head, right={0, 1}) if steps else "")


def _sensitivity(answers: Answers) -> Iterator[tuple[str, str, str]]:
    if answers.sensitivity is None:
        return
    prices, shocks = answers.sensitivity.prices, answers.sensitivity.shocks
    rows = [list(price_row(price)) for price in prices]
    breaks = "".join(f"<li>{escape(break_text(price))}</li>" for price in prices)
    head = ("", "now", "one more", "saves a step")
    yield (
        "more",
        "What more would buy",
        table(rows, head, right={1, 2, 3}) + f"<ul>{breaks}</ul>",
    )
    yield (
        "shocks",
        "If a figure is lower than thought",
        table([list(shock_row(shock)) for shock in shocks], SHOCK_HEAD, right={1, 2, 3}),
    )


# --------------------------------------------------------------------------------------------------
# A step as bars to one scale: busy time of devices, and every kind of collective, hidden and
# exposed.
#
# An estimate says how long each collective takes and how much of all of them is exposed.
# Collectives over axes that compute waits for (`shardlib.layout.Axis.waits`) are exposed; what is
# left of the exposed time is shared out among the others by their seconds.

_STEP_LEFT, _ROW, _STEP_MOST = 230, 24, 14
_PART_COLOURS = {
    "compute": "#0072b2",
    "exposed": "#d55e00",
    "bubble": "#cc79a7",
    "optimizer": "#009e73",
    "overhead": "#b2a000",
    "exchange": "#e69f00",
}


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


def step_picture(plan: Plan, *, limit: int = _STEP_MOST) -> str:
    """The picture of a step."""
    listed = lanes(plan)
    total = plan.estimate.step_seconds
    longest = max([total, *(lane.row.seconds for lane in listed)]) or 1.0
    scale = (WIDTH - _STEP_LEFT - 60) / longest
    height = 44 + _ROW * (1 + min(len(listed), limit)) + 20
    shapes = [*_step_grid(longest, scale, height), *_busy(plan, scale)]
    y = 24.0 + _ROW + 14
    for lane in listed[:limit]:
        shapes += _lane(lane, scale, y)
        y += _ROW
    label = (
        f"A step of {seconds_text(total)}: "
        + ", ".join(f"{name} {seconds_text(value)}" for name, value in _parts(plan))
        + ". Collectives: "
        + ", ".join(
            f"{lane.row.kind} over {' and '.join(lane.row.axes)} {seconds_text(lane.row.seconds)}"
            for lane in listed[:limit]
        )
    )
    return picture(label, height, shapes)


def _parts(plan: Plan) -> list[tuple[str, float]]:
    seconds = plan.estimate.seconds
    return [
        (LABELS.get(field.name, field.name), getattr(seconds, field.name))
        for field in fields(seconds)
        if getattr(seconds, field.name) > 0
    ]


def _busy(plan: Plan, scale: float) -> Iterator[str]:
    seconds, x = plan.estimate.seconds, float(_STEP_LEFT)
    yield words(0, 41, "a device", cls="strong")
    for field in fields(seconds):
        value = getattr(seconds, field.name)
        if value <= 0:
            continue
        name = LABELS.get(field.name, field.name)
        share = percent_text(value / (seconds.total or 1.0))
        tip = f"{name}: {seconds_text(value)} ({share})"
        yield rect(x, 26, value * scale, _ROW - 4, fill=_PART_COLOURS[field.name], tip=tip)
        if value * scale > 7.5 * len(name):
            ink = "#fff" if field.name == "compute" else "#111"
            yield words(x + value * scale / 2, 41, name, anchor="middle", fill=ink)
        x += value * scale
    yield words(x + 6, 41, seconds_text(seconds.total))


def _lane(lane: Lane, scale: float, y: float) -> Iterator[str]:
    row = lane.row
    name = f"{row.kind} · {'·'.join(row.axes)}"
    yield words(0, y + 15, clip(name, 34))
    hidden = row.seconds - lane.exposed
    yield rect(
        _STEP_LEFT,
        y,
        lane.exposed * scale,
        _ROW - 8,
        fill=_PART_COLOURS["exposed"],
        tip=f"{name}: {seconds_text(lane.exposed)} exposed",
    )
    if hidden > 0:
        yield rect(
            _STEP_LEFT + lane.exposed * scale,
            y,
            hidden * scale,
            _ROW - 8,
            cls="hidden-part",
            tip=f"{name}: {seconds_text(hidden)} hidden behind compute",
        )
    yield words(_STEP_LEFT + row.seconds * scale + 6, y + 13, seconds_text(row.seconds), cls="soft")


def _step_grid(longest: float, scale: float, height: float) -> Iterator[str]:
    for k in range(5):
        x = _STEP_LEFT + longest * scale * k / 4
        yield line(x, 20, x, height - 22)
        yield words(x, height - 6, seconds_text(longest * k / 4), cls="soft", anchor="middle")


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
# Collectives, parameters and activations as tables that link to each other.

#: Of a cell whose text may be broken.
_LONG = ' class="long"'


def collective_table(plan: Plan, rows: Sequence[ParameterRow]) -> str:
    """The kinds of collectives of a step, with links to what they move; empty without any."""
    linked = causes(plan, rows)
    if not linked:
        return ""
    head = ("over", "kind", "count", "bytes", "time", "mostly for", "moves")
    lines = [_heads(head, {2, 3, 4})]
    for number, (row, parameters) in enumerate(linked):
        cells = [
            "·".join(row.axes),
            row.kind,
            f"{row.count:,}",
            bytes_text(row.bytes),
            seconds_text(row.seconds),
            row.cause,
        ]
        links = [
            *(_link(f"parameter-{p}", rows[p].pattern) for p in parameters),
            *(_link(f"activation-{a}", plan.activations[a].name) for a in moved(plan, row)),
        ]
        lines.append(
            f'<tr id="collective-{number}">{_cells(cells, {2, 3, 4})}<td class="long">'
            f"{'; '.join(links)}</td></tr>"
        )
    note = (
        '<p class="soft">Gathers name their parameter; reductions of gradients belong to the'
        " parameters whose gradient has as many bytes. Activations are all that collectives of this"
        " kind over these axes move.</p>"
    )
    return _table(lines) + note


def parameter_table(plan: Plan, rows: Sequence[ParameterRow]) -> str:
    """The parameters, with links to their collectives; empty without any."""
    if not rows:
        return ""
    linked = causes(plan, rows)
    head = ("parameter", "", "how many", "bytes", "stored", "in compute", "collectives")
    lines = [_heads(head, {2, 3})]
    for number, row in enumerate(rows):
        name = row.pattern + ("" if row.example.trained else f" ({row.example.role})")
        cells = [f"{row.count:,}", bytes_text(row.bytes), row.rest, row.compute]
        links = ", ".join(
            _collective(c, row)
            for c, (row, parameters) in enumerate(linked)
            if number in parameters
        )
        lines.append(
            f'<tr id="parameter-{number}"><td>{escape(name)}</td>{_button(number, row.pattern)}'
            f'{_cells(cells, {0, 1}, {2, 3})}<td class="long">{links}</td></tr>'
        )
    return _table(lines)


def activation_table(plan: Plan, before: int) -> str:
    """The main activations, with links to their collectives; empty without any."""
    if not plan.activations:
        return ""
    linked = causes(plan, ())
    head = ("activation", "", "how many", "bytes", "held", "moved by")
    lines = [_heads(head, {2, 3})]
    for number, activation in enumerate(plan.activations):
        cells = [
            f"{activation.count:,}",
            bytes_text(_tables_bytes(activation)),
            _layout(activation),
        ]
        moves = "; ".join(
            _collective_of(move, [row for row, _ in linked]) for move in activation.moves
        )
        lines.append(
            f'<tr id="activation-{number}"><td class="long">{escape(activation.name)}</td>'
            f"{_button(before + number, activation.name)}{_cells(cells, {0, 1}, {2})}"
            f'<td class="long">{moves}</td></tr>'
        )
    note = (
        '<p class="soft">Of the whole batch, each once; of the forward and the backward pass. Of'
        " the gradients those that are moved.</p>"
    )
    return _table(lines) + note


def _collective_of(move: Move, rows: Sequence[CollectiveRow]) -> str:
    """Names the collective of an activation, with a link to it: "all-gather over tensor for
    layers.mlp.up".
    """
    words = f"{move.kind} over {'·'.join(move.axes)}"
    number = next(
        (i for i, row in enumerate(rows) if (row.kind, row.axes) == (move.kind, move.axes)), None
    )
    link = escape(words) if number is None else _link(f"collective-{number}", words)
    return f"{link} {'after' if move.before else 'for'} {escape(together(move.of))}"


def _tables_bytes(activation: ActivationLayout) -> int:
    return math.prod(activation.shape) * ITEMSIZE.get(activation.dtype, 4)


def _layout(activation: ActivationLayout) -> str:
    return notation(activation.colours, activation.shape, activation.held)


def _link(target: str, text: str) -> str:
    return f'<a href="#{target}">{escape(text)}</a>'


def _collective(number: int, row: CollectiveRow) -> str:
    return _link(f"collective-{number}", f"{row.kind} over {'·'.join(row.axes)}")


def _button(number: int, name: str) -> str:
    return (
        f'<td><button type="button" data-array="{number}">show'
        f'<span class="skip"> {escape(name)} as a grid</span></button></td>'
    )


def _table(lines: Sequence[str]) -> str:
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _heads(heads: Sequence[str], right: set[int]) -> str:
    cells = "".join(
        f'<th scope="col"{_right(i, right)}>{escape(text)}</th>' if text else "<td></td>"
        for i, text in enumerate(heads)
    )
    return f"<tr>{cells}</tr>"


def _cells(cells: Sequence[str], right: Collection[int], wraps: Collection[int] = ()) -> str:
    return "".join(
        f"<td{_LONG if i in wraps else _right(i, right)}>{escape(cell)}</td>"
        for i, cell in enumerate(cells)
    )


def _right(index: int, right: Collection[int]) -> str:
    return ' class="right"' if index in right else ""


# --------------------------------------------------------------------------------------------------
# One trace of a step as it was predicted and as it was measured, on one axis of time.
#
# The trace is in Chrome's trace event format, which https://ui.perfetto.dev opens: complete events
# ("X") and metadata ("M"), times in microseconds. The start of the first measured step is 0. The
# prediction stands at the start of every measured step that it has room for; without measured
# steps, once.
#
#     predicted         the parts of the step one after the other, as the estimate has no
#                       order; then the kinds of collectives, each from the start on, its
#                       exposed part separate
#     predicted stages  what each stage does when, where the plan has a pipeline
#     measured, device  the recorded steps, and the instructions of the program: computation and
#                       collectives apart, those that run at the same time below each other

#: Numbers of the processes of a trace; that of a device follows `_DEVICES`.
_PREDICTED, _STAGES, _DEVICES = 1, 2, 10


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One execution of an instruction on a device.

    Attributes:
        device: its number.
        name: of the instruction, "all-gather.3".
        start: seconds on the clock of the profile.
        seconds: that it took.
    """

    device: int
    name: str
    start: float
    seconds: float

    @property
    def communicates(self) -> bool:
        """True if it is a collective, by its name."""
        return self.name.startswith(KINDS)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One recorded step.

    Attributes:
        name: "step 6".
        start: seconds on the clock of the profile.
        seconds: from the first instruction of any device to the last.
        operations: on every device that was recorded.
    """

    name: str
    start: float
    seconds: float
    operations: tuple[Operation, ...]


def step_trace(
    plan: Plan, measured: Sequence[MeasuredStep] = (), pipeline: Timeline | None = None
) -> str:
    """A trace as JSON."""
    zero = measured[0].start if measured else 0.0
    starts = _starts([step.start - zero for step in measured] or [0.0], plan.estimate.step_seconds)
    trace_events = list(_predicted(plan, starts))
    if pipeline is not None:
        trace_events += _step_trace_moved(
            list(events(pipeline, _STAGES, "predicted stages")), starts
        )
    for device in sorted({operation.device for step in measured for operation in step.operations}):
        trace_events += _step_trace_device(device, measured, zero)
    titles: JsonObject = {"predicted": f"{plan.model} on {plan.topology}, plan {plan.digest}"}
    if measured:
        titles["measured"] = ", ".join(step.name for step in measured)
    trace: JsonObject = {"traceEvents": trace_events, "displayTimeUnit": "ms", "otherData": titles}
    return json.dumps(trace, ensure_ascii=False)  # Perfetto shows escapes as they are


def _starts(requested: Sequence[float], seconds: float) -> list[float]:
    """The starts at which a prediction does not run into the one before."""
    accepted: list[float] = []
    for start in requested:
        if not accepted or start >= accepted[-1] + seconds:
            accepted.append(start)
    return accepted


def _named(process: int, name: str, threads: Sequence[str]) -> Iterator[JsonObject]:
    """The names of a process and of its threads, which are counted from 1."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for number, thread in enumerate(threads, start=1):
        named = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **named, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", **named, "args": {"sort_index": number}}


def _slice(
    track: tuple[int, int], name: str, start: float, seconds: float, **args: str | int
) -> JsonObject:
    process, thread = track
    return {
        "ph": "X",
        "name": name,
        "cat": name.partition(".")[0],
        "pid": process,
        "tid": thread,
        **span(start, seconds),
        "args": dict(args),
    }


def _predicted(plan: Plan, starts: Sequence[float]) -> Iterator[JsonObject]:
    """Yields the trace events that a plan predicts of a step."""
    predicted_lanes = lanes(plan)
    rows = [f"{lane.row.kind} over {'·'.join(lane.row.axes)}" for lane in predicted_lanes]
    yield from _named(_PREDICTED, "predicted", ["a device", *rows])
    seconds = plan.estimate.seconds
    parts = [
        (LABELS.get(field.name, field.name), getattr(seconds, field.name))
        for field in fields(seconds)
    ]
    note = "the order within a step is not known"
    for start in starts:
        time = start
        for name, length in parts:
            if length > 0:
                yield _slice((_PREDICTED, 1), name, time, length, note=note)
                time += length
        for thread, lane in enumerate(predicted_lanes, start=2):
            hidden = lane.row.seconds - lane.exposed
            args = {"count": lane.row.count, "bytes": lane.row.bytes, "for": lane.row.cause}
            if lane.exposed > 0:
                yield _slice((_PREDICTED, thread), "exposed", start, lane.exposed, **args)
            if hidden > 0:
                yield _slice((_PREDICTED, thread), "hidden", start + lane.exposed, hidden, **args)


def _step_trace_moved(
    pipeline_events: Sequence[JsonObject], starts: Sequence[float]
) -> Iterator[JsonObject]:
    """The events of a step at every start."""
    yield from (event for event in pipeline_events if event["ph"] == "M")
    for start in starts:
        for event in pipeline_events:
            if event["ph"] == "X":
                yield {**event, "ts": event["ts"] + span(start, 0.0)["ts"]}


def _step_trace_device(
    device: int, measured: Sequence[MeasuredStep], zero: float
) -> Iterator[JsonObject]:
    """Yields the recorded trace events of a device."""
    on_device = [
        operation
        for step in measured
        for operation in step.operations
        if operation.device == device
    ]
    tracks = {
        "steps": _below([_whole(step, device) for step in measured]),
        "computation": _below([operation for operation in on_device if not operation.communicates]),
        "collectives": _below([operation for operation in on_device if operation.communicates]),
    }
    process = _DEVICES + device
    yield from _named(
        process, f"measured, device {device}", [name for name, rows in tracks.items() for _ in rows]
    )
    for thread, row in enumerate((row for rows in tracks.values() for row in rows), start=1):
        for operation in row:
            yield _slice(
                (process, thread), operation.name, operation.start - zero, operation.seconds
            )


def _whole(step: MeasuredStep, device: int) -> Operation:
    """A step on one device, from its first instruction to its last."""
    on_device = [operation for operation in step.operations if operation.device == device]
    start = min((operation.start for operation in on_device), default=step.start)
    end = max((operation.start + operation.seconds for operation in on_device), default=step.start)
    return Operation(device=device, name=step.name, start=start, seconds=end - start)


def _below(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations in rows in each of which none begins before the one in front is over."""
    rows: list[list[Operation]] = []
    for operation in sorted(operations, key=lambda each: (each.start, -each.seconds)):
        for row in rows:
            if row[-1].start + row[-1].seconds <= operation.start:
                row.append(operation)
                break
        else:
            rows.append([operation])
    return rows
