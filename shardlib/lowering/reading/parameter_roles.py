"""Which parameters are stacks of layers, tables of lookups, kernels of convolutions, or needed in a
narrower dtype than their own.

Each of the four is found by what reads it:

    scan over {"up": [layers, embed, mlp]}    "12/enter/0" -> parameter "up": one layer a slice
    table[tokens], table[:length]             a table: read by lookups and slices alone
    conv(x, kernel)                           a kernel, known by its shape
    x @ weight.astype(bfloat16)               a weight in bfloat16, if nothing else reads it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Eqn
from shardlib.tracing.program import (
    REMAT,
    Equation,
    Program,
    callee,
    flatten,
)


def looked_up(program: Program, parameters: int) -> frozenset[int]:
    """Which parameters are tables, read by lookups or slices of rows and nothing else? Their
    gathered form is not needed for the backward pass.

    A slice of rows of which devices have shards makes XLA's partitioner permute rows between
    devices, with pairs of devices that GPUs refuse (JAX 0.10.2).
    """
    tables: set[int] = set()
    others: set[int] = set(program.outputs)
    for equation in program.equations:
        lookup = equation.name == "gather" or _of_rows(program, equation)
        tables.update(equation.inputs[:1] if lookup else ())
        others.update(equation.inputs[1:] if lookup else equation.inputs)
    return frozenset(
        i for i, number in enumerate(program.inputs[:parameters]) if number in tables - others
    )


def _of_rows(program: Program, equation: Equation) -> bool:
    """Whether an equation takes some rows of an array, and all that these have."""
    if equation.name not in ("slice", "dynamic_slice"):
        return False
    before, after = (program.avals[n].shape for n in (equation.inputs[0], equation.outputs[0]))
    return before[1:] == after[1:]


def convolved(equations: Iterable[Eqn]) -> frozenset[tuple[int, ...]]:
    """Shapes of the kernels of all convolutions among JAX equations, and in what they call.

    A kernel that is stored sharded is gathered, and its gradient reduced, in the layout of use:
    where the gradient of a kernel is sharded over tensor and fsdp while the batch is sharded over a
    third axis, XLA's partitioner gives wrong numbers (seen on CPU with JAX 0.10.2).
    """
    shapes: set[tuple[int, ...]] = set()
    for eqn in equations:
        if eqn.primitive.name == "conv_general_dilated":
            kernel: Any = eqn.invars[1].aval
            shapes.add(tuple(kernel.shape))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    shapes |= convolved(inner.eqns)
    return frozenset(shapes)


def narrowed(program: Program, parameters: int) -> dict[int, np.dtype]:
    """The dtype to which a parameter, or every layer of it, is cast by the one operation that reads
    it, where that is a narrower floating one. Its gradient has no more digits either.
    """
    dtypes: dict[int, np.dtype] = {}
    _find_casts(
        program, {number: i for i, number in enumerate(program.inputs[:parameters])}, dtypes
    )
    return dtypes


def _find_casts(
    program: Program, parameters: Mapping[int, int], dtypes: dict[int, np.dtype]
) -> None:
    readers: dict[int, list[Equation]] = {number: [] for number in parameters}
    for equation in program.equations:
        for number in equation.inputs:
            if number in readers:
                readers[number].append(equation)
    for number, parameter in parameters.items():
        if len(readers[number]) != 1 or number in program.outputs:
            continue
        (reader,) = readers[number]
        if reader.name == "convert_element_type":
            wide, dtype = program.avals[number].dtype, reader.params["new_dtype"]
            if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < wide.itemsize:
                dtypes[parameter] = dtype
        elif (body := _entered(reader)) is not None:
            _find_casts(body, {body.inputs[reader.inputs.index(number)]: parameter}, dtypes)


def _entered(equation: Equation) -> Program | None:
    """What runs in an equation whose operands are the inputs of that, one by one."""
    if equation.name in REMAT:
        return flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
    if equation.name == "scan":
        return flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope)
    return None


def stacked_parameters(program: Program, parameters: int) -> dict[str, int]:
    """Which slices of which scans are layers of a stacked parameter?

    Returns:
        Path under which a slice reaches `place` -> index of the parameter; only for parameters that
    """
    slices: dict[str, int] = {}
    reads: Counter[int] = Counter()
    _find_slices(
        program, {number: i for i, number in enumerate(program.inputs[:parameters])}, slices, reads
    )
    return {path: parameter for path, parameter in slices.items() if reads[parameter] == 1}


def _find_slices(
    program: Program, parameters: Mapping[int, int], slices: dict[str, int], reads: Counter[int]
) -> None:
    for equation in program.equations:
        inner: dict[int, int] = {}
        if equation.name in REMAT:
            inner = {
                position: parameters[number]
                for position, number in enumerate(equation.inputs)
                if number in parameters
            }
            body = flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
            _find_slices(
                body,
                {body.inputs[position]: parameter for position, parameter in inner.items()},
                slices,
                reads,
            )
            continue
        reads.update(parameters[number] for number in equation.inputs if number in parameters)
        if equation.name == "scan":
            first = sum(scan_counts(equation.params))
            slices.update(
                {
                    f"{equation.path}/enter/{k}": parameters[number]
                    for k, number in enumerate(equation.inputs[first:])
                    if number in parameters
                }
            )
    reads.update(parameters[number] for number in program.outputs if number in parameters)
