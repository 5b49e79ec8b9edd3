"""A matrix that is only added to activations: the positions of a vision transformer.

Its gradient is the sum of the cotangent over the batch. Left to automatic partitioning, TPUs make a
reduce-scatter of that where the batch is sharded over one dim of the torus, and an all-reduce where
over several. So every device sums over its own examples, and the partial sums are reduced as
`reduction.py` says.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from shardlib.jax_types import Value
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.reduction import reduction
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.rewriting.binding import bind


def reduced_sum(
    use: Use, batch: tuple[str, ...], parameter: ParameterLayout, machine: Machine
) -> Callable[..., Value] | None:
    """An addition of a matrix that is gathered, and whose gradient is reduced to the stored layout
    at once; None where the compiler does so, or it is not the first dim alone that is summed over.
    """
    rank, rows = len(use.shape), use.other.shape[0]
    if (
        not parameter.trained
        or parameter.compute.axes
        or not machine.torus
        or len(machine.parts(batch)) < 2
        or rows % machine.ways(batch)
        or tuple(use.other.shape) != (rows, *use.shape[1:])
        or use.shape[0] != 1
    ):
        return None
    plan = reduction(use, parameter.gradient, batch, machine)
    if not plan.scattered:
        return None
    gathered = in_use(use, parameter, machine)
    regions = (machine.spec({0: batch}, rank),), machine.spec(plan.scattered, rank)

    def forward(activation: Value, weight: Value) -> Value:
        return bind(use.equation, (activation, gathered(weight)))[0]

    @jax.custom_vjp
    def run(activation: Value, weight: Value) -> Value:
        return forward(activation, weight)

    def local(cotangent: Value) -> Value:
        return plan.apply(cotangent.sum(0, keepdims=True), machine)

    run.defvjp(
        lambda activation, weight: (forward(activation, weight), None),
        lambda _, cotangent: (cotangent, machine.manual(local, *regions)(cotangent)),
    )
    return run if use.operand else lambda weight, activation: run(activation, weight)
