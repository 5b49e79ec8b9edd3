"""A comparison as a web page: one HTML file with its picture, no scripts and nothing to fetch."""

from __future__ import annotations

from html import escape

from shardlib.booking.comparison import HEAD, Comparison
from shardlib.booking.picture import comparison_svg
from shardlib.planning.pictures.style_sheets import style
from shardlib.planning.units.html_elements import section, table


def comparison_html(comparison: Comparison) -> str:
    """Returns one self-contained HTML page about a comparison."""
    proofs = "".join(
        f"<li><b>{escape(family.family)}</b>: {escape(family.certificate)}.</li>"
        for family in comparison.families
    )
    rows = [list(row) for row in comparison.rows()]
    body = [
        f"<h1>{escape(comparison.title)}</h1>",
        comparison_svg(comparison),
        *section("In time", table(rows, list(HEAD), right=set(range(2, len(HEAD) - 1)))),
        *section("What is proven, and what was tried", f"<ul>{proofs}</ul>"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.title)}</title>\n<style>{style('report.css')}"
        "svg { width: 100%; max-width: 60rem; height: auto }</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )
