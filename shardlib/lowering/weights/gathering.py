"""An operation gets the weight that it uses, as the plan has it in use.

A weight that is stored sharded is gathered where it is used, in the dtype of use, and again in the
backward pass: what is kept between the two are its shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.mesh.collectives import Cuts, Machine, machine_of
from shardlib.lowering.mesh.shardings import parameter_order
from shardlib.lowering.reading.use import Use
from shardlib.planning.decisions.plan_data import ParameterLayout
from shardlib.planning.plan import Plan


def in_use(use: Use, parameter: ParameterLayout, machine: Machine) -> Callable[[Any], Any]:
    """Gathers an operand that is stored sharded, as the plan has its parameter in use.

    Where the stored shards are no pieces of the operand, the compiler is left to find a way.

    Args:
        use: the operation.
        parameter: layouts of its weight.
        machine: the mesh and its collectives.
    """
    if parameter.rest == parameter.compute:
        return lambda operand: operand
    known = [(dim, source) for dim, source in enumerate(use.view.dims) if source is not None]
    held: Cuts = {dim: parameter.compute[source] for dim, source in known}
    rest: Cuts = {dim: parameter.rest[source] for dim, source in known}
    if {axis for cut in held.values() for axis in cut} != set(parameter.compute.axes):
        return lambda operand: operand
    in_pieces = {axis for cut in rest.values() for axis in cut} == set(parameter.rest.axes)
    return machine.gather(use.shape, rest if in_pieces else None, held)


def gather_updated(plan: Plan, trained: Tree, mesh: Mesh | AbstractMesh) -> Callable[[Tree], Tree]:
    """Gathers updated parameters that are stored replicated and whose optimizer state is sharded
    (ZeRO 1 and 2).

    Stacks of matrices are gathered one by one, into the place where the stack is stored: gathered
    at once they would be there twice.

    Args:
        plan: the decisions.
        trained: tree of trained parameters.
        mesh: of the program.
    """
    machine, order = machine_of(plan, mesh), parameter_order(plan, trained)

    def function(one: ParameterLayout) -> Callable[[Any], Any] | None:
        if one.state == one.rest:
            return None
        stacked = len(one.shape) > 2 and not one.state[0] and not one.rest[0]
        first = 1 if stacked else 0
        whole = machine.gather(
            one.shape[first:],
            dict(enumerate(tuple(one.state)[first:])),
            dict(enumerate(tuple(one.rest)[first:])),
        )
        return (lambda leaf: jax.lax.map(whole, leaf)) if stacked else whole

    functions = [function(plan.parameters[i]) for i in order]

    def gather(params: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(
            [
                leaf if function is None else function(leaf)
                for leaf, function in zip(leaves, functions, strict=True)
            ]
        )

    return gather
