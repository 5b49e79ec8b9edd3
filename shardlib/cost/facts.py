"""What all items of one step graph ask about: colours, kernels, weights and gradients."""

from __future__ import annotations

from collections import defaultdict

from shardlib.axes import LogicalAxes
from shardlib.cost.kernels import Fusion, Traits, fuse
from shardlib.graph import Op
from shardlib.graph.problem import StepGraph
from shardlib.propagation.assignment import Choice, Cut


class Facts:
    """What the items of one step graph share: colours of values and factors, fusion, weights, gradients.

    Attributes:
        graph: the step graph.
        names: colour per dim of every value.
        factors: colour per factor of every op.
        fusion: kernels and materialised values.
    """

    def __init__(self, step: StepGraph, names: tuple[LogicalAxes, ...], frozen: frozenset[tuple[str, int]], traits: Traits) -> None:
        self.graph = step.graph
        self.names = names
        self.factors = tuple(factor_colours(op, names) for op in step.graph.ops)
        self.traits = traits
        self.fusion: Fusion = fuse(step.graph, traits)
        self.weights = weights_of(step)
        self.gradients = gradient_like(step)
        self.trips = tuple(step.graph.trips(region) for region in range(len(step.graph.regions)))
        self.sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        self.frozen = frozen
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(step.graph.ops):
            for value in dict.fromkeys(op.operands):
                self.consumers[value].append(index)

    def op_cut(self, index: int, choice: Choice) -> Cut:
        """Cut of the factors of an op."""
        return choice.cut(self.factors[index], self.graph.ops[index].rule.whole)

    def value_cut(self, value: int, choice: Choice) -> Cut:
        """Cut of the dims of a value."""
        return choice.cut(self.names[value])

    def frozen_dims(self, value: int) -> frozenset[int]:
        """Dims of an input that count layers."""
        source = self.sources.get(value)
        if source is None:
            return frozenset()
        return frozenset({0}) if source.stacked else frozenset(dim for path, dim in self.frozen if path in source.paths)


def factor_colours(op: Op, names: tuple[LogicalAxes, ...]) -> LogicalAxes:
    """Colour of every factor of an op: the colour of a dim of which it is the major factor."""
    found: list[str | None] = [None] * len(op.rule.sizes)
    for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                major = op.rule.major(factors)
                if major is not None and found[major] is None:
                    found[major] = names[value][dim]
    return tuple(found)


def weights_of(step: StepGraph) -> dict[int, int]:
    """Values that are copies, casts, slices or stacks of one parameter, with the value index of that parameter."""
    found = {value: value for value in step.graph.inputs_of("parameter")}
    for op in step.graph.ops:
        if op.category not in ("elementwise", "movement", "boundary"):
            continue
        sources = {found.get(value) for value in op.operands if step.graph.values[value].shape}
        if len(sources) == 1 and None not in sources:
            source = next(iter(sources))
            assert source is not None
            if op.kind != "carry":
                found.update(dict.fromkeys(op.results, source))
    return found


def gradient_like(step: StepGraph) -> frozenset[int]:
    """Values that end up in a gradient through ops that do not contract anything."""
    producers = step.graph.producers()
    found: set[int] = set()
    pending = list(step.gradients)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        maker = producers.get(value)
        if maker is None:
            continue
        op = step.graph.ops[maker]
        if op.category in ("elementwise", "movement", "boundary") and not op.rule.summed:
            pending.extend(op.operands)
    return frozenset(found)
