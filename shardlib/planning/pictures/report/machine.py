"""The machine, its links, and where each mesh axis lies on them.

Every tier is a row, the outermost (slowest) first, with the mesh axes that run along its links.
Below it some of its parts are drawn, the devices of the innermost tier by their place along the
innermost axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from shardlib.axes import MeshShape
from shardlib.hardware.placement import Placement, device_order, place
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology
from shardlib.planning.pictures.report.svg import AXIS_COLOURS, WIDTH, line, picture, rect, words
from shardlib.planning.units.quantity import count_text, seconds_text

#: Parts of the innermost tier that are drawn, and devices of one along each dim.
_PARTS, _SIDE = 4, 16
_LEFT, _BAR = 190, 26


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
    width_left = WIDTH - _LEFT
    used = sum(math.log2(degree) for _, degree, _ in axes)
    span = max(used, math.log2(tier.devices), 1.0)
    yield rect(_LEFT, y, width_left, _BAR, cls="faint", tip=f"{tier.name}: {shape}")
    if not axes:
        yield words(_LEFT + 8, y + 17, "no mesh axis", cls="soft")
    x = float(_LEFT)
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
    rows, columns = _grid(tier)
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


def _grid(tier: Tier) -> tuple[int, int]:
    """Rows and columns that are drawn of a tier: of a torus two dims, of others a line or two."""
    if len(tier.shape) > 1:
        return min(tier.shape[-2], _SIDE), min(tier.shape[-1], _SIDE)
    n = min(tier.devices, _SIDE * 4)
    return (1, n) if n <= 4 else (2, -(-n // 2)) if n <= 16 else (4, -(-n // 4))


def _told(tier: Tier, parts: int, axis: str) -> str:
    many = (
        f"{parts:,} parts of {tier.devices:,} devices" if parts > 1 else f"{tier.devices} devices"
    )
    cut = " (some of them are drawn)" if tier.devices > math.prod(_grid(tier)) or parts > 4 else ""
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
            yield from _device(
                number, (x + column * side, y + row * side, side), places, mesh, axis
            )
    if len(tier.shape) > 1:  # neighbours of a torus
        for row in range(rows):
            yield line(x, y + (row + 0.5) * side, x + columns * side, y + (row + 0.5) * side)


def _device(
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
