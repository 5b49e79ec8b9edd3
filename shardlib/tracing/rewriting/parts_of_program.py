"""Which operands some results of a program are made from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardlib._jax_compat import scan_counts
from shardlib.tracing.program import Equation, Program, flatten


def results_wanted(equations: Sequence[Equation], results: Iterable[int]) -> list[set[int]]:
    """For every equation those of its results that some values are made from."""
    reads, needed_results = set(results), list[set[int]]()
    for equation in reversed(equations):
        needed = reads.intersection(equation.outputs)
        needed_results.append(needed)
        if needed:
            reads.update(_operands(equation, needed))
    return needed_results[::-1]


def _operands(equation: Equation, results: set[int]) -> set[int]:
    """The operands that some results of an equation are made from."""
    if equation.name != "scan":
        return set(equation.inputs)
    body, positions = body_of(equation), positions_of(equation, results)
    _, reads = closed(equation, body, positions)
    return {
        number for number, inner in zip(equation.inputs, body.inputs, strict=True) if inner in reads
    }


def closed(equation: Equation, body: Program, positions: set[int]) -> tuple[set[int], set[int]]:
    """Positions of results with those of the carries that they are made from, and all values of the
    body that these read.
    """
    constants, carried = scan_counts(equation.params)
    while True:
        reads = _reads(body, positions)
        grown = positions | {k for k in range(carried) if body.inputs[constants + k] in reads}
        if grown == positions:
            return positions, reads
        positions = grown


def _reads(program: Program, positions: Collection[int]) -> set[int]:
    """All values that some results of a program are made from, themselves included."""
    results = [program.outputs[k] for k in positions]
    reads = set(results)
    for equation, needed in zip(
        program.equations, results_wanted(program.equations, results), strict=True
    ):
        if needed:
            reads |= _operands(equation, needed)
    return reads


def positions_of(equation: Equation, numbers: set[int]) -> set[int]:
    """Positions of the results of an equation that are among some numbers."""
    return {k for k, number in enumerate(equation.outputs) if number in numbers}


def body_of(equation: Equation) -> Program:
    return flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope, remat=True)
