"""Web pages of a plan: one plan, two side by side, and one as a picture on its machine.

The figures and sentences of a page are those of the text; only the form differs. Without the script
everything but the landscape of plans and the arrays as grids is there.
"""

from __future__ import annotations

import math
import tempfile
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlib.collective import Collective
from shardlib.cost.roofline import fitting_bytes
from shardlib.errors import ArgumentError, MissingFileError, PlanError, TopologyError
from shardlib.graph import ITEMSIZE
from shardlib.machines.topology import Topology
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
from shardlib.planner.plan import Plan
from shardlib.planner.stored import together
from shardlib.report.changes import change
from shardlib.report.elements import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.report.markup import WIDTH, Picture, render
from shardlib.report.panels import (
    causes,
    lane_rows,
    machine_picture,
    memory_legend,
    memory_picture,
    memory_rows,
    moved,
    page_data,
    roofline_picture,
    step_picture,
)
from shardlib.report.text import (
    TRIAL_HEAD,
    CollectiveRow,
    decision_lines,
    notation,
    parameter_rows,
    reasons,
    trial_rows,
)
from shardlib.report.timelines import Timeline, predicted
from shardlib.schedules import named


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
        machine=drawn,
        links=links,
        step=step_picture(plan),
        lanes=lane_rows(plan),
        timeline=_pipeline(plan),
        most_slices=_MOST_SLICES,
        memory=memory_picture(parts, usable),
        memory_legend=memory_legend(parts),
        live_at_peak=memory_rows(parts),
        landscape=_landscape_rows(plan),
        evidence=[evidence_head(sources), *evidence_rows(sources)],
        trials=trial_rows(plan.refined) if plan.refined else (),
        trial_head=TRIAL_HEAD,
        collectives=collectives,
        parameters=rows,
        activations=_activations(plan, [row for row, _, _ in collectives]),
        together=together,
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
        (seconds_text(estimate.step_seconds), "a step"),
        (count_text(estimate.tokens_per_second), "tokens/s"),
        (percent_text(estimate.mfu), "MFU"),
        (bytes_text(estimate.device_bytes.peak), "a device"),
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
        raise PlanError(f"the mesh {plan.mesh} has no place on {topology.name}")
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
