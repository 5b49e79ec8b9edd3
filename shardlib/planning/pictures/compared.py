"""Two plans side by side as a web page: what differs, and the bars and the machine of each."""

from __future__ import annotations

from html import escape

from shardlib.errors import MissingFileError, TopologyError
from shardlib.hardware.topology import topology
from shardlib.planning.pictures.report.machine import machine_picture
from shardlib.planning.pictures.report.step import step_picture
from shardlib.planning.pictures.style_sheets import style
from shardlib.planning.plan import Plan
from shardlib.planning.text.change import change
from shardlib.planning.units.html_elements import section, table


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
        body += section(f"{name}: the machine", _machine(plan))
        body += section(f"{name}: the step", f"<figure>{step_picture(plan)}</figure>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(changed.title)}</title>\n<style>{style('report.css')}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def _machine(plan: Plan) -> str:
    try:
        drawn, _ = machine_picture(plan.mesh, topology(plan.topology), plan.axis_order)
    except (TopologyError, MissingFileError):
        return ""
    return f"<figure>{drawn}</figure>" if drawn else ""
