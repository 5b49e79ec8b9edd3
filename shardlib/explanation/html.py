"""How does a plan look in a browser? One HTML file with inline SVG, no scripts and nothing to
fetch.

The figures and sentences are those of `shardlib.planning.text`; only the form differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape

from shardlib.hardware.topology import Topology
from shardlib.planning.answers.shadow_prices import SHOCK_HEAD, break_text, price_row, shock_row
from shardlib.planning.plan import Plan
from shardlib.planning.questions.questions import Answers
from shardlib.planning.text.decision_lines import decision_lines
from shardlib.planning.text.explain import TRIAL_HEAD, trial_rows, usable_bytes
from shardlib.planning.text.figures import LABELS, collective_rows
from shardlib.planning.text.parameters import parameter_rows
from shardlib.planning.text.reasons import reasons
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)

#: Colours that can be told apart on white and on black, also by people who see no red or green
#: (Okabe and Ito, 2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b2a000")
_SPARE = "var(--faint)"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #6b6b70; --page: #ffffff; --faint: #e6e6ea; --line: #d8d8dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --soft: #a0a0a8; --page: #141416; --faint: #2c2c31; --line: #3a3a40; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.soft { color: var(--soft); } code, td.mono { font-family: ui-monospace, monospace; font-size: 0.9em; }
.figures { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; margin: 1rem 0; }
.figures b { display: block; font-size: 1.5rem; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } .right { text-align: right; }
svg { width: 100%; height: 2.2rem; display: block; border-radius: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.5rem; margin-top: 0.4rem; } .legend i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.4em; }
"""

#: (label, size, size in words)
_Part = tuple[str, float, str]


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
        *_section("Decisions", _table([[label, text] for label, text in decision_lines(plan)])),
        *_section(
            "Why",
            "<ul>"
            + "".join(f"<li>{escape(reason)}</li>" for reason in reasons(plan, hbm_bytes))
            + "</ul>",
        ),
        *_section(
            "What the compiler said",
            (
                _table(trial_rows(plan.refined), TRIAL_HEAD, right={1, 2, 3, 4})
                if plan.refined
                else ""
            ),
        ),
        *_section("Time of a step", _bar(_time_parts(plan))),
        *_section("Memory of a device", _bar(_memory_parts(plan, hbm_bytes))),
        *_section("Collectives", _collectives(plan)),
        *_section("Parameters", _parameters(plan)),
        *_section(
            "Findings", "".join(f"<p>{escape(str(finding))}</p>" for finding in plan.findings)
        ),
        *_section("Rejected", _rejected(plan)),
        *_answers(answers or Answers()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{title}</h2>", content] if content else []


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
        sections += _section(
            "Alternatives",
            _table(rows, ("a step", "time", "a device", "mesh", "with"), right={0, 1, 2}),
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
        sections += _section(
            "What holds the plan back",
            held
            + (_table(steps, ("a step", "lacking", "mesh", "with"), right={0, 1}) if steps else ""),
        )
    if found.sensitivity is not None:
        sections += _section(
            "What more would buy",
            _table(
                [list(price_row(one)) for one in found.sensitivity.prices],
                ("", "now", "one more", "saves a step"),
                right={1, 2, 3},
            )
            + "<ul>"
            + "".join(f"<li>{escape(break_text(one))}</li>" for one in found.sensitivity.prices)
            + "</ul>",
        )
        sections += _section(
            "If a figure is lower than thought",
            _table(
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


def _time_parts(plan: Plan) -> list[_Part]:
    seconds = plan.estimate.seconds
    return [
        (
            LABELS.get(f.name, f.name),
            getattr(seconds, f.name),
            seconds_text(getattr(seconds, f.name)),
        )
        for f in fields(seconds)
    ]


def _memory_parts(plan: Plan, hbm_bytes: float | None) -> list[_Part]:
    parts = plan.estimate.device_bytes
    rows = [
        (f.name, float(getattr(parts, f.name)), bytes_text(getattr(parts, f.name)))
        for f in fields(parts)
    ]
    spare = (hbm_bytes or 0) - parts.peak
    return [*rows, ("spare", spare, bytes_text(spare))] if spare > 0 else rows


def _bar(parts: Sequence[_Part]) -> str:
    """A stacked bar with its legend; the widths are per mille of the whole."""
    coloured = [
        (label, size, text, _SPARE if label == "spare" else _COLOURS[i % len(_COLOURS)])
        for i, (label, size, text) in enumerate(parts)
        if size > 0
    ]
    whole = sum(size for _, size, _, _ in coloured) or 1.0
    start, shapes = 0.0, []
    for label, size, text, colour in coloured:
        width = 1000 * size / whole
        shapes.append(
            f'<rect x="{start:.2f}" y="0" width="{width:.2f}" height="10" style="fill: {colour}">'
            f"<title>{escape(label)}: {text} ({percent_text(size / whole)})</title></rect>"
        )
        start += width
    legend = "".join(
        f'<span><i style="background: {colour}"></i>{escape(label)} {text} <span'
        f' class="soft">{percent_text(size / whole)}</span></span>'
        for label, size, text, colour in coloured
    )
    return (
        '<svg viewBox="0 0 1000 10" preserveAspectRatio="none"'
        f' role="img">{"".join(shapes)}</svg>\n<div class="legend">{legend}</div>'
    )


def _table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, right: Iterable[int] = ()
) -> str:
    aligned_right = set(right)

    def row(cells: Sequence[str], tag: str) -> str:
        marks = (' class="right"' if i in aligned_right else "" for i in range(len(cells)))
        return (
            "<tr>"
            + "".join(
                f"<{tag}{mark}>{escape(cell)}</{tag}>"
                for cell, mark in zip(cells, marks, strict=True)
            )
            + "</tr>"
        )

    return (
        '<div class="wide"><table>\n'
        + "\n".join([*([row(head, "th")] if head else []), *(row(cells, "td") for cells in rows)])
        + "\n</table></div>"
    )


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
        _table(rows, ("over", "kind", "count", "bytes", "time", "mostly for"), right={2, 3, 4})
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
        _table(rows, ("parameter", "how many", "bytes", "at rest", "in compute"), right={1, 2})
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
        _table(rows, ("mesh", "with", "reason", "seconds a step", "bytes a device"), right={3, 4})
        if rows
        else ""
    )
