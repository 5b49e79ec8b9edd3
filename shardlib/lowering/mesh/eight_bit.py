"""Products of weights in formats of 8 bits.

Operands are divided by their largest element, over that of the format, and cast (arXiv:2209.05433);
the product adds up in float32. Going back, the cotangent is cast to float8_e5m2, which has the
range that gradients need, and both gradients are products of 8 bits too. Scales and casts are those
of qwix.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import MissingPackageError

#: Format of cotangents.
BACK = jnp.float8_e5m2
#: (contracted dims, batch dims) of both operands, as `jax.lax.dot_general` has them.
Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def is_eight_bit(dtype: jax.typing.DTypeLike | None) -> TypeGuard[np.dtype]:
    """Whether a dtype needs scales."""
    return dtype is not None and jnp.dtype(dtype).itemsize == 1


def require_qwix() -> None:
    """Checks that the library of products is installed, without loading it."""
    if importlib.util.find_spec("qwix") is None:
        raise MissingPackageError(
            "products in 8 bits are those of qwix, which is not installed\nTry: pip install"
            " 'shardlib[fp8]'  (or: pip install qwix)"
        )


def product(
    numbers: Numbers,
    ranks: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    result: jax.typing.DTypeLike,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A product of two arrays in 8 bits, with gradients.

    Args:
        dtype: of the operands.
        result: dtype of the result.
    """

    def made(left: jax.Array, right: jax.Array) -> jax.Array:
        return _dot(left, right, numbers, dtype, dtype).astype(result)

    run = jax.custom_vjp(made)

    def backward(
        saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        left, right = saved
        return gradient(numbers, ranks, 0, right, cotangent, dtype).astype(left.dtype), gradient(
            numbers, ranks, 1, left, cotangent, dtype
        ).astype(right.dtype)

    # Not `run`: what a policy of rematerialisation saves it must see.
    run.defvjp(lambda left, right: (made(left, right), (left, right)), backward)
    return run


def gradient(
    numbers: Numbers,
    ranks: tuple[int, int],
    side_of_result: int,
    operand: jax.Array,
    cotangent: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The gradient of one operand of a product, float32, from the other one and the cotangent of
    the result.

    Args:
        dtype: of 8 bits, that the product is made in.
    """
    contracted, batch = numbers
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    opposite, along = 1 - side_of_result, len(batch[0])
    first = along + (len(free[0]) if opposite else 0)
    back: Numbers = (
        (tuple(range(first, first + len(free[opposite]))), tuple(free[opposite])),
        (tuple(range(along)), tuple(batch[opposite])),
    )
    # Dims of the result: those that go along, those of the operand alone, and the contracted ones
    # in the order of the other operand.
    order = [
        *batch[side_of_result],
        *free[side_of_result],
        *(
            dim
            for _, dim in sorted(zip(contracted[opposite], contracted[side_of_result], strict=True))
        ),
    ]
    return _dot(cotangent, operand, back, BACK, dtype).transpose(np.argsort(order))


def _dot(
    left: jax.Array,
    right: jax.Array,
    numbers: Numbers,
    left_dtype: jax.typing.DTypeLike,
    right_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    import qwix

    return qwix.dot_general(
        qwix.quantize(left, left_dtype),
        qwix.quantize(right, right_dtype),
        numbers,
        preferred_element_type=jnp.float32,
    )
