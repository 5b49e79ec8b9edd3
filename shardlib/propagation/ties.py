"""Ties between dims: classes of (value, dim) pairs that some op, input or name ties together.

Classes are found by union-find over the factors of every op, over all graphs of a problem at once.

>>> classes = Classes()
>>> classes.join([("forward", 0, 1), ("forward", 2, 0)])
>>> classes.find(("forward", 0, 1)) == classes.find(("forward", 2, 0))
True
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from shardlib.graph import Graph, Problem
from shardlib.layout import LogicalAxes


class Classes:
    """Union-find with path halving."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, node: Hashable) -> Hashable:
        parent = self.parent
        if node not in parent:
            parent[node] = node
            return node
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, nodes: Iterable[Hashable]) -> None:
        first: Hashable = None
        for node in nodes:
            root = self.find(node)
            if first is None:
                first = root
            elif root != first:
                self.parent[root] = first


def tie_graph(classes: Classes, tag: str, graph: Graph) -> None:
    """Joins the dims that the ops of a graph tie to one index."""
    for op in graph.ops:
        rule = op.rule
        members: dict[int, list[Hashable]] = defaultdict(list)
        for values, all_dims in ((op.operands, rule.operands), (op.results, rule.results)):
            for value, dims in zip(values, all_dims, strict=True):
                for dim, factors in enumerate(dims):
                    major = rule.major(factors)
                    if major is not None:
                        members[major].append((tag, value, dim))
        for nodes in members.values():
            if len(nodes) > 1:
                classes.join(nodes)


def tie_inputs(classes: Classes, problem: Problem) -> None:
    """Joins the dims of inputs in the graphs of all remat policies with those of the parameters and
    the batch.
    """
    for index in problem.forward.inputs:
        value = problem.forward.values[index]
        for dim in range(len(value.shape)):
            classes.join([("input", value.path, dim), ("forward", index, dim)])
    for policy, step in problem.steps.items():
        for index, source in zip(step.graph.inputs, step.inputs, strict=True):
            for dim in range(len(step.graph.values[index].shape) - source.stacked):
                classes.join(
                    [
                        *(("input", path, dim) for path in source.paths),
                        (policy, index, dim + source.stacked),
                    ]
                )
        for gradient, index in zip(step.gradients, step.graph.inputs_of("parameter"), strict=True):
            for dim in range(len(step.graph.values[index].shape)):
                classes.join([(policy, index, dim), (policy, gradient, dim)])


def tie_names(classes: Classes, problem: Problem) -> tuple[str, ...]:
    """Joins the dims with the same logical name. A parameter whose names would tie two dims that
    are separate in other parameters keeps none of its names: for example the one of four attention
    kernels, all named (embed, heads), whose first dim counts heads.
    """
    arrays = [
        (path, [(name, ("input", path, dim)) for dim, name in enumerate(axes) if name is not None])
        for path, axes in named_dims(problem)
    ]
    support: dict[tuple[str, Hashable], int] = defaultdict(int)
    distinct: set[frozenset[str]] = set()
    for _, dims in arrays:
        for position, (name, node) in enumerate(dims):
            support[name, classes.find(node)] += 1
            distinct |= {
                frozenset((name, other_name))
                for other_name, place in dims[:position]
                if other_name != name and classes.find(place) != classes.find(node)
            }
    batch = {path for path, *_ in problem.batch}

    def certainty(dims: Sequence[tuple[str, Hashable]]) -> int:
        return min((support[name, classes.find(node)] for name, node in dims), default=0)

    ranked = sorted(arrays, key=lambda array: (array[0] not in batch, -certainty(array[1])))
    names: dict[Hashable, frozenset[str]] = {}
    left_out: list[str] = []
    for path, dims in ranked:
        joined: dict[Hashable, frozenset[str]] = {}
        for name, node in dims:
            roots = {classes.find(node), classes.find(("name", name))}
            together = frozenset({name}).union(
                *(names.get(root, frozenset()) | joined.get(root, frozenset()) for root in roots)
            )
            joined |= dict.fromkeys(roots, together)
        if path not in batch and any(
            frozenset((name, other_name)) in distinct
            for together in joined.values()
            for name in together
            for other_name in together
        ):
            left_out.append(path)
            continue
        for name, node in dims:
            roots = {classes.find(node), classes.find(("name", name))}
            together = frozenset({name}).union(*(names.pop(r, frozenset()) for r in roots))
            classes.join([("name", name), node])
            names[classes.find(node)] = together
    return tuple(path for path, _ in arrays if path in left_out)


def named_dims(problem: Problem) -> tuple[tuple[str, LogicalAxes], ...]:
    """(path, logical axes) of every parameter and batch array."""
    return (
        *((p.path, p.axes) for p in problem.parameters),
        *((path, axes) for path, _, _, axes in problem.batch),
    )


def tie_alike(
    classes: Classes,
    problem: Problem,
    dims: Mapping[str, tuple[tuple[str, int], ...]],
    values: Iterable[LogicalAxes],
) -> bool:
    """Joins colours that shard parameters of the same shapes along the same dims, like heads and
    widths of unrolled layers. Two colours that meet in a value, like the widths of two layers in
    the weight between them, stay separate: in such a chain every second one is tied.

    Args:
        dims: colour -> the (path, dim) of all inputs that have it, for colours that may be tied.
    """
    shapes = {p.path: p.shape for p in problem.parameters} | {
        path: shape for path, shape, _, _ in problem.batch
    }
    meets: dict[str, set[str]] = defaultdict(set)
    for axes in {frozenset(axes) for axes in values}:
        axis_names = {name for name in axes if name is not None and name in dims}
        for name in axis_names:
            meets[name] |= axis_names
    groups: dict[Hashable, list[list[str]]] = defaultdict(list)
    for name, places in dims.items():
        alike = groups[frozenset((shapes[path], dim) for path, dim in places)]
        joinable = (group for group in alike if meets[name].isdisjoint(group))
        group = next(joinable, None)
        if group is None:
            alike.append([name])
        else:
            group.append(name)
    several = [group for alike in groups.values() for group in alike if len(group) > 1]
    for group in several:
        classes.join(("input", *dims[name][0]) for name in group)
    return bool(several)


def stack_dims(problem: Problem) -> set[tuple[str, int]]:
    """(path, dim) of parameters whose dim counts layers: a scan takes one slice of it per
    iteration.
    """
    dims: set[tuple[str, int]] = set()
    for step in problem.steps.values():
        sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        for op in step.graph.ops:
            if (
                op.kind == "enter"
                and (source := sources.get(op.operands[0]))
                and not source.stacked
            ):
                dims |= {(path, 0) for path in source.paths}
    return dims
