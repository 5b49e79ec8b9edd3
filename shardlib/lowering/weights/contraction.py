"""A matmul or convolution of a weight, whose gradient is taken one device at a time.

Left to automatic partitioning, the partial sums of its gradient become an all-reduce of the whole
array, of which every device then keeps its shard: twice the bytes of a reduce-scatter. So the
gradient is taken in a manual region: every device multiplies its own examples by its own part of
the weight's dims, and the result is reduced as `reduction.py` says. The forward pass and the
gradient of the activation stay automatic.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from shardlib.jax_types import DType, Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.large_cotangents import after, mark
from shardlib.lowering.weights.operands import Apart, held_in_use, operand_cuts
from shardlib.lowering.weights.reduction import reduction
from shardlib.planning.plan import ParameterLayout


class Contraction(Apart):
    """A contraction of a weight, taken apart."""

    def op(self, activation: Value, weight: Value) -> Value:
        """The operation."""
        return self.use.pinned((activation, weight) if self.use.operand else (weight, activation))

    def partial_sums(self, activation: Value, cotangent: Value, dtype: DType) -> Value:
        """The gradient of the weight from one device's examples, inside a manual region.

        Args:
            dtype: of the sums.
        """
        return self.use.gradient(
            self.use.operand, activation, cotangent, jax.ShapeDtypeStruct(self.local_shape, dtype)
        )

    def to_activation(self, activation: Value, weight: Value, cotangent: Value) -> Value:
        """The gradient of the activation."""
        return self.use.to_activation(activation, weight, cotangent)

    def adds_in(self, sums: DType) -> DType:
        """The dtype in which partial sums are made: that of the weight."""
        return self.use.dtype


def contraction_of(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Contraction | None:
    """A contraction taken apart; None where the batch is not sharded, or the gradient cannot be
    taken one device at a time.
    """
    weight_cuts = held_in_use(use, parameter)
    cuts = None if weight_cuts is None else operand_cuts(use, result, weight_cuts)
    if weight_cuts is None or cuts is None:
        return None
    plan = reduction(use, parameter.gradient, cuts.partial, machine, weight_cuts)
    return Contraction(
        use=use,
        plan=plan,
        held=weight_cuts,
        partial=cuts.partial,
        arguments=(
            machine.spec(cuts.activation, use.other.ndim),
            machine.spec(cuts.result, len(result)),
        ),
        kept=machine.spec(
            {
                dim: (*weight_cuts.get(dim, ()), *plan.scattered.get(dim, ()))
                for dim in range(len(use.shape))
            },
            len(use.shape),
        ),
        local_shape=tuple(
            size // machine.ways(weight_cuts.get(dim, ())) for dim, size in enumerate(use.shape)
        ),
    )


def reduced_contraction(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Value] | None:
    """A contraction whose gradient by the weight is reduced to the stored layout at once; None
    where it cannot be taken apart.
    """
    contraction = contraction_of(use, result, parameter, machine)
    if contraction is None:
        return None
    gathered, marks = in_use(use, parameter, machine), contraction.marks(machine)

    def forward(activation: Value, weight: Value) -> Value:
        return contraction.op(activation, gathered(use.moved(weight)))

    @jax.custom_vjp
    def run(activation: Value, weight: Value) -> Value:
        return forward(activation, weight)

    def backward(saved: tuple[Value, Value], cotangent: Value) -> tuple[Value, Value]:
        activation, weight = saved

        def local(activation: Value, cotangent: Value) -> tuple[Value, ...]:
            sums = contraction.partial_sums(activation, cotangent, weight.dtype)
            return contraction.plan.apply(sums, machine), *(mark(sums) for _ in marks)

        gradient, *marked = machine.manual(
            local, contraction.arguments, (contraction.kept, *marks)
        )(activation, cotangent)
        back = contraction.to_activation(activation, gathered(use.moved(weight)), cotangent)
        return after(back, marked), gradient

    def saving(activation: Value, weight: Value) -> tuple[Value, tuple[Value, Value]]:
        recomputed = use.found_again(activation)
        return forward(recomputed, weight), (recomputed, weight)

    run.defvjp(saving, backward)
    return (
        (lambda activation, weight: run(use.kept(activation), weight))
        if use.operand
        else lambda weight, activation: run(use.kept(activation), weight)
    )
