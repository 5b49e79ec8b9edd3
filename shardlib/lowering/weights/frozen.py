"""How does an operation get a frozen weight that is stored sharded?

It is gathered where it is used, as trained ones are (`shardlib.lowering.weights.gradients`), and
has no gradient: the backward pass gathers it again for the gradient of the activation. What is kept
between the two are its pieces alone; the activation is not kept for it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from shardlib.jax_types import Value
from shardlib.lowering.reading.use import Use


def regathered(use: Use, gathered: Callable[[Value], Value]) -> Callable[..., Value]:
    """An operation whose weight is frozen: gathered forward, and again backward."""
    if use.equation.name == "gather":
        return lambda table, *others: use.run((gathered(use.moved(table)), *others))

    def run(activation: Value, weight: Value) -> Value:
        like = jax.ShapeDtypeStruct(activation.shape, activation.dtype)

        def forward(activation: Value, weight: Value) -> Value:
            operand = gathered(use.moved(weight))
            return use.run((activation, operand) if use.operand else (operand, activation))

        @jax.custom_vjp
        def apart(activation: Value, weight: Value) -> Value:
            return forward(activation, weight)

        def backward(weight: Value, cotangent: Value) -> tuple[Value, None]:
            return use.gradient(1 - use.operand, gathered(use.moved(weight)), cotangent, like), None

        apart.defvjp(lambda activation, weight: (forward(activation, weight), weight), backward)
        return apart(activation, weight)

    return (
        (lambda activation, weight: run(use.kept(activation), weight))
        if use.operand
        else lambda weight, activation: run(use.kept(activation), weight)
    )
