"""The colour of every factor of every op: that of the dims that the factor is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from shardlib.axes import LogicalAxes
from shardlib.graph import Graph, Op


def all_factor_colours(
    graph: Graph, names: tuple[LogicalAxes, ...], weights: Set[int]
) -> tuple[LogicalAxes, ...]:
    """Colour of every factor of every op.

    A mesh axis shards one dim of a value. Where two dims of a weight have one colour (the matrix of
    a recurrence, [embed, embed]), it is the first; ops that read the weight, or make its gradient,
    have it where it lies, and their other factor of that colour is not sharded.
    """
    turned = {
        value: op
        for op in graph.ops
        if op.kind == "transpose"
        for value in (*op.operands, *op.results)
        if value in weights
    }
    return tuple(
        _where_weights_lie(op, factor_colours(op, names), names, weights, turned)
        for op in graph.ops
    )


def _where_weights_lie(
    op: Op,
    colours: LogicalAxes,
    names: tuple[LogicalAxes, ...],
    weights: Set[int],
    turned: Mapping[int, Op],
) -> LogicalAxes:
    twice = {
        colour for colour, count in Counter(colours).items() if colour is not None and count > 1
    }
    if not twice or op.category != "matmul":
        return colours
    for value, dims in (
        *zip(op.operands, op.rule.operands, strict=True),
        *zip(op.results, op.rule.results, strict=True),
    ):
        if value not in weights:
            continue
        order = _order(value, turned.get(value), len(dims))
        for colour in twice:
            lying = [op.rule.major(dims[dim]) for dim in order if names[value][dim] == colour]
            if len(lying) > 1:
                colours = tuple(
                    None if factor_colour == colour and factor != lying[0] else factor_colour
                    for factor, factor_colour in enumerate(colours)
                )
    return colours


def _order(value: int, turn: Op | None, rank: int) -> Sequence[int]:
    """The dims of a form of a parameter, in the order of the parameter's own."""
    if turn is None:
        return range(rank)
    (before,), (after,) = turn.rule.operands, turn.rule.results
    form_dims, parameter_dims = (before, after) if value in turn.operands else (after, before)
    return [form_dims.index(factors) for factors in parameter_dims]


def factor_colours(op: Op, names: tuple[LogicalAxes, ...]) -> LogicalAxes:
    """Colour of every factor of an op: the colour of a dim of which it is the major factor.

    Returns:
        One per factor; None where no dim has a colour.
    """
    result: list[str | None] = [None] * len(op.rule.sizes)
    for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                major = op.rule.major(factors)
                if major is not None and result[major] is None:
                    result[major] = names[value][dim]
    return tuple(result)
