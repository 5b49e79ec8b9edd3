"""Which inputs does a program hand on as results, unchanged?

Through scans, too: a carry that no iteration changes, and slices that are stacked up again as they
came.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlib._jax_compat import scan_counts
from shardlib.tracing.program import Equation, Program, flatten


def origins(program: Program) -> list[int | None]:
    """For each result the position of the input that it is; None where it is made by something, or
    a constant.
    """
    found: dict[int, int] = {number: position for position, number in enumerate(program.inputs)}
    for equation in program.equations:
        if equation.name == "scan":
            for number, source in zip(equation.outputs, _scanned(equation), strict=True):
                if source is not None and source in found:
                    found[number] = found[source]
    return [found.get(number) for number in program.outputs]


def _scanned(equation: Equation) -> Sequence[int | None]:
    """For each result of a scan the operand that it is."""
    constants, carried = scan_counts(equation.params)
    first = constants + carried
    results: list[int | None] = []
    for k, origin in enumerate(origins(flatten(equation.params["jaxpr"]))):
        same = origin is not None and (origin == constants + k if k < carried else origin >= first)
        results.append(equation.inputs[origin] if same and origin is not None else None)
    return results


def unchanged(program: Program, inputs: Sequence[int], results: Sequence[int]) -> frozenset[int]:
    """Those of some inputs, by position, whose result at the same place is the input itself.

    Args:
        program: any program.
        inputs: positions of inputs.
        results: positions of the results that take their places.
    """
    found = origins(program)
    return frozenset(i for i, k in zip(inputs, results, strict=True) if found[k] == i)
