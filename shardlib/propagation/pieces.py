"""Fused dims: several things side by side, and what may be sharded of them.

The kernel of a fused projection makes queries, keys and values at once, [embed, 3 heads]; that of
an LSTM makes four gates. A split, slices or a reshape to [3, heads] take the result apart. To cut
such a dim so that nothing is gathered, every *piece* of it is sharded: a device has its part of the
queries, of the keys and of the values (Megatron-LM stores such weights so). In a rule the major
factor of the dim counts the pieces and is outer, and the next one is what is sharded (Shardy's
compound factors, openxla/shardy `docs/propagation.md`, with the major one blocked):

    split      [embed*3] -> [embed] [embed] [embed]       outer 3
    reshape    [3*heads*width] -> [3] [heads] [width]     outer 3

Which dims these are follows from where ops cut them: the starts and ends of all windows
(`shardlib.graph.factors.Window`) into a dim, and into every dim that the program ties to it
position by position, are its joints. Pieces may differ in size; they are sharded alike by whatever
divides all of them.

Dims of the batch and of the sequence are left alone: a part of the batch is not the same part of
each of two batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from shardlib.graph import FactorRule, Graph, Op
from shardlib.graph.factors import Dim, Dims, Place, Window
from shardlib.graph.problem import Problem
from shardlib.propagation.ties import Classes, tie_graph, tie_inputs, tie_names

#: A dim whose pieces have no larger common measure than this part of it is no fused one: a padded
#: vocabulary, a shift by one.
FINEST = 64


def in_pieces(problem: Problem) -> Problem:
    """The problem with rules that cut every piece of a fused dim, and with the pieces of every
    fused dim of its forward graph.
    """
    graphs = {
        "forward": problem.forward,
        **{policy: step.graph for policy, step in problem.steps.items()},
    }
    if not _windows(graphs):  # all joints come from them
        return problem
    fused = _found(problem, graphs)
    if not fused.sizes:
        return problem
    changed = {
        tag: replace(graph, ops=tuple(fused.changed(tag, op) for op in graph.ops))
        for tag, graph in graphs.items()
    }
    dims = (
        (index, dim)
        for index, value in enumerate(problem.forward.values)
        for dim in range(len(value.shape))
    )
    pieces = {place: sizes for place in dims if (sizes := fused.pieces("forward", *place))}
    return replace(
        problem,
        forward=changed["forward"],
        steps={
            policy: replace(step, graph=changed[policy]) for policy, step in problem.steps.items()
        },
        pieces=pieces,
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The fused dims of some graphs.

    Attributes:
        same: classes of dims that are the same index of everything, position by position.
        sizes: for the root of each class of fused dims, its pieces.
    """

    same: Classes
    sizes: Mapping[Hashable, tuple[int, ...]]

    def pieces(self, tag: str, value: int, dim: int) -> tuple[int, ...]:
        """The pieces of a dim; () where it is none."""
        return self.sizes.get(self.same.find((tag, value, dim)), ())

    def changed(self, tag: str, op: Op) -> Op:
        """An op with the rule that cuts pieces."""
        rule = op.rule
        windows = rule.windows
        if windows and (sizes := self._at(tag, op, windows[0].long)):
            return replace(op, rule=_windows_cut(rule, math.gcd(*sizes)))
        outer = frozenset(
            counter
            for counter, place in counters(rule)
            if len(sizes := self._at(tag, op, place)) > 1
            and self._counts(rule, counter, sizes, _dim(rule, place))
        )
        return (
            replace(op, rule=replace(rule, outer=outer, whole=rule.whole | outer)) if outer else op
        )

    def _at(self, tag: str, op: Op, place: Place) -> tuple[int, ...]:
        result, position, dim = place
        return self.pieces(tag, op.value(result, position), dim)

    @staticmethod
    def _counts(rule: FactorRule, counter: int, sizes: tuple[int, ...], dim: Dim) -> bool:
        """Whether a factor counts the pieces of a dim, rather than being in shards itself."""
        inner = math.prod(rule.sizes[factor] for factor in dim if factor != counter)
        return (
            all(size % inner == 0 for size in sizes)
            and math.gcd(*(size // inner for size in sizes)) == 1
        )


def counters(rule: FactorRule) -> Iterator[tuple[int, Place]]:
    """Major factors of dims with several, each with such a dim; of the ops that change no order,
    reshapes alone have them.
    """
    yield from (
        (dim[0], place) for place, dim in rule.dims() if len(dim) > 1 and dim[0] not in rule.summed
    )


def _dim(rule: FactorRule, place: Place) -> Dim:
    result, position, dim = place
    return (rule.results if result else rule.operands)[position][dim]


def _windows_cut(rule: FactorRule, measure: int) -> FactorRule:
    """The rule of an op with windows, all into one dim: the common measure of all pieces is one
    factor, that of the long dim and of every window; what counts it is outer.
    """
    sizes, outer = list(rule.sizes), set[int]()
    sizes.append(measure)
    common = len(sizes) - 1
    dims: dict[Place, Dim] = dict(rule.dims())

    def cut(place: Place, size: int) -> None:
        if size > measure:
            sizes.append(size // measure)
            outer.add(len(sizes) - 1)
            dims[place] = (len(sizes) - 1, common)
        else:
            dims[place] = (common,)

    long = rule.windows[0].long
    cut(long, math.prod(rule.sizes[factor] for factor in dims[long]))
    for window in rule.windows:
        if window.short is not None:
            cut(window.short, window.size)

    def side(result: bool, values: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(
            tuple(dims[result, position, dim] for dim in range(len(value)))
            for position, value in enumerate(values)
        )

    return replace(
        rule,
        sizes=tuple(sizes),
        operands=side(False, rule.operands),
        results=side(True, rule.results),
        whole=rule.whole | outer,
        outer=frozenset(outer),
    )


def _found(problem: Problem, graphs: Mapping[str, Graph]) -> _Found:
    same, tied = Classes(), Classes()
    for classes in (same, tied):
        tie_inputs(classes, problem)
    for tag, graph in graphs.items():
        tie_graph(tied, tag, graph)
        _tie_positions(same, tag, graph)
    tie_names(tied, problem)
    left = {
        tied.find(("input", path, dim))
        for path, shape, _, _ in problem.batch
        for dim in range(len(shape))
    }
    joints = _joints(same, graphs)
    pieces = {
        root: tuple(b - a for a, b in pairwise(sorted(points))) for root, points in joints.items()
    }
    fit = {
        root: sizes
        for root, sizes in pieces.items()
        if len(sizes) > 1 and (measure := math.gcd(*sizes)) > 1 and measure * FINEST >= sum(sizes)
    }
    for tag, op, window in _windows(graphs):
        long, short = (_nodes(tag, op, place) for place in (window.long, window.short))
        if any(tied.find(node) in left for node in (*long, *short)):
            fit.pop(same.find(long[0]), None)
    for tag, op, window in sorted(
        _windows(graphs), key=lambda window: -_size(*window)
    ):  # a piece of a fused dim is no fused one itself
        if window.short is not None and same.find(_nodes(tag, op, window.long)[0]) in fit:
            fit.pop(same.find(_nodes(tag, op, window.short)[0]), None)
    return _Found(same=same, sizes=fit)


def _windows(graphs: Mapping[str, Graph]) -> list[tuple[str, Op, Window]]:
    return [
        (tag, op, window)
        for tag, graph in graphs.items()
        for op in graph.ops
        for window in op.rule.windows
    ]


def _nodes(tag: str, op: Op, place: Place | None) -> list[Hashable]:
    return [] if place is None else [(tag, op.value(place[0], place[1]), place[2])]


def _size(tag: str, op: Op, window: Window) -> int:
    del tag
    return math.prod(op.rule.sizes[factor] for factor in _dim(op.rule, window.long))


def _tie_positions(same: Classes, tag: str, graph: Graph) -> None:
    """Ties dims that an op gives the same index, position by position."""
    for op in graph.ops:
        members: dict[int, list[Hashable]] = defaultdict(list)
        for (result, position, axis), dim in op.rule.dims():
            if len(dim) == 1 and dim[0] not in op.rule.whole:
                members[dim[0]].append((tag, op.value(result, position), axis))
        for nodes in members.values():
            same.join(nodes)


def _reach(spans: Iterable[tuple[int, int]]) -> int:
    """How far spans reach from 0 without a gap.

    >>> _reach([(0, 2), (4, 8), (2, 3)])
    3
    """
    end = 0
    for start, stop in sorted(spans):
        end = max(end, stop) if start <= end else end
    return end


def _joints(same: Classes, graphs: Mapping[str, Graph]) -> dict[Hashable, set[int]]:
    """Where windows cut each class of dims, its own ends included; of a dim that a reshape
    makes of several, where the major one is.

    A dim of which windows leave some part out (the best few of all experts) is not several things
    side by side.
    """
    joints: dict[Hashable, set[int]] = defaultdict(set)
    read: dict[Hashable, set[tuple[int, int]]] = defaultdict(set)
    for tag, op, window in _windows(graphs):
        root = same.find(_nodes(tag, op, window.long)[0])
        joints[root] |= {0, window.start, window.start + window.size, _size(tag, op, window)}
        read[root].add((window.start, window.start + window.size))
    for root, spans in read.items():
        if _reach(spans) < max(joints[root]):
            del joints[root]
    for tag, graph in graphs.items():
        for op in graph.ops:
            if op.rule.windows:
                continue
            for counter, place in counters(op.rule):
                alone = [
                    same.find((tag, op.value(side, position), dim_position))
                    for (side, position, dim_position), dim in op.rule.dims()
                    if dim == (counter,)
                ]
                inner = math.prod(op.rule.sizes[factor] for factor in _dim(op.rule, place)[1:])
                for points in [joints[root] for root in alone if root in joints]:
                    joints[same.find(_nodes(tag, op, place)[0])] |= {
                        point * inner for point in points
                    }
    return dict(joints)
