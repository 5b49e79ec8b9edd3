"""Which dims do loops carry from layer to layer, and along which do they walk?"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from shardlib.graph.problem import Problem
from shardlib.propagation.ties import Classes


def carried_along(
    classes: Classes, problem: Problem, sequences: Collection[Hashable]
) -> set[Hashable]:
    """Classes that some loop carries in a value that has the sequence, too; of a model without a
    sequence, all that loops carry.
    """
    carried: set[Hashable] = set()
    for policy, step in problem.steps.items():
        for value in (value for op in step.graph.ops if op.kind == "carry" for value in op.results):
            roots = {
                classes.find((policy, value, dim))
                for dim in range(len(step.graph.values[value].shape))
            }
            carried |= roots if not sequences or roots & set(sequences) else set()
    return carried


def walked_along(classes: Classes, problem: Problem) -> set[Hashable]:
    """Classes of dims along which some loop takes one position per iteration."""
    return {
        classes.find((policy, op.operands[0], 0))
        for policy, step in problem.steps.items()
        for op in step.graph.ops
        if op.kind == "enter"
    }
