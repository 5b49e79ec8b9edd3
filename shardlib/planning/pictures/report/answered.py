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
