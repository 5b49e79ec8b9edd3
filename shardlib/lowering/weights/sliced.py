"""A slice of a parameter that is stored sharded: taken of the shards, and gathered after that.

Of a table of positions [4096, embed_F] a sequence of 1,024 tokens reads as many rows: every device
takes those of its own columns, and they are gathered in the dtype of their use. Gathered before the
slice, it would be the whole table in the dtype in which it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.jax_types import Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.use import Use
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.rewriting.binding import bind


def gathered_slice(
    use: Use, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Value] | None:
    """A slice of a parameter that gathers what it takes, and whose gradient comes back as the
    optimizer reads it; None where the parameter is sharded along a dim that the slice shortens.
    """
    out = use.equation.eqn.outvars[0].aval
    if use.operand != 0 or None in use.view.dims or not parameter.trained:
        return None

    def along(layout: Layout) -> Cuts:
        return {
            dim: layout[source] for dim, source in enumerate(use.view.dims) if source is not None
        }

    compute, stored, gradient = map(along, (parameter.compute, parameter.rest, parameter.gradient))
    if not any(gradient.values()) or any(
        cuts[dim]
        for cuts in (compute, stored, gradient)
        for dim, size in enumerate(out.shape)
        if size < use.shape[dim]
    ):
        return None
    gathered = machine.gather(out.shape, stored, compute)
    # Over the batch the gradient is scattered first; what shards its rows is gathered after that.
    gradient_spec = machine.spec(gradient, out.ndim)
    scattered = PartitionSpec(*(axes or PartitionSpec.UNCONSTRAINED for axes in gradient_spec))
    steps = [NamedSharding(machine.mesh, spec) for spec in (scattered, gradient_spec)]

    def taken(table: Value, *starts: Value) -> Value:
        return bind(use.equation, (table, *starts))[0]

    def forward(table: Value, *starts: Value) -> Value:
        return gathered(taken(use.moved(table), *starts)).astype(out.dtype)

    @jax.custom_vjp
    def run(table: Value, *starts: Value) -> Value:
        return forward(table, *starts)

    def backward(starts: tuple[Value, ...], cotangent: Value) -> tuple[Value | None, ...]:
        summed = cotangent if use.rows is None else cotangent.astype(use.rows)
        for sharding in steps:
            summed = jax.lax.with_sharding_constraint(summed, sharding)
        table = jax.ShapeDtypeStruct(use.shape, use.dtype)
        padded = jax.linear_transpose(lambda table: taken(table, *starts), table)
        return (*padded(summed.astype(out.dtype)), *(None for _ in starts))

    run.defvjp(lambda table, *starts: (forward(table, *starts), starts), backward)
    return run
