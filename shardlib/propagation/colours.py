"""Colours: dims of all the arrays of a program that belong together.

A *colour* is a class of (value, dim) pairs that some op ties together: cutting one of them without
the others costs a reshard. Classes are found by union-find over the factors of every op, over all
graphs of a problem at once; the user's logical names are seeds, and dims with the same name share a
colour. Colours without a name are called after the first input that has them ("mlp.up.kernel:1"),
so that a model with no annotation at all has a readable plan.

Repeating layers that are written out are one colour, too, wherever they stand: in a loss, in a step
with its backward pass, in a block of several layers, as five local ones and a global one
(`ties.tie_alike`).

A colour may occur twice in one value: the query and the key dim of attention scores both come from
the sequence. It then cuts the first of the two; the other stays whole (`Rules.resolve` sees to
that, and `Colouring.conflicts` lists them).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from shardlib.axes import LogicalAxes
from shardlib.graph import Graph
from shardlib.graph.problem import Problem
from shardlib.propagation.loops import carried_along, walked_along
from shardlib.propagation.ties import (
    Classes,
    named_dims,
    stack_dims,
    tie_alike,
    tie_graph,
    tie_inputs,
    tie_names,
)
from shardlib.report import Finding, diagnostic

#: Names that mean the same as ours, from MaxText, T5X and Flax examples.
BATCH_NAMES: tuple[str, ...] = ("batch", "activation_batch")
SEQUENCE_NAMES: tuple[str, ...] = ("seq", "length", "sequence", "activation_length")


@dataclass(frozen=True, kw_only=True)
class Colour:
    """One class of dims.

    Attributes:
        name: what rules and plans call it.
        aliases: other logical names that the program ties to it.
        divisor: largest number of parts that divides every parameter and matmul dim of this colour.
        inputs: (path, dim) of every parameter and batch array that has it.
        matmuls: number of matmuls and convolutions of the step that it takes part in.
        flops: FLOPs of these, uncut.
        carried: whether a loop carries it from layer to layer beside the sequence, as the residual
            stream does; what a recurrence carries from position to position is not.
        walked: whether a loop takes one position along it per iteration, as a recurrence does along
            the sequence: sharded, every iteration would gather what it takes its position from.
    """

    name: str
    aliases: tuple[str, ...]
    divisor: int
    inputs: tuple[tuple[str, int], ...]
    matmuls: int
    flops: float
    carried: bool
    walked: bool


@dataclass(frozen=True, kw_only=True)
class Colouring:
    """Colours of every dim of every graph of a problem.

    Attributes:
        colours: by name.
        forward: colour name per dim for each value of the forward graph.
        steps: the same for each step graph, by remat policy.
        parameters: colour name per dim for each parameter path.
        batch: colour name per dim for each batch path.
        findings: names tied together and the like.
    """

    colours: Mapping[str, Colour]
    forward: tuple[LogicalAxes, ...]
    steps: Mapping[str, tuple[LogicalAxes, ...]]
    parameters: Mapping[str, LogicalAxes]
    batch: Mapping[str, LogicalAxes]
    findings: tuple[Finding, ...]

    def canonical(self, name: str) -> str | None:
        """The colour that a logical name belongs to; None when no dim has it."""
        if name in self.colours:
            return name
        return next(
            (colour.name for colour in self.colours.values() if name in colour.aliases), None
        )

    @property
    def batch_colour(self) -> str | None:
        """The colour that data parallelism cuts."""
        return next((colour for name in BATCH_NAMES if (colour := self.canonical(name))), None)

    @property
    def sequence_colour(self) -> str | None:
        """The colour that sequence parallelism shards; None where a loop walks along it."""
        colour = self.named_sequence
        return None if colour is None or self.colours[colour].walked else colour

    @property
    def named_sequence(self) -> str | None:
        """The colour of the sequence, whether it can be sharded or not."""
        return next((colour for name in SEQUENCE_NAMES if (colour := self.canonical(name))), None)

    @property
    def shardable(self) -> tuple[Colour, ...]:
        """Colours that the tensor axis may shard.

        That of the residual stream is none where the sequence can be sharded instead: both cost the
        same collectives, and along the sequence the normalisation needs none.
        """
        barred = {self.batch_colour, self.named_sequence}
        return tuple(
            c
            for c in self.colours.values()
            if c.matmuls
            and c.divisor > 1
            and c.name not in barred
            and not c.walked
            and not (c.carried and self.sequence_colour)
        )

    def conflicts(
        self, graph: Graph, names: tuple[LogicalAxes, ...]
    ) -> tuple[tuple[int, str], ...]:
        """(value, colour) for every value of a graph that has one colour twice."""
        return tuple(
            (index, name)
            for index, axes in enumerate(names)
            for name in sorted({a for a in axes if a and axes.count(a) > 1})
        )


def _short(path: str, dim: int) -> str:
    """A readable colour name from a tree path: the last parts, without layer numbers."""
    parts = [part for part in path.split(".") if not re.fullmatch(r"\d+", part)]
    return f"{'.'.join(parts[-3:])}:{dim}"


def colour(problem: Problem) -> Colouring:
    """Finds the colours of a problem."""
    classes = Classes()
    tie_inputs(classes, problem)
    graphs = {
        "forward": problem.forward,
        **{policy: step.graph for policy, step in problem.steps.items()},
    }
    for tag, graph in graphs.items():
        tie_graph(classes, tag, graph)
    misnamed = _misnamed(tie_names(classes, problem), problem)
    colouring = _coloured(classes, problem)
    named = {n for _, axes in named_dims(problem) for n in axes}
    unnamed = {c.name: c.inputs for c in colouring.shardable if c.name not in named}
    values = (
        axes for graph_axes in (colouring.forward, *colouring.steps.values()) for axes in graph_axes
    )
    if tie_alike(classes, problem, unnamed, values):
        colouring = _coloured(classes, problem)
    return replace(colouring, findings=(*colouring.findings, *misnamed))


@diagnostic
def _misnamed(paths: tuple[str, ...], problem: Problem) -> tuple[Finding, ...]:
    """Parameters whose names are left out."""
    if not paths:
        return ()
    axes = dict(named_dims(problem))
    return (
        Finding(
            code="names-contradict",
            severity="warning",
            where=", ".join(paths[:4]),
            message=(
                "names are left out that would tie dims which other parameters tell apart: "
                + "; ".join(f"{path} {axes[path]}" for path in paths[:4])
                + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            ),
            hint="name each dim for what it counts, such as (heads, head_dim, embed)",
        ),
    )


def _coloured(classes: Classes, problem: Problem) -> Colouring:
    """The colouring of a problem whose dims are tied."""
    stacks = stack_dims(problem)
    shapes = {p.path: p.shape for p in problem.parameters} | {
        path: shape for path, shape, _, _ in problem.batch
    }
    inputs: dict[Hashable, list[tuple[str, int]]] = defaultdict(list)
    for path, shape in shapes.items():
        for dim, size in enumerate(shape):
            if size > 1 and (path, dim) not in stacks:
                inputs[classes.find(("input", path, dim))].append((path, dim))
    names = {root: _names_of(classes, root, problem) for root in inputs}
    chosen, findings = _choose_names(inputs, names)
    divisors, matmuls, flops = _divisors(classes, problem, inputs, shapes)
    carried = carried_along(
        classes,
        problem,
        {root for root, class_names in names.items() if set(class_names) & set(SEQUENCE_NAMES)},
    )
    walked = walked_along(classes, problem)
    colours = {
        chosen[root]: Colour(
            name=chosen[root],
            aliases=tuple(n for n in names[root] if n != chosen[root]),
            divisor=divisors[root],
            inputs=tuple(members),
            matmuls=matmuls[root],
            flops=flops[root],
            carried=root in carried,
            walked=root in walked,
        )
        for root, members in inputs.items()
    }

    def axes(tag: str, graph: Graph) -> tuple[LogicalAxes, ...]:
        return tuple(
            tuple(
                chosen.get(classes.find((tag, index, dim))) if size > 1 else None
                for dim, size in enumerate(value.shape)
            )
            for index, value in enumerate(graph.values)
        )

    def of_inputs(paths: Iterable[str]) -> dict[str, LogicalAxes]:
        return {
            path: tuple(
                (
                    chosen.get(classes.find(("input", path, dim)))
                    if size > 1 and (path, dim) not in stacks
                    else None
                )
                for dim, size in enumerate(shapes[path])
            )
            for path in paths
        }

    return Colouring(
        colours=colours,
        forward=axes("forward", problem.forward),
        steps={policy: axes(policy, step.graph) for policy, step in problem.steps.items()},
        parameters=of_inputs(p.path for p in problem.parameters),
        batch=of_inputs(path for path, *_ in problem.batch),
        findings=findings,
    )


def _names_of(classes: Classes, root: Hashable, problem: Problem) -> list[str]:
    names = [name for _, axes in named_dims(problem) for name in axes if name]
    return [name for name in dict.fromkeys(names) if classes.find(("name", name)) == root]


def _choose_names(
    inputs: Mapping[Hashable, list[tuple[str, int]]], names: Mapping[Hashable, list[str]]
) -> tuple[dict[Hashable, str], tuple[Finding, ...]]:
    chosen: dict[Hashable, str] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for root, members in inputs.items():
        candidates = names[root]
        conventional = [name for name in candidates if name in BATCH_NAMES + SEQUENCE_NAMES]
        name = (conventional or candidates or [_short(*members[0])])[0]
        base, number = name, 2
        while name in taken:
            name, number = f"{base}#{number}", number + 1
        taken.add(name)
        chosen[root] = name
        if len(candidates) > 1:
            findings.append(
                Finding(
                    code="names-tied",
                    severity="info",
                    where=f"{members[0][0]} dim {members[0][1]}",
                    message=(
                        f"the program ties the logical axes {', '.join(candidates)} together; they"
                        f" are sharded alike, under the name {name!r}"
                    ),
                )
            )
    return chosen, tuple(findings)


def _divisors(
    classes: Classes,
    problem: Problem,
    inputs: Mapping[Hashable, list[tuple[str, int]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[Hashable, int], dict[Hashable, int], dict[Hashable, float]]:
    divisors = {
        root: math.gcd(*(shapes[path][dim] for path, dim in members))
        for root, members in inputs.items()
    }
    matmuls, flops = dict.fromkeys(inputs, 0), dict.fromkeys(inputs, 0.0)
    for policy, step in problem.steps.items():
        for op in step.graph.ops:
            if op.category not in ("matmul", "convolution", "gather") and not op.rule.outer:
                continue
            touched: dict[Hashable, int] = {}
            for values, all_dims in (
                (op.operands, op.rule.operands),
                (op.results, op.rule.results),
            ):
                for value, dims in zip(values, all_dims, strict=True):
                    for dim, factors in enumerate(dims):
                        major = op.rule.major(factors)
                        if major is None or major in op.rule.whole:
                            continue
                        root = classes.find((policy, value, dim))
                        if root in divisors:
                            touched[root] = math.gcd(touched.get(root, 0), op.rule.sizes[major])
            for root, size in touched.items():
                divisors[root] = math.gcd(divisors[root], size)
                counts = op.category in ("matmul", "convolution") and policy == next(
                    iter(problem.steps)
                )
                matmuls[root] += counts
                flops[root] += op.flops * step.graph.trips(op.region) if counts else 0.0
    return divisors, matmuls, flops
