"""Gradients as matrices of low rank (PowerSGD, arXiv:1905.13727), in a region that is manual over
all mesh axes: rows and columns may be sharded, so products are summed inside of an island before
they cross.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardlib.axes import ISLAND
from shardlib.jax_types import Value
from shardlib.lowering.islands.compression.matrices import Axes, Gradient
from shardlib.planning.islands.compression import PASSES

#: Relative size of what keeps the products of nearly dependent columns positive, and absolute.
SHIFT, LEAST = 1e-6, 1e-30


def low_rank(
    gradients: Sequence[Gradient], sums: Sequence[Value], factors: Sequence[Value]
) -> tuple[list[Value], list[Value], list[Value]]:
    """What is sent of gradients."""
    found = [_sent(*one) for one in zip(gradients, sums, factors, strict=True)]
    means, residuals, after = (list(one) for one in zip(*found, strict=True))
    return means, residuals, after


def _sent(gradient: Gradient, total: Value, factor: Value) -> tuple[Value, Value, Value]:
    if not gradient.matrix:
        return _mean(total), jnp.zeros_like(total), factor
    layers, rows, columns = gradient.matrices
    matrix = total.reshape(layers, rows, columns)
    right = factor.reshape(layers, columns, -1)
    left = _mean(_summed(matrix @ right, gradient.columns))
    left = _orthonormal(left, gradient.rows)
    right = _mean(_summed(matrix.transpose(0, 2, 1) @ left, gradient.rows))
    sent = (left @ right.transpose(0, 2, 1)).reshape(total.shape)
    return sent, total - sent, right.reshape(factor.shape)


def _orthonormal(left: Value, rows: Axes) -> Value:
    """Orthonormal columns with the same span, by Cholesky factors of their products: the first time
    shifted, then as often as makes them orthonormal to rounding (Fukaya et al., "Shifted Cholesky
    QR", arXiv:1809.11085). A QR of a sharded matrix would be gathered.
    """
    rank = left.shape[-1]
    norms = jnp.sqrt(_summed(jnp.sum(left * left, axis=1, keepdims=True), rows))
    left = left / jnp.where(norms > 0, norms, 1)
    for number in range(PASSES):
        products = _summed(left.transpose(0, 2, 1) @ left, rows)
        shift = (SHIFT if number == 0 else 0.0) * rank + LEAST
        lower = jnp.linalg.cholesky(products + shift * jnp.eye(rank))
        left = jax.lax.linalg.triangular_solve(
            lower, left, left_side=False, lower=True, transpose_a=True
        )
    return left


def _summed(array: Value, axes: Axes) -> Value:
    return jax.lax.psum(array, axes) if axes else array


def _mean(array: Value) -> Value:
    return jax.lax.pmean(array.reshape(-1), ISLAND.name).reshape(array.shape)
