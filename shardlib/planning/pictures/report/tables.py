"""Collectives, parameters and activations as tables that link to each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape

from shardlib.graph.graph import ITEMSIZE
from shardlib.planning.decisions.activation_layout import ActivationLayout, Move, together
from shardlib.planning.pictures.report.links import causes, moved
from shardlib.planning.plan import Plan
from shardlib.planning.text.figures import CollectiveRow
from shardlib.planning.text.parameters import ParameterRow, notation
from shardlib.planning.units.quantity import bytes_text, seconds_text

#: Of a cell whose text may be broken.
_LONG = ' class="long"'


def collective_table(plan: Plan, rows: Sequence[ParameterRow]) -> str:
    """The kinds of collectives of a step, with links to what they move; empty without any."""
    linked = causes(plan, rows)
    if not linked:
        return ""
    head = ("over", "kind", "count", "bytes", "time", "mostly for", "moves")
    lines = [_heads(head, {2, 3, 4})]
    for number, (row, parameters) in enumerate(linked):
        cells = [
            "·".join(row.axes),
            row.kind,
            f"{row.count:,}",
            bytes_text(row.bytes),
            seconds_text(row.seconds),
            row.cause,
        ]
        links = [
            *(_link(f"parameter-{p}", rows[p].pattern) for p in parameters),
            *(_link(f"activation-{a}", plan.activations[a].name) for a in moved(plan, row)),
        ]
        lines.append(
            f'<tr id="collective-{number}">{_cells(cells, {2, 3, 4})}<td class="long">'
            f"{'; '.join(links)}</td></tr>"
        )
    note = (
        '<p class="soft">Gathers name their parameter; reductions of gradients belong to the'
        " parameters whose gradient has as many bytes. Activations are all that collectives of this"
        " kind over these axes move.</p>"
    )
    return _table(lines) + note


def parameter_table(plan: Plan, rows: Sequence[ParameterRow]) -> str:
    """The parameters, with links to their collectives; empty without any."""
    if not rows:
        return ""
    linked = causes(plan, rows)
    head = ("parameter", "", "how many", "bytes", "stored", "in compute", "collectives")
    lines = [_heads(head, {2, 3})]
    for number, row in enumerate(rows):
        name = row.pattern + ("" if row.example.trained else f" ({row.example.role})")
        cells = [f"{row.count:,}", bytes_text(row.bytes), row.rest, row.compute]
        links = ", ".join(
            _collective(c, row)
            for c, (row, parameters) in enumerate(linked)
            if number in parameters
        )
        lines.append(
            f'<tr id="parameter-{number}"><td>{escape(name)}</td>{_button(number, row.pattern)}'
            f'{_cells(cells, {0, 1}, {2, 3})}<td class="long">{links}</td></tr>'
        )
    return _table(lines)


def activation_table(plan: Plan, before: int) -> str:
    """The main activations, with links to their collectives; empty without any."""
    if not plan.activations:
        return ""
    linked = causes(plan, ())
    head = ("activation", "", "how many", "bytes", "held", "moved by")
    lines = [_heads(head, {2, 3})]
    for number, activation in enumerate(plan.activations):
        cells = [f"{activation.count:,}", bytes_text(_bytes(activation)), _layout(activation)]
        moves = "; ".join(
            _collective_of(move, [row for row, _ in linked]) for move in activation.moves
        )
        lines.append(
            f'<tr id="activation-{number}"><td class="long">{escape(activation.name)}</td>'
            f"{_button(before + number, activation.name)}{_cells(cells, {0, 1}, {2})}"
            f'<td class="long">{moves}</td></tr>'
        )
    note = (
        '<p class="soft">Of the whole batch, each once; of the forward and the backward pass. Of'
        " the gradients those that are moved.</p>"
    )
    return _table(lines) + note


def _collective_of(move: Move, rows: Sequence[CollectiveRow]) -> str:
    """What happens to an activation, with a link to the collective: "all-gather over tensor for
    layers.mlp.up".
    """
    words = f"{move.kind} over {'·'.join(move.axes)}"
    number = next(
        (i for i, row in enumerate(rows) if (row.kind, row.axes) == (move.kind, move.axes)), None
    )
    link = escape(words) if number is None else _link(f"collective-{number}", words)
    return f"{link} {'after' if move.before else 'for'} {escape(together(move.of))}"


def _bytes(activation: ActivationLayout) -> int:
    return math.prod(activation.shape) * ITEMSIZE.get(activation.dtype, 4)


def _layout(activation: ActivationLayout) -> str:
    return notation(activation.colours, activation.shape, activation.held)


def _link(target: str, text: str) -> str:
    return f'<a href="#{target}">{escape(text)}</a>'


def _collective(number: int, row: CollectiveRow) -> str:
    return _link(f"collective-{number}", f"{row.kind} over {'·'.join(row.axes)}")


def _button(number: int, name: str) -> str:
    return (
        f'<td><button type="button" data-array="{number}">show'
        f'<span class="skip"> {escape(name)} as a grid</span></button></td>'
    )


def _table(lines: Sequence[str]) -> str:
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _heads(heads: Sequence[str], right: set[int]) -> str:
    cells = "".join(
        f'<th scope="col"{_right(i, right)}>{escape(text)}</th>' if text else "<td></td>"
        for i, text in enumerate(heads)
    )
    return f"<tr>{cells}</tr>"


def _cells(cells: Sequence[str], right: Collection[int], wraps: Collection[int] = ()) -> str:
    return "".join(
        f"<td{_LONG if i in wraps else _right(i, right)}>{escape(cell)}</td>"
        for i, cell in enumerate(cells)
    )


def _right(index: int, right: Collection[int]) -> str:
    return ' class="right"' if index in right else ""
