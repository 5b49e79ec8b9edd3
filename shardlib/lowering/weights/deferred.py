"""An operation on a weight, whose partial sums are kept over several runs and reduced once.

run(activation, weight, sums)      d/d sums = this device's partial sums;  d/d weight = 0
finish(activation, weight, sums)   d/d weight = the reduced gradient of this run and of `sums`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.contraction import Contraction, contraction_of
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.large_cotangents import after, mark
from shardlib.lowering.weights.lookup import Lookup, lookup_of
from shardlib.planning.plan import ParameterLayout

#: (activation, weight, sums) -> result.
Operation = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """An operation whose weight is gathered before it runs, and whose gradient is reduced after
    several runs.

    Attributes:
        use: the operation.
        run: (operands in order, sums) -> result. The gradient of the weight is left to `sums`, any
            array of the shape `sums`: their gradient are the partial sums of every device.
        finish: (operands in order, sums) -> result, in the last run: `sums` are those of all runs
            before, and the gradient of the weight is that of all runs, reduced. The gradient of
            `sums` is what every device keeps for the next step; zeros where it keeps nothing.
        gathers: whether the weight is stored sharded.
        gather: the operand as it rests -> in use.
        sums: shape and dtype of partial sums, [devices that have some, ...].
        cuts: how they are sharded.
        reduce: partial sums -> the gradient of the operand, as it rests.
    """

    use: Use
    run: Callable[[Sequence[Any], Any], Any]
    finish: Callable[[Sequence[Any], Any], Any]
    gathers: bool
    gather: Callable[[Any], Any]
    sums: jax.ShapeDtypeStruct
    cuts: PartitionSpec
    reduce: Callable[[Any], Any]


def deferred(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine, *, lookups: bool = False
) -> Deferred | None:
    """The same operation as `reduced`, in the form of `Deferred`; None for lookups unless they are
    asked for.
    """
    looks = use.equation.name == "gather"
    if (looks and not lookups) or not parameter.trained:
        return None
    operation = (lookup_of if looks else contraction_of)(use, result, parameter, machine)
    if operation is None:
        return None
    rank, size = len(use.shape), machine.ways(operation.partial)
    cuts = PartitionSpec(machine.parts(operation.partial), *machine.spec(operation.held, rank))

    def in_order(function: Callable[..., Any]) -> Callable[[Sequence[Any], Any], Any]:
        return lambda operands, sums: function(
            use.kept(operands[1 - use.operand]), operands[use.operand], sums
        )

    gathered = in_use(use, parameter, machine)
    return Deferred(
        use=use,
        run=in_order(_run(use, operation, machine, cuts)),
        finish=in_order(_finish(use, operation, machine, cuts)),
        gathers=parameter.rest != parameter.compute,
        gather=lambda operand: gathered(use.moved(operand)),
        sums=jax.ShapeDtypeStruct((size, *use.shape), use.dtype),
        cuts=cuts,
        reduce=machine.manual(
            lambda sums: operation.plan.apply(sums[0], machine), (cuts,), operation.kept
        ),
    )


def _run(
    use: Use, operation: Contraction | Lookup, machine: Machine, cuts: PartitionSpec
) -> Operation:
    """(activation, weight, sums) -> result, whose partial sums are the gradient of `sums`."""
    marks = operation.marks(machine)

    @jax.custom_vjp
    def run(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.op(activation, weight)

    def backward(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any) -> tuple[Any, ...]:
            partial = operation.partial_sums(activation, cotangent, operation.adds_in(sums.dtype))
            return partial[None].astype(sums.dtype), *(mark(partial) for _ in marks)

        partial_sums, *marked = machine.manual(local, operation.arguments, (cuts, *marks))(
            activation, operation.moved(cotangent)
        )
        back = after(operation.to_activation(activation, weight, cotangent), marked)
        return back, jnp.zeros_like(weight), partial_sums

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = use.found_again(activation)
        # of what holds the sums, the backward pass wants the dtype alone
        return operation.op(read, weight), (read, weight, jnp.zeros((), sums.dtype))

    run.defvjp(forward, backward)
    return run


def _finish(
    use: Use, operation: Contraction | Lookup, machine: Machine, cuts: PartitionSpec
) -> Operation:
    """(activation, weight, sums) -> result, whose gradient of the weight is that of all runs."""
    marks = operation.marks(machine)

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = use.found_again(activation)
        return operation.op(read, weight), (read, weight, sums)

    @jax.custom_vjp
    def finish(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.op(activation, weight)

    def backward_of_all(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any, sums: Any) -> tuple[Any, ...]:
            partial = operation.partial_sums(activation, cotangent, operation.adds_in(sums.dtype))
            gradient, residual = operation.plan.exchanged(
                partial.astype(sums.dtype) + sums[0], machine
            )
            return (
                gradient.astype(weight.dtype),
                *(mark(partial) for _ in marks),
                *(() if residual is None else (residual[None],)),
            )

        results = (operation.kept, *marks, *((cuts,) if machine.exchange.keeps else ()))
        gradient, *outputs = machine.manual(local, (*operation.arguments, cuts), results)(
            activation, operation.moved(cotangent), sums
        )
        marked, residual = outputs[: len(marks)], outputs[len(marks) :]
        return (
            after(operation.to_activation(activation, weight, cotangent), marked),
            gradient,
            residual[0] if residual else jnp.zeros_like(sums),
        )

    finish.defvjp(forward, backward_of_all)
    return finish
