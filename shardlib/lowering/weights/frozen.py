"""How does an operation get a frozen weight that is stored sharded?

It is gathered where it is used, as trained ones are (`shardlib.lowering.weights.gradients`), and
has no gradient: the backward pass gathers it again for the gradient of the activation. What is kept
between the two are its pieces alone; the activation is not kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardlib.lowering.reading.use import Use


def regathered(use: Use, gathered: Callable[[Any], Any]) -> Callable[..., Any]:
    """An operation whose weight is frozen: gathered forward, and again backward.

    Args:
        use: the operation.
        gathered: gathers the operand that is the weight.
    """
    if use.equation.name == "gather":
        return lambda table, *others: use.run((gathered(use.moved(table)), *others))

    def run(activation: Any, weight: Any) -> Any:
        like = jax.ShapeDtypeStruct(activation.shape, activation.dtype)

        def forward(activation: Any, weight: Any) -> Any:
            whole = gathered(use.moved(weight))
            return use.run((activation, whole) if use.operand else (whole, activation))

        @jax.custom_vjp
        def apart(activation: Any, weight: Any) -> Any:
            return forward(activation, weight)

        def backward(weight: Any, cotangent: Any) -> tuple[Any, None]:
            return use.gradient(1 - use.operand, gathered(use.moved(weight)), cotangent, like), None

        apart.defvjp(lambda activation, weight: (forward(activation, weight), weight), backward)
        return apart(activation, weight)

    return (
        (lambda activation, weight: run(use.kept(activation), weight))
        if use.operand
        else lambda weight, activation: run(use.kept(activation), weight)
    )
