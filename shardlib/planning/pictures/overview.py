"""A plan on its machine as one picture: an SVG file with the figures, the links with their mesh
axes, and the step.
"""

from __future__ import annotations

import re
from html import escape

from shardlib.errors import PlanError
from shardlib.hardware.topology import Topology
from shardlib.planning.pictures.report.machine import machine_picture
from shardlib.planning.pictures.report.step import step_picture
from shardlib.planning.pictures.report.svg import WIDTH, words
from shardlib.planning.pictures.style_sheets import style
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    seconds_text,
)

_MARGIN, _TOP, _LANES = 24, 146, 6


def plan_svg(plan: Plan, topology: Topology) -> str:
    """The picture of a plan, a complete SVG document; nothing is fetched, and there are no scripts."""
    machine, _ = machine_picture(plan.mesh, topology, plan.axis_order)
    if not machine:
        raise PlanError(f"the mesh {plan.mesh} has no place on {topology.name}")
    parts = [
        ("The links of the machine, the slowest first, with the mesh axes along them", machine),
        (
            "A step: what a device is busy with, and its collectives, exposed (orange) or hidden"
            " behind compute (dashed)",
            step_picture(plan, limit=_LANES),
        ),
    ]
    shapes, y = _head(plan), float(_TOP)
    for heading, picture in parts:
        shapes.append(words(_MARGIN, y, heading, cls="strong"))
        inner, height = _nested(picture, y + 12)
        shapes.append(inner)
        y += height + 36
    title = f"{plan.model} on {plan.topology}: mesh {plan.mesh}"
    width = WIDTH + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y:.0f}" width="{width}"'
        f' height="{y:.0f}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{style('overview.css')}</style>\n"
        f'<rect class="page" width="{width}" height="{y:.0f}" rx="10"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _head(plan: Plan) -> list[str]:
    estimate = plan.estimate
    figures = (
        (seconds_text(estimate.step_seconds), "a step"),
        (count_text(estimate.tokens_per_second), "tokens/s"),
        (percent_text(estimate.mfu), "MFU"),
        (bytes_text(estimate.device_bytes.peak), "a device"),
    )
    shapes = [
        words(_MARGIN, 34, f"{plan.model} on {plan.topology}", cls="title"),
        words(_MARGIN, 54, f"{plan.mesh.devices:,} devices, mesh {plan.mesh}", cls="soft"),
    ]
    for number, (value, label) in enumerate(figures):
        x = _MARGIN + 170 * number
        shapes += [words(x, 92, value, cls="figure"), words(x, 110, label, cls="soft")]
    return shapes


def _nested(picture: str, y: float) -> tuple[str, float]:
    """A picture inside of another, and its height."""
    match = re.match(r'<svg class="picture" viewBox="0 0 (\d+) (\d+)"', picture)
    assert match is not None, "pictures begin so"
    height = float(match[2])
    place = (
        f'<svg x="{_MARGIN}" y="{y:.0f}" width="{WIDTH}" height="{height:.0f}" overflow="visible"'
    )
    return picture.replace('<svg class="picture"', place, 1), height
