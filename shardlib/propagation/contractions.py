"""Layouts of the operands of a contraction while it runs, and the layout constraints of a graph.

The layouts that the rules give to the operands of a contraction may conflict: of a square weight
[a, b] with both colours on `tensor`, the rules shard one dim, while the activation and the result
are sharded along the other index as well. XLA's partitioner is free to resolve that, and some of
its ways give wrong numbers (`tests/lowering/test_partitioner.py`). So the layout *of the operation*
is chosen here: every mesh axis shards at most one index of it, in all operands and in the result.
Such a contraction is local products and one sum, forward and backward; reshards happen before and
after it.

>>> rule = FactorRule(
...     sizes=(8, 4, 16), operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),),
...     summed=frozenset({1}),
... )
>>> batch, tensor = ("data",), ("tensor",)
>>> layouts = Layout(batch, tensor), Layout(tensor, ()), Layout(batch, tensor)
>>> print(*consistent_layouts(rule, layouts))
[data, tensor] [tensor, -] [data, -]

`divided_heads` says how attention heads are distributed over devices that shard another dim. An
attention kernel needs the whole sequence and the whole width of its heads. If neither queries nor
keys are sharded by heads, the devices that shard their sequence or width exchange these for heads
(arXiv:2309.14509): those of queries, and those of keys and values as well if there are enough. With
fewer groups of keys than devices, every device gathers all groups and uses the one of its queries.

>>> divided_heads(heads=32, groups=8, devices=4), divided_heads(heads=128, groups=8, devices=16)
('all', 'queries')
>>> divided_heads(heads=12, groups=12, devices=8)
'none'
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from shardlib.graph import FactorRule, Graph, Op, input_source
from shardlib.layout import Layout, LogicalAxes, MeshShape, Rules
from shardlib.propagation.colours import factor_colours

#: Categories of the operations with contracted indices.
CONTRACTIONS: frozenset[str] = frozenset({"matmul", "convolution"})


def consistent_layouts(
    rule: FactorRule, layouts: Sequence[Layout], preferred: Layout | None = None
) -> tuple[Layout, ...]:
    """The layouts of operands and results of one operation in which every mesh axis shards one
    index.

    An axis stays on the index that it shards in most of the values; in a tie, on the one that the
    rules prefer, or else on the first.
    """
    all_indices = tuple(
        tuple(rule.major(dim) for dim in dims) for dims in (*rule.operands, *rule.results)
    )
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    orders: dict[int, list[tuple[str, ...]]] = defaultdict(list)
    for indices, layout in zip(all_indices, layouts, strict=True):
        for index, axes in zip(indices, layout, strict=True):
            if index is not None and index not in rule.whole and axes:
                orders[index].append(axes)
                for axis in axes:
                    votes[axis][index] += 1

    def rank(axis: str, index: int) -> tuple[int, bool, int]:
        return votes[axis][index], preferred is not None and axis in preferred[index], -index

    winner = {
        axis: max(indices, key=lambda index: rank(axis, index)) for axis, indices in votes.items()
    }
    axes_of_index = {
        index: tuple(
            axis
            for axis in dict.fromkeys(
                axis for axes in sorted(votes_of_index, key=len, reverse=True) for axis in axes
            )
            if winner[axis] == index
        )
        for index, votes_of_index in orders.items()
    }
    return tuple(
        Layout(*(() if index is None else axes_of_index.get(index, ()) for index in indices))
        for indices in all_indices
    )


def operand_layouts(
    graph: Graph, colours: tuple[LogicalAxes, ...], rules: Rules, mesh: MeshShape
) -> Mapping[tuple[str, int], Layout]:
    """The layouts in which the contractions of a graph run.

    Returns:
        Keys of `use_key` -> layout, for every operand and then for the result; and keys of
        `gather_key`, for operands that are gathered.
    """
    layouts_by_key: dict[tuple[str, int], Layout] = {}
    for op in graph.ops:
        if op.category in CONTRACTIONS and len(op.results) == 1:
            values = (*op.operands, *op.results)
            layouts = [
                rules.resolve(colours[value], graph.values[value].shape, mesh).layout
                for value in values
            ]
            for position, layout in enumerate(
                consistent_layouts(
                    op.rule,
                    layouts,
                    rules.resolve(index_colours(op, colours), op.rule.sizes, mesh).layout,
                )
            ):
                layouts_by_key[use_key(op.path, position)] = _fitting(
                    layout, graph.values[values[position]].shape, mesh
                )
                if position < len(op.operands) and not layouts[position].axes <= layout.axes:
                    layouts_by_key[gather_key(op.path, position)] = layouts[position]
    return layouts_by_key


def layouts_from_inputs(
    graph: Graph, inputs: Sequence[Layout], mesh: MeshShape
) -> Mapping[tuple[str, int], Layout]:
    """As `operand_layouts` for a graph without colours: layouts are propagated from the inputs
    along the indices of the operations.
    """
    layouts_by_key: dict[tuple[str, int], Layout] = {}
    layouts_by_value: dict[int, Layout] = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        values = (*op.operands, *op.results)
        shapes = [graph.values[value].shape for value in values]
        layouts = consistent_layouts(
            op.rule,
            [
                layouts_by_value[value]
                if value in layouts_by_value and value in op.operands
                else Layout.replicated(len(shape))
                for value, shape in zip(values, shapes, strict=True)
            ],
        )
        fitting = [
            _fitting(layout, shape, mesh) for layout, shape in zip(layouts, shapes, strict=True)
        ]
        layouts_by_value.update(zip(op.results, fitting[len(op.operands) :], strict=True))
        if op.category in CONTRACTIONS and len(op.results) == 1:
            layouts_by_key.update(
                {use_key(op.path, position): layout for position, layout in enumerate(fitting)}
            )
    return layouts_by_key


def _fitting(layout: Layout, shape: Sequence[int], mesh: MeshShape) -> Layout:
    """A layout without the axes whose size does not divide a dim."""
    return Layout(
        *(
            axes if size % mesh.ways(axes) == 0 else ()
            for axes, size in zip(layout, shape, strict=True)
        )
    )


def use_key(path: str, number: int) -> tuple[str, int]:
    """The key of the layout of an operand (or after the operands, of the result) while a
    contraction runs.
    """
    return f"{path}/in use", number


def gather_key(path: str, number: int) -> tuple[str, int]:
    """The key of the layout of an operand before it is gathered for a contraction."""
    return f"{path}/arriving", number


def gradient_key(path: str) -> tuple[str, int]:
    """The key of the layout of the incoming gradient of a contraction's result, if it differs from
    that of the result.
    """
    return f"{path}/returned", 0


def index_colours(op: Op, colours: tuple[LogicalAxes, ...]) -> LogicalAxes:
    """Colour of every index of an op that may be sharded, see `factor_colours`; None if it has no
    colour or must stay unsharded.
    """
    return tuple(
        None if factor in op.rule.whole else colour
        for factor, colour in enumerate(factor_colours(op, colours))
    )


#: Heads that are distributed over devices: those of queries, keys and values, of queries alone, or
#: none.
DividedHeads = Literal["all", "queries", "none"]


def divided_heads(*, heads: int, groups: int, devices: int) -> DividedHeads:
    """The heads that can be distributed over devices."""
    if heads % devices:
        return "none"
    if groups % devices == 0:
        return "all"
    return "queries" if (heads // groups) % (heads // devices) == 0 else "none"


# --------------------------------------------------------------------------------------------------
# The places where the lowering constrains the layout of an activation.
#
# Constraints are placed where the layout could otherwise drift: on the results of matmuls,
# convolutions and gathers, on the carry of every loop, and on the operands of contractions, in the
# layouts in which they run. An operand that a contraction gathers is also constrained before the
# gather: otherwise XLA's partitioner makes it gathered from the start, and a layer without
# rematerialisation would save it gathered for its backward pass (for a sequence sharded over
# tensor: the bytes times the size of the axis). All other values follow by propagation in XLA.

_CONSTRAINED: frozenset[str] = frozenset({"matmul", "convolution", "gather"})


def layout_constraints(
    graph: Graph,
    colours: tuple[LogicalAxes, ...],
    rules: Rules,
    mesh: MeshShape,
    batch: str | None,
    operands: Mapping[tuple[str, int], tuple[str, int]] | None = None,
) -> Mapping[tuple[str, int], Layout]:
    """Layout constraints of a forward graph.

    Args:
        operands: more values whose layouts lowering needs: key in the result -> (path, index) of
            the op that makes them.

    Returns:
        (path of the equation, index of the result) -> layout; for the carry of a loop, the path of
        the boundary op; for operands of contractions, the keys of `use_key`.
    """
    layouts: dict[tuple[str, int], Layout] = dict(operand_layouts(graph, colours, rules, mesh))
    gathered = _gathered(graph, colours, rules, mesh, layouts)
    keys_by_source: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for key, source in (operands or {}).items():
        keys_by_source.setdefault(source, []).append(key)
    for number, value in enumerate(graph.inputs):
        for key in keys_by_source.get(input_source(number), ()):
            layouts[key] = rules.resolve(colours[value], graph.values[value].shape, mesh).layout
    for op in graph.ops:
        for position, value in enumerate(op.results):
            for key in keys_by_source.get((op.path, position), ()):
                layouts[key] = rules.resolve(colours[value], graph.values[value].shape, mesh).layout
        constrained = op.category in _CONSTRAINED or op.kind == "carry"
        for position, value in enumerate(op.results):
            if not constrained and value not in gathered:
                continue
            axes = colours[value]
            if batch is not None and batch in axes:
                layouts[op.path, position] = rules.resolve(
                    axes, graph.values[value].shape, mesh
                ).layout
    return layouts


def _gathered(
    graph: Graph,
    colours: tuple[LogicalAxes, ...],
    rules: Rules,
    mesh: MeshShape,
    operands: Mapping[tuple[str, int], Layout],
) -> frozenset[int]:
    """The sharded values of which a contraction reads more than a shard."""
    return frozenset(
        value
        for op in graph.ops
        if op.category in CONTRACTIONS
        for position, value in enumerate(op.operands)
        if (read := operands.get(use_key(op.path, position))) is not None
        and not rules.resolve(colours[value], graph.values[value].shape, mesh).layout.axes
        <= read.axes
    )
