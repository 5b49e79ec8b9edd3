"""Rows from place to place, with gathers alone in both directions.

The gradient of a gather is a scatter that adds, which is slow where rows are wide. Where it is
known which row every place takes and which places every row goes to, the gradient is a gather as
well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def moved(copies: int, rows: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """Copies of rows in their places.

    Args:
        rows: [N, D].
        there: number of the copy that is in each of M places, int [M]; -1 for none.
        back: place of every copy, int [N copies]; -1 where it has none. The reverse of `there`.

    Returns:
        [M, D], zeros where there is no copy.
    """
    return _moved(copies, rows, there, back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved(copies: int, rows: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    return taken(rows, there, copies)


def taken(rows: jax.Array, numbers: jax.Array, copies: int = 1) -> jax.Array:
    """Rows by the numbers of their copies, zeros for -1.

    Args:
        rows: [N, D].
        numbers: of copies, int [M]; -1 for none.

    Returns:
        [M, D].
    """
    return jnp.where(
        (numbers >= 0)[:, None],
        jnp.take(rows, jnp.maximum(numbers, 0) // copies, axis=0, mode="clip"),
        0,
    )


def _forward(copies: int, rows: jax.Array, there: jax.Array, back: jax.Array) -> tuple[Any, Any]:
    return taken(rows, there, copies), back


def _backward(copies: int, back: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    home = taken(cotangent, back)
    if copies > 1:
        home = (
            home.reshape(-1, copies, home.shape[1])
            .sum(1, dtype=jnp.float32)
            .astype(cotangent.dtype)
        )
    return home, None, None


_moved.defvjp(_forward, _backward)
