"""A value as a card in a notebook: a heading, bars, a table, and its whole text behind a click.

One string of HTML with its own styles and nothing from elsewhere; light or dark as the page is.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardlib.planning.units.html_elements import Part, bar, table

_STYLE = (
    ".shardlib-card{font:13px/1.5 system-ui,sans-serif;border:1px solid #8886;border-radius:8px;"
    "padding:10px 14px;max-width:860px;--faint:#8884}"
    ".shardlib-card h4{margin:0 0 2px;font-size:15px}"
    ".shardlib-card h5{margin:10px 0 3px;font-size:12px;font-weight:600;opacity:.75}"
    ".shardlib-card p{margin:0;opacity:.85}"
    ".shardlib-card svg{width:100%;height:14px;border-radius:3px;display:block}"
    ".shardlib-card .legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px}"
    ".shardlib-card .legend i{display:inline-block;width:9px;height:9px;border-radius:2px;"
    "margin-right:5px}"
    ".shardlib-card .soft{opacity:.7}"
    ".shardlib-card table{border-collapse:collapse;font-size:12px;background:none}"
    ".shardlib-card td,.shardlib-card th{padding:1px 14px 1px 0;text-align:left;"
    "vertical-align:top;background:none}"
    ".shardlib-card .right{text-align:right}"
    ".shardlib-card details{margin-top:8px;overflow-x:auto}"
    ".shardlib-card summary{cursor:pointer;font-size:12px}"
    ".shardlib-card pre{font-size:11px;line-height:1.35;overflow-x:auto;background:none}"
)


def card(
    title: str,
    lines: Sequence[str] = (),
    *,
    bars: Sequence[tuple[str, Sequence[Part]]] = (),
    rows: Sequence[Sequence[str]] = (),
    head: Sequence[str] = (),
    text: str = "",
    drawn: tuple[str, str] = ("", ""),
) -> str:
    """A card."""
    body = [f"<h4>{escape(title)}</h4>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for heading, parts in bars:
        body += [f"<h5>{escape(heading)}</h5>", bar(parts)]
    if rows:
        body.append(table(rows, head))
    if text:
        body.append(f"<details><summary>all of it</summary><pre>{escape(text)}</pre></details>")
    if drawn[1]:
        summary = f"<summary>{escape(drawn[0])}</summary>"
        body.append(f"<details>{summary}{drawn[1]}</details>")
    return f'<div class="shardlib-card"><style>{_STYLE}</style>\n' + "\n".join(body) + "\n</div>"


def short(name: str, *words: str) -> str:
    """One line for a value: its class, and what matters of it.

    >>> short("Plan", "demo on cpu:8", "data=8")
    '<Plan demo on cpu:8, data=8>'

    Args:
        name: of the class.
        words: what matters.
    """
    return f"<{name} {', '.join(word for word in words if word)}>"
