"""An operation gets the weight that it uses, as the plan has it in use.

A weight that is stored sharded is gathered where it is used, in the dtype of use, and again in the
backward pass: what is kept between the two are its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Index, Value
from shardlib.lowering.mesh.collectives import Cuts, Machine, machine_of
from shardlib.lowering.mesh.shardings import parameter_order
from shardlib.lowering.reading.use import Use
from shardlib.planning.plan import ParameterLayout, Plan


def in_use(use: Use, parameter: ParameterLayout, machine: Machine) -> Callable[[Value], Value]:
    """Gathers an operand that is stored sharded, as the plan has its parameter in use.

    Where the stored shards are no pieces of the operand, the compiler is left to find a way. An
    operand that is the parameter transposed is gathered as the parameter lies: compilers gather a
    table that is used both ways once.
    """
    if parameter.rest == parameter.compute:
        return lambda operand: operand
    sources = [(dim, source) for dim, source in enumerate(use.view.dims) if source is not None]
    compute: Cuts = {dim: parameter.compute[source] for dim, source in sources}
    stored: Cuts = {dim: parameter.rest[source] for dim, source in sources}
    if {axis for cut in compute.values() for axis in cut} != set(parameter.compute.axes):
        return lambda operand: operand
    in_pieces = {axis for cut in stored.values() for axis in cut} == set(parameter.rest.axes)
    order = use.view.order
    if not order:
        return machine.gather(use.shape, stored if in_pieces else None, compute)
    gather = machine.gather(
        tuple(use.shape[dim] for dim in order),
        _in_order(stored, order) if in_pieces else None,
        _in_order(compute, order),
    )
    return lambda operand: gather(operand.transpose(order)).transpose(np.argsort(order))


def _in_order(cuts: Cuts, order: Sequence[int]) -> Cuts:
    """How a value is sharded whose dims are put in another order."""
    return {position: cuts[dim] for position, dim in enumerate(order) if dim in cuts}


def gather_updated(
    plan: Plan, trained: Tree, mesh: Mesh | AbstractMesh
) -> Callable[[Tree, Tree], Tree]:
    """Gathers updated parameters that are stored replicated and whose optimizer state is sharded
    (ZeRO 1 and 2).

    Stacks of matrices are gathered one by one, into the place where the stack is stored: gathered
    at once they would be there twice. On CPU devices they are gathered at once: XLA runs loops that
    do not depend on each other side by side there, and where two of them hold collectives of the
    same group, devices wait for each other for good (seen with JAX 0.10.2; its executor orders the
    beginnings of collectives, and a loop has begun before its collectives have).

    Returns:
        -> the updated ones as they are stored.
    """
    machine, order = machine_of(plan, mesh), parameter_order(plan, trained)
    loops = not _on_cpu(mesh)

    def function(parameter: ParameterLayout) -> Callable[[Value, Value], Value]:
        if parameter.state == parameter.rest:
            return lambda leaf, old: leaf
        stacked = (
            loops and len(parameter.shape) > 2 and not parameter.state[0] and not parameter.rest[0]
        )
        first = 1 if stacked else 0
        gather_one = machine.gather(
            parameter.shape[first:],
            dict(enumerate(tuple(parameter.state)[first:])),
            dict(enumerate(tuple(parameter.rest)[first:])),
        )
        return partial(_over, gather_one) if stacked else lambda leaf, old: gather_one(leaf)

    functions = [function(plan.parameters[i]) for i in order]

    def gather(params: Tree, olds: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(
            [
                function(leaf, old)
                for leaf, old, function in zip(
                    leaves, jax.tree.leaves(olds), functions, strict=True
                )
            ]
        )

    return gather


def _on_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a program's devices are the CPU's; those of an abstract mesh are not known."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def _over(gather: Callable[[Value], Value], stack: Value, old: Value) -> Value:
    """A stack gathered matrix by matrix, each over the old one.

    A loop that stacks its results up begins with zeros, and XLA makes one array of those and of the
    zeros that gradients of stacks begin with: they would be there from the first gradient on (seen
    with JAX 0.10.2: 26 GiB of 90 for Llama 3 8B). The old parameters are donated, and dead by then;
    the barrier keeps the first matrix from being overwritten before all have been read.

    Args:
        stack: the updated matrices, [layers, ...], sharded.
        old: what they were made from, as it is stored, in the same dtype.
    """

    def body(index: Index, out: Value) -> Value:
        matrix = jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, gather(matrix), index, 0)

    start, _ = jax.lax.optimization_barrier((old, stack))
    return jax.lax.fori_loop(0, stack.shape[0], body, start)
