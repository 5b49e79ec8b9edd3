"""The gradient of a weight is made before the gradient of its activation is handed on, where that
keeps a large cotangent from waiting.

Both gradients of a head read the cotangent of the logits, which is far larger than the activations
of the last layer. Nothing asks for the gradient of the weight before the step ends, so XLA for GPUs
may make it after the loop over layers, and the cotangent of the logits takes memory all the way
back. Here, the layers go back when every device has its partial sums:

    partial sums = activation^T x cotangent         one of their elements marks that they are there
    to the layers = barrier(cotangent x weight^T, mark)
    gradient = reduced partial sums                 whenever the links are free

The barrier computes nothing: no number changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax

from shardlib.jax_types import Aval, Value
from shardlib.lowering.reading.use import Use

Gradient = TypeVar("Gradient", jax.Array, "jax.Array | None")

#: How many times the activation a result is that should not wait. Float32 logits of published
#: models are 16 times (Llama 3 405B) to several hundred times the activations that they are made
#: of; what the layers of a model make of one that are written out, up to 8 times (gate and up in
#: one).
LARGE = 10


def outgrows(use: Use) -> bool:
    """Whether the result of a contraction of a weight takes far more memory than its activation,
    and is made once in a step or microbatch: the logits.
    """
    result = use.equation.eqn.outvars[0].aval
    once = "body" not in use.equation.path.split("/")
    return once and _bytes(result) >= LARGE * _bytes(use.other)


def _bytes(aval: Aval) -> int:
    return aval.size * aval.dtype.itemsize


def mark(sums: Value) -> Value:
    """An element of one device's partial sums, [1]; inside a manual region."""
    return jax.lax.slice(sums, (0,) * sums.ndim, (1,) * sums.ndim).reshape(1)


def after(value: Gradient, marks: Sequence[Value]) -> Gradient:
    """A value that nothing reads before some marks are there; itself where there are none.

    Args:
        value: the gradient of an activation; None where it has none.
    """
    return jax.lax.optimization_barrier((value, *marks))[0] if marks else value
