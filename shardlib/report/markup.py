"""HTML and SVG from jinja2 templates, files of the package, and what several pictures share: cards
of notebooks, charts with logarithmic axes.

A page or picture is one file with its styles inside; it fetches nothing.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from shardlib.report.elements import (
    bytes_text,
    clip,
    count_text,
    percent_text,
    seconds_text,
)

if TYPE_CHECKING:
    import jinja2

#: User units of the width of a picture in a page.
WIDTH = 860
#: Colours that can be told apart on white and on black, also by people who see no red or green
#: (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, OLIVE = "#56b4e9", "#d55e00", "#b2a000"


def render(template: str, **values: object) -> str:
    """Fills in a template; text among the values is escaped.

    Args:
        template: its file, relative to the package: "report/templates/page.html".
    """
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> jinja2.Environment:
    import jinja2  # plans that are not drawn do not wait for it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shardlib", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., str]] = {
        "bytes": bytes_text,
        "seconds": seconds_text,
        "count": count_text,
        "percent": percent_text,
        "clip": clip,
        "comma": "{:,}".format,
        "f": _fixed,
        "path": _path,
        "base64": _base64,
    }
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    environment.globals["asset"] = _asset  # pyright: ignore[reportUnknownMemberType]
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def round_steps(top: float, parts: int) -> list[float]:
    """From 0 to at most `top`, in steps of 1, 2 or 5 times a power of ten: at most so many."""
    power = 10.0 ** math.floor(math.log10(top / parts))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * parts >= top * 0.999)
    return [step * k for k in range(int(top / step * 1.001) + 1)]


def _fixed(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}"


def _path(points: Iterable[tuple[float, float]]) -> str:
    """The points of a line or polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _asset(name: str) -> str:
    """The text of a style sheet or a script, which stands in the page itself."""
    from markupsafe import Markup

    return Markup((resources.files("shardlib") / name).read_text(encoding="utf-8"))


class Picture(NamedTuple):
    """A picture in a page.

    Attributes:
        label: the picture in words.
        height: user units; it is `width` wide.
        shapes: SVG.
    """

    label: str
    height: float
    shapes: str
    width: int = WIDTH


# --------------------------------------------------------------------------------------------------
# Charts.


class Box(NamedTuple):
    """The size of a chart and the edges of its plot, user units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


@dataclass(frozen=True, kw_only=True)
class LogAxis:
    """Maps values to user units on a logarithmic axis.

    Attributes:
        low, high: values at its ends.
        start, end: user units of its ends.
        marks: (value, label) of the lines of the grid.
    """

    low: float
    high: float
    start: float
    end: float
    marks: Sequence[tuple[float, str]] = ()

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        return self.start + share * (self.end - self.start)


_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, OLIVE)
#: (label, size, size in words)
Part = tuple[str, float, str]


def card(
    title: str,
    lines: Sequence[str] = (),
    *,
    bars: Sequence[tuple[str, Sequence[Part]]] = (),
    rows: Iterable[Sequence[str]] = (),
    head: Sequence[str] = (),
    text: str = "",
    picture: str = "",
    folded: tuple[str, str] = ("", ""),
) -> str:
    """A value as HTML for a notebook.

    Args:
        bars: (heading, parts) of stacked bars.
        rows, head: a table.
        text: the whole text of the value.
        picture: SVG.
        folded: heading and HTML of what a click shows.
    """
    coloured = [
        (
            heading,
            [
                (*part, "var(--faint)" if part[0] == "spare" else _COLOURS[i % len(_COLOURS)])
                for i, part in enumerate(parts)
                if part[1] > 0
            ],
        )
        for heading, parts in bars
    ]
    return render(
        "report/templates/card.html",
        title=title,
        lines=lines,
        bars=coloured,
        rows=list(rows),
        head=head,
        text=text,
        picture=picture,
        folded=folded,
    )
