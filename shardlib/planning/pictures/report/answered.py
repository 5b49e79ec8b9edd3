"""Answers to questions about a plan, as sections of its page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shardlib.planning.answers.answers import Answers
from shardlib.planning.answers.kernels import KERNEL_HEAD, kernel_rows
from shardlib.planning.answers.shadow_prices import SHOCK_HEAD, break_text, price_row, shock_row
from shardlib.planning.pictures.report.roofline import roofline_picture
from shardlib.planning.pictures.report.svg import figure
from shardlib.planning.units.html_elements import table
from shardlib.planning.units.quantity import bytes_text, ratio_text, seconds_text

#: Kernels that a page lists.
_MOST_KERNELS = 40
_NOTE = (
    "Each point is a kind of kernel, as large as its share of the time. Left of the corner memory"
    " limits a kernel, right of it the matrix units; kernels without FLOPs are in the table alone."
)


def answered(found: Answers, *, kernels_only: bool = False) -> Iterator[tuple[str, str, str]]:
    """(name, heading, HTML) of each answer.

    Args:
        found: the answers.
        kernels_only: that of the kernels alone, or all others.
    """
    if kernels_only:
        if found.kernels is not None:
            rows = table(
                kernel_rows(found.kernels, _MOST_KERNELS), KERNEL_HEAD, right={2, 3, 4, 5, 6}
            )
            yield "kernels", "Kernels", figure(roofline_picture(found.kernels), _NOTE, rows)
        return
    if found.alternatives is not None:
        rows = [
            [
                seconds_text(one.step_seconds),
                ratio_text(one.ratio),
                bytes_text(one.peak_bytes),
                str(one.mesh),
                one.summary,
            ]
            for one in found.alternatives
        ]
        head = ("a step", "time", "a device", "mesh", "with")
        yield "alternatives", "Alternatives", table(rows, head, right={0, 1, 2})
    yield "constraints", "What holds the plan back", _constraints(found)
    yield from _sensitivity(found)


def _constraints(found: Answers) -> str:
    if found.constraints is None:
        return ""
    held = [f"<li>{escape(one.message)}</li>" for one in found.constraints.binding]
    steps = [
        [seconds_text(one.step_seconds), bytes_text(one.short_bytes), str(one.mesh), one.summary]
        for one in found.constraints.staircase
    ]
    told = f"<ul>{''.join(held)}</ul>" if held else "<p>Nothing.</p>"
    head = ("a step", "lacking", "mesh", "with")
    return told + (table(steps, head, right={0, 1}) if steps else "")


def _sensitivity(found: Answers) -> Iterator[tuple[str, str, str]]:
    if found.sensitivity is None:
        return
    prices, shocks = found.sensitivity.prices, found.sensitivity.shocks
    rows = [list(price_row(one)) for one in prices]
    breaks = "".join(f"<li>{escape(break_text(one))}</li>" for one in prices)
    head = ("", "now", "one more", "saves a step")
    yield (
        "more",
        "What more would buy",
        table(rows, head, right={1, 2, 3}) + f"<ul>{breaks}</ul>",
    )
    yield (
        "shocks",
        "If a figure is lower than thought",
        table([list(shock_row(one)) for one in shocks], SHOCK_HEAD, right={1, 2, 3}),
    )
