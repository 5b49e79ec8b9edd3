"""A plan as a web page: one HTML file with inline SVG, no scripts and nothing to fetch.

The figures and sentences are those of `shardlib.planning.text`; only the form differs.
"""

from __future__ import annotations

from dataclasses import fields
from html import escape

from shardlib.explanation.style_sheets import style
from shardlib.hardware.topology import Topology
from shardlib.planning.answers.shadow_prices import SHOCK_HEAD, break_text, price_row, shock_row
from shardlib.planning.plan import Plan
from shardlib.planning.questions.questions import Answers
from shardlib.planning.text.decision_lines import decision_lines
from shardlib.planning.text.explain import TRIAL_HEAD, trial_rows, usable_bytes
from shardlib.planning.text.figures import LABELS, collective_rows, spare_rows
from shardlib.planning.text.parameters import parameter_rows
from shardlib.planning.text.reasons import reasons
from shardlib.planning.units.html_elements import Part, bar, section, table
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)


def html_report(
    plan: Plan, *, topology: Topology | None = None, answers: Answers | None = None
) -> str:
    """Returns one self-contained HTML page about a plan.

    Args:
        plan: the plan.
        topology: the machine it is for; None looks it up by the plan's spelling of it.
        answers: to questions that were asked about it.
    """
    title = f"{plan.model} on {plan.topology}"
    hbm_bytes = usable_bytes(plan, topology)
    body = [
        f"<h1>{escape(title)}</h1>",
        (
            f'<p class="soft">{plan.mesh.devices} devices, mesh {escape(str(plan.mesh))}, plan'
            f" <code>{plan.digest}</code></p>"
        ),
        _figures(plan),
        *section("Decisions", table([[label, text] for label, text in decision_lines(plan)])),
        *section(
            "Why",
            "<ul>"
            + "".join(f"<li>{escape(reason)}</li>" for reason in reasons(plan, hbm_bytes))
            + "</ul>",
        ),
        *section(
            "What the compiler said",
            (
                table(trial_rows(plan.refined), TRIAL_HEAD, right={1, 2, 3, 4})
                if plan.refined
                else ""
            ),
        ),
        *section("Time of a step", bar(_time_parts(plan))),
        *section("Memory of a device", bar(_memory_parts(plan, hbm_bytes))),
        *section("Collectives", _collectives(plan)),
        *section("Parameters", _parameters(plan)),
        *section(
            "Findings", "".join(f"<p>{escape(str(finding))}</p>" for finding in plan.findings)
        ),
        *section("Rejected", _rejected(plan)),
        *_answers(answers or Answers()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{style('report.css')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _answers(found: Answers) -> list[str]:
    sections: list[str] = []
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
        sections += section(
            "Alternatives",
            table(rows, ("a step", "time", "a device", "mesh", "with"), right={0, 1, 2}),
        )
    if found.constraints is not None:
        held = (
            "<ul>"
            + "".join(f"<li>{escape(one.message)}</li>" for one in found.constraints.binding)
            + "</ul>"
            if found.constraints.binding
            else "<p>Nothing.</p>"
        )
        steps = [
            [
                seconds_text(one.step_seconds),
                bytes_text(one.short_bytes),
                str(one.mesh),
                one.summary,
            ]
            for one in found.constraints.staircase
        ]
        sections += section(
            "What holds the plan back",
            held
            + (table(steps, ("a step", "lacking", "mesh", "with"), right={0, 1}) if steps else ""),
        )
    if found.sensitivity is not None:
        sections += section(
            "What more would buy",
            table(
                [list(price_row(one)) for one in found.sensitivity.prices],
                ("", "now", "one more", "saves a step"),
                right={1, 2, 3},
            )
            + "<ul>"
            + "".join(f"<li>{escape(break_text(one))}</li>" for one in found.sensitivity.prices)
            + "</ul>",
        )
        sections += section(
            "If a figure is lower than thought",
            table(
                [list(shock_row(one)) for one in found.sensitivity.shocks],
                SHOCK_HEAD,
                right={1, 2, 3},
            ),
        )
    return sections


def _figures(plan: Plan) -> str:
    estimate = plan.estimate
    figures = [
        (seconds_text(estimate.step_seconds), "a step"),
        (count_text(estimate.tokens_per_second), "tokens/s"),
        (percent_text(estimate.mfu), "MFU"),
        (bytes_text(estimate.device_bytes.peak), "a device"),
    ]
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{value}</b>{label}</div>" for value, label in figures)
        + "</div>"
    )


def _time_parts(plan: Plan) -> list[Part]:
    seconds = plan.estimate.seconds
    return [
        (
            LABELS.get(f.name, f.name),
            getattr(seconds, f.name),
            seconds_text(getattr(seconds, f.name)),
        )
        for f in fields(seconds)
    ]


def _memory_parts(plan: Plan, hbm_bytes: float | None) -> list[Part]:
    parts = plan.estimate.device_bytes
    rows = [
        (f.name, float(getattr(parts, f.name)), bytes_text(getattr(parts, f.name)))
        for f in fields(parts)
    ]
    return [*rows, *spare_rows(plan.estimate, hbm_bytes)] if hbm_bytes else rows


def _collectives(plan: Plan) -> str:
    rows = [
        [
            "·".join(r.axes),
            r.kind,
            f"{r.count:,}",
            bytes_text(r.bytes),
            seconds_text(r.seconds),
            r.cause,
        ]
        for r in collective_rows(plan.estimate.collectives)
    ]
    return (
        table(rows, ("over", "kind", "count", "bytes", "time", "mostly for"), right={2, 3, 4})
        if rows
        else ""
    )


def _parameters(plan: Plan) -> str:
    rows = [
        [
            r.pattern + ("" if r.example.trained else f" ({r.example.role})"),
            f"{r.count:,}",
            bytes_text(r.bytes),
            r.rest,
            r.compute,
        ]
        for r in parameter_rows(plan.parameters)
    ]
    return (
        table(rows, ("parameter", "how many", "bytes", "stored", "in compute"), right={1, 2})
        if rows
        else ""
    )


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
    return (
        table(rows, ("mesh", "with", "reason", "seconds a step", "bytes a device"), right={3, 4})
        if rows
        else ""
    )
