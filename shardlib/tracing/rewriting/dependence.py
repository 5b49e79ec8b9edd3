"""What does each value of a program depend on?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shardlib._jax_compat import scan_counts
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten

#: Names of what a value is made from.
Labels = frozenset[str]


def dependence(program: Program, inputs: Sequence[Labels]) -> dict[int, Labels]:
    """The labels of every value: the union of the labels of what it is made from.

    Results of a loop over layers are told apart: a result that the body makes from few of its
    operands has their labels alone. Other inner programs than scans, remat and custom derivatives
    make each result from all operands.

    Returns:
        Number of a value -> its labels; constants have none.
    """
    labels: dict[int, Labels] = dict.fromkeys(program.constants, frozenset())
    labels.update(zip(program.inputs, inputs, strict=True))
    for equation in program.equations:
        labels.update(
            zip(
                equation.outputs,
                _results(equation, [labels[number] for number in equation.inputs]),
                strict=True,
            )
        )
    return labels


def needed(
    equations: Iterable[Equation], targets: Iterable[int], available: Collection[int] = ()
) -> tuple[list[Equation], set[int]]:
    """The equations that some values are made by where others are given, in order, and all values
    that these read or that are wanted, but for the given ones.
    """
    reads, chosen = set(targets).difference(available), []
    for equation in reversed(list(equations)):
        if reads.intersection(equation.outputs):
            chosen.append(equation)
            reads.update(number for number in equation.inputs if number not in available)
    return chosen[::-1], reads


def _results(equation: Equation, operands: list[Labels]) -> list[Labels]:
    if equation.name == "scan":
        return _scan(equation, operands)
    if equation.name in (*REMAT, *CUSTOM):
        inner = flatten(callee(equation.eqn))
        if len(inner.inputs) == len(operands):
            labels = dependence(inner, operands)
            return [labels[number] for number in inner.outputs]
    return [_union(operands)] * len(equation.outputs)


def _scan(equation: Equation, operands: list[Labels]) -> list[Labels]:
    constants, carried = scan_counts(equation.params)
    body = flatten(equation.params["jaxpr"])
    while True:
        labels: Mapping[int, Labels] = dependence(body, operands)
        results = [labels[number] for number in body.outputs]
        grown = [
            before | after
            for before, after in zip(
                operands[constants : constants + carried], results, strict=False
            )
        ]
        if grown == operands[constants : constants + carried]:
            return results
        operands = [*operands[:constants], *grown, *operands[constants + carried :]]


def _union(labels: Iterable[Labels]) -> Labels:
    return frozenset().union(*labels)
