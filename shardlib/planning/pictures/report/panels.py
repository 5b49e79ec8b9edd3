"""Parts of a page that its script fills: the landscape of plans, and arrays as grids."""

from __future__ import annotations

from shardlib.planning.plan import Plan
from shardlib.planning.units.html_elements import table
from shardlib.planning.units.quantity import bytes_text, seconds_text


def landscape_panel(plan: Plan) -> str:
    """The place of the landscape, with its points as a table; empty without any."""
    points = plan.search.landscape
    if len(points) < 2:
        return ""
    rows = [
        (
            seconds_text(point.step_seconds),
            bytes_text(point.peak_bytes),
            "yes" if point.fits else "no",
            str(point.mesh),
            ", ".join(f"{word.replace('_', ' ')} {value}" for word, value in point.decided),
        )
        for point in points
    ]
    head = ("a step", "a device", "fits", "mesh", "other decisions")
    search = plan.search
    note = (
        f"{len(points)} of the {search.evaluations:,} plans that were priced, spread over time and"
        f" memory; the dotted line joins those that need less memory than every faster one."
        f" {search.candidates:,} plans are in the space: a bound says of those that were not"
        " priced that they are no faster than the chosen one."
    )
    return (
        '<div class="controls"><label for="landscape-colour">colour by'
        '<select id="landscape-colour"></select></label></div>'
        '<figure><div id="landscape-picture"></div>'
        '<div class="legend" id="landscape-legend"></div>'
        f'<figcaption class="soft">{note}</figcaption></figure>'
        '<p class="panel" id="landscape-panel" role="status">Point at a plan, or go through them'
        " with the arrow keys; a click or Enter compares it with the chosen one.</p>"
        '<div id="landscape-compared" aria-live="polite"></div>'
        f"<details><summary>as a table</summary>{table(rows, head, right={0, 1})}</details>"
    )


def array_panel(present: bool) -> str:
    """The place of arrays as grids; empty where a plan has none."""
    if not present:
        return ""
    return (
        '<div class="controls"><label for="array-choose">array'
        '<select id="array-choose"></select></label>'
        '<div id="array-forms" role="group" aria-label="form of the array" class="controls"></div>'
        '</div><div class="controls" id="array-device" role="group"'
        ' aria-label="place of the device"></div>'
        '<figure><div id="array-picture"></div></figure>'
        '<p class="panel" id="array-panel" role="status"></p>'
    )
