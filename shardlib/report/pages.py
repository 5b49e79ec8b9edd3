"""Web pages of a plan: one plan, two side by side, and one as a picture on its machine."""

from __future__ import annotations

import re
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from shardlib.cost.roofline import fitting_bytes
from shardlib.errors import ArgumentError, MissingFileError, PlanError, TopologyError
from shardlib.findings import Finding
from shardlib.machines.topology import Topology, topology
from shardlib.machines.topology import topology as find_topology
from shardlib.planner.answers import Answers, Kernels
from shardlib.planner.plan import Plan
from shardlib.report.changes import change
from shardlib.report.elements import (
    bytes_text,
    count_text,
    percent_text,
    seconds_text,
    section,
    style,
    table,
)
from shardlib.report.panels import (
    NOTE,
    WIDTH,
    Evidence,
    activation_table,
    answered,
    array_panel,
    collective_table,
    evidence_head,
    evidence_rows,
    figure,
    landscape_panel,
    lane_rows,
    machine_picture,
    memory_legend,
    memory_picture,
    memory_rows,
    page_data,
    parameter_table,
    pipeline_picture,
    said_of,
    step_picture,
    words,
)
from shardlib.report.text import (
    TRIAL_HEAD,
    ParameterRow,
    decision_lines,
    parameter_rows,
    reasons,
    trial_rows,
)

# --------------------------------------------------------------------------------------------------
# Two plans side by side as a web page: their differences, and the bars and the machine of each.


def compared_page(a: Plan, b: Plan) -> str:
    """One self-contained HTML page about what changes from plan `a` to plan `b`."""
    changed = change(a, b)
    head = ("", "before", "after", "change")
    body = [
        f"<h1>{escape(changed.title)}</h1>",
        *section("Figures", table(changed.rows(), head, right={1, 2, 3})),
        *section(
            "Decisions",
            table(changed.decisions, ("", "before", "after"))
            if changed.decisions
            else "<p>All are the same.</p>",
        ),
    ]
    for name, plan in (("Before", a), ("After", b)):
        body += section(f"{name}: the machine", _compared_machine(plan))
        body += section(f"{name}: the step", f"<figure>{step_picture(plan)}</figure>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(changed.title)}</title>\n<style>{style('report.css')}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def _compared_machine(plan: Plan) -> str:
    try:
        drawn, _ = machine_picture(plan.mesh, topology(plan.topology), plan.axis_order)
    except (TopologyError, MissingFileError):
        return ""
    return f"<figure>{drawn}</figure>" if drawn else ""


# --------------------------------------------------------------------------------------------------
# A plan as a web page: one HTML file with inline pictures, its data and a script; it fetches
# nothing.
#
# The figures and sentences are those of `shardlib.report`; only the form differs. Without the
# script everything but the landscape of plans and the arrays as grids is there.

#: (name, heading, content): a section of the page.
Section = tuple[str, str, str]


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
    title = f"{plan.model} on {plan.topology}"
    machine = topology or _found(plan)
    rows = parameter_rows(plan.parameters)
    sections = [
        section
        for section in _sections(plan, machine, rows, answers or Answers(), evidence)
        if section[2]
    ]
    usable = None if machine is None else machine.chip.usable_bytes
    fitting = None if machine is None else fitting_bytes(machine)
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{heading}</h2>\n'
        f"{content}\n</section>"
        for name, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style('report.css')}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the plan</a>\n<header>'
        f"{_html_head(plan, title)}</header>"
        f'\n<nav aria-label="Sections">{links}</nav>\n<main id="main">\n{body}\n</main>\n'
        f"{page_data(plan, rows, usable, fitting)}\n<script>{style('report.js')}</script>\n"
        "</body>\n</html>\n"
    )


def _found(plan: Plan) -> Topology | None:
    try:
        return find_topology(plan.topology)
    except (TopologyError, MissingFileError):
        return None


def _html_head(plan: Plan, title: str) -> str:
    estimate = plan.estimate
    figures = [
        (seconds_text(estimate.step_seconds), "a step"),
        (count_text(estimate.tokens_per_second), "tokens/s"),
        (percent_text(estimate.mfu), "MFU"),
        (bytes_text(estimate.device_bytes.peak), "a device"),
    ]
    shown = "".join(f"<div><b>{value}</b>{label}</div>" for value, label in figures)
    return (
        f"<h1>{escape(title)}</h1>"
        f'<p class="soft">{plan.mesh.devices:,} device{"s" * (plan.mesh.devices > 1)}, mesh'
        f" {escape(str(plan.mesh))}, plan"
        f' <code>{plan.digest}</code></p><div class="figures">{shown}</div>'
    )


def _sections(
    plan: Plan,
    machine: Topology | None,
    rows: Sequence[ParameterRow],
    answers: Answers,
    evidence: Sequence[Evidence],
) -> Iterator[Section]:
    usable = None if machine is None else machine.chip.usable_bytes
    yield "decisions", "Decisions", table([[label, text] for label, text in decision_lines(plan)])
    yield "why", "Why", _listed(reasons(plan, usable))
    yield "machine", "Machine", _html_machine(plan, machine)
    yield "arrays", "Arrays", array_panel(bool(plan.parameters or plan.activations))
    yield "time", "Time of a step", _time(plan)
    yield "memory", "Memory of a device", _memory(plan, usable)
    yield from answered(answers, kernels_only=True)
    yield "landscape", "Landscape of plans", landscape_panel(plan)
    yield "compared", "Predicted, compiled, measured", _evidence(plan, evidence)
    yield "collectives", "Collectives", collective_table(plan, rows)
    yield "parameters", "Parameters", parameter_table(plan, rows)
    yield "activations", "Activations", activation_table(plan, len(rows))
    yield from answered(answers)
    yield (
        "findings",
        "Findings",
        "".join(_finding(finding) for finding in plan.findings),
    )
    yield "rejected", "Rejected", _rejected(plan)


def _finding(finding: Finding) -> str:
    """A finding, with what to try on a line of its own."""
    text = escape(str(replace(finding, hint="")))
    return f"<p>{text}{f'<br>Try: {escape(finding.hint)}' if finding.hint else ''}</p>"


def _listed(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _html_machine(plan: Plan, machine: Topology | None) -> str:
    if machine is None:
        return ""
    drawn, rows = machine_picture(plan.mesh, machine, plan.axis_order)
    head = ("links", "positions", "rate of a device", "latency", "mesh axes")
    note = (
        "The links of the machine, the slowest first, with the mesh axes along them; the length of"
        " an axis is the logarithm of its size."
    )
    return figure(drawn, note, table(rows, head, right={1, 2, 3})) if drawn else ""


def _time(plan: Plan) -> str:
    head = ("kind", "over", "count", "time", "exposed", "hidden")
    note = (
        "To one scale: what a device is busy with, and every kind of collective, the part that"
        " devices wait for in orange red and the part that hides behind compute dashed. The order"
        " within the step is not drawn."
    )
    bars = figure(step_picture(plan), note, table(lane_rows(plan), head, right={2, 3, 4, 5}))
    return bars + pipeline_picture(plan)


def _memory(plan: Plan, usable: int | None) -> str:
    parts = plan.estimate.device_bytes
    rows = memory_rows(parts)
    return figure(
        memory_picture(parts, usable) + memory_legend(parts),
        NOTE,
        "<h3>Live at the peak</h3>" + table(rows, ("", "bytes", "share", "when"), right={1, 2}),
    )


def _evidence(plan: Plan, evidence: Sequence[Evidence]) -> str:
    sources = said_of(plan, evidence)
    trials = (
        "<h3>Plans that were compiled</h3>"
        + table(trial_rows(plan.refined), TRIAL_HEAD, right={1, 2, 3, 4})
        if plan.refined
        else ""
    )
    if len(sources) < 2:
        return trials
    return table(evidence_rows(sources), evidence_head(sources)) + trials


def _rejected(plan: Plan) -> str:
    rows = [
        [
            str(r.mesh),
            r.summary,
            r.reason,
            seconds_text(r.step_seconds),
            bytes_text(r.peak_bytes) if r.peak_bytes else "",
        ]
        for r in plan.search.rejected
    ]
    if not rows:
        return ""
    head = ("mesh", "with", "reason", "seconds a step", "bytes a device")
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in plan.search.counts)
    outcomes = f'<p class="soft">Candidates by outcome: {escape(counts)}.</p>' if counts else ""
    return outcomes + table(rows, head, right={3, 4})


# --------------------------------------------------------------------------------------------------
# A plan on its machine as one picture: an SVG file with the figures, the links with their mesh
# axes, and the step.

_MARGIN, _TOP, _LANES = 24, 146, 6


def plan_svg(plan: Plan, topology: Topology) -> str:
    """The picture of a plan, a complete SVG document without scripts; nothing is fetched."""
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
    shapes, y = _overview_head(plan), float(_TOP)
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


def _overview_head(plan: Plan) -> list[str]:
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
