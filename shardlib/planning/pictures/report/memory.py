"""What is live when: bytes of the fullest device from the start of a step to its end.

What an estimate knows are the bytes at the point where they are the most, part by part, and which
of them stay between steps. The curve is drawn through these: what is stored is there all the time,
activations grow with the forward pass and go with the backward pass, and temporaries and gathered
parameters come with either. It says so below the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from shardlib.cost.estimate import DeviceBytes
from shardlib.planning.pictures.report.svg import WIDTH, line, picture, rect, words
from shardlib.planning.units.quantity import bytes_text, percent_text

#: Parts in the order in which they are stacked, with their colour.
_COLOURS = {
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
_LEFT, _TOP, _HEIGHT = 70, 14, 230
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
    shapes = list(_grid(top_bytes))
    base = [0.0] * len(_AT)
    shown: list[tuple[str, int]] = []
    for name, colour in _COLOURS.items():
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
    return picture(label, _TOP + _HEIGHT + 34, shapes)


def _x(share: float) -> float:
    return _LEFT + (WIDTH - _LEFT - 10) * share


def _y(size: float, top_bytes: float) -> float:
    return _TOP + _HEIGHT * (1 - size / top_bytes)


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


def _grid(top_bytes: float) -> Iterator[str]:
    for k in range(5):
        y = _y(top_bytes * k / 4, top_bytes)
        yield line(_LEFT, y, WIDTH - 10, y)
        yield words(_LEFT - 6, y + 4, bytes_text(top_bytes * k / 4), cls="soft", anchor="end")
    for time, text in ((0.2, "forward"), (0.65, "backward"), (0.97, "update")):
        yield words(_x(time), _TOP + _HEIGHT + 18, text, cls="soft", anchor="middle")
    for time in (0.38, 0.92):
        yield line(_x(time), _TOP, _x(time), _TOP + _HEIGHT)


def _marks(parts: DeviceBytes, usable: float | None, top_bytes: float) -> Iterator[str]:
    label = f"usable: {bytes_text(usable)}" if usable else ""
    if usable and usable <= top_bytes:
        y = _y(usable, top_bytes)
        yield line(_LEFT, y, WIDTH - 10, y, cls="limit")
        yield words(WIDTH - 12, y - 4, label, anchor="end")
    elif usable:
        yield words(WIDTH - 12, _TOP + 12, f"{label}, far above", anchor="end")
    y = _y(parts.peak, top_bytes)
    yield rect(_x(0.40) - 3, y - 3, 6, 6, cls="ink", tip=f"peak: {bytes_text(parts.peak)}")
    yield words(_x(0.40) + 8, max(y - 4, _TOP + 10), f"peak {bytes_text(parts.peak)}", cls="halo")


def memory_legend(parts: DeviceBytes) -> str:
    """The colours of the picture, HTML.

    Args:
        parts: bytes at the peak.
    """
    entries = "".join(
        f'<span><i style="background: {colour}"></i>{name}'
        f' <span class="soft">{bytes_text(getattr(parts, name))}</span></span>'
        for name, colour in _COLOURS.items()
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
