"""What does one device do, when the sequence is gathered for its matmuls, or the results of one are
scattered?

The functions run inside of a region that is manual over all axes; arrays are what one device has.
The gradient of a matmul that gathers is one that scatters, and the other way around; the gradient
of a weight is added up over pieces in float32. A matmul waits for the one before it where that
hides more (`Ring.after`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index
from shardlib.lowering.collective_matmul.ring import Ring
from shardlib.lowering.weights.contraction import Contraction


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matmul of an activation and a weight in which one dim of both activation and result is the
    sequence.

    Attributes:
        parts: the matmul, taken apart.
        activation: that dim of the activation.
        result: that dim of the result.
    """

    parts: Contraction
    activation: int
    result: int


def gathering(
    products: Sequence[Product], ring: Ring, activation: jax.Array, weights: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Products of an activation of which every device has a piece."""

    def work(results: Any, device: Any, piece: Any) -> list[Any]:
        return [
            put(
                results and results[k],
                product.parts.op(piece, weight),
                product.result,
                device,
                ring.ways,
            )
            for k, (product, weight) in enumerate(zip(products, weights, strict=True))
        ]

    return tuple(ring.folded(activation, work))


def gathering_back(
    products: Sequence[Product],
    ring: Ring,
    activation: jax.Array,
    weights: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Gradients of `gathering`: of the own piece of the activation, and of the weights from this
    device's examples.
    """

    def given(device: Index) -> list[jax.Array]:
        return [
            piece_of(cotangent, product.result, device, ring.ways)
            for product, cotangent in zip(products, cotangents, strict=True)
        ]

    def back(pieces: list[jax.Array]) -> jax.Array:
        total: Any = None
        for product, weight, piece in zip(products, weights, pieces, strict=True):
            product_gradient = product.parts.to_activation(activation, weight, piece)
            total = product_gradient if total is None else total + product_gradient
        return total

    def work(sums: Any, device: Any, piece: Any) -> list[Any]:
        return [
            added(
                sums and sums[k],
                product.parts.partial_sums(
                    piece, piece_of(cotangent, product.result, device, ring.ways), weight.dtype
                ),
            )
            for k, (product, weight, cotangent) in enumerate(
                zip(products, weights, cotangents, strict=True)
            )
        ]

    sums = ring.folded(activation, work)
    return ring.summed(given, back), tuple(
        total.astype(weight.dtype) for total, weight in zip(sums, weights, strict=True)
    )


def scattering(product: Product, ring: Ring, activation: jax.Array, weight: jax.Array) -> jax.Array:
    """A product that is a sum over devices, each of which is to have a piece."""
    return ring.summed(
        lambda device: piece_of(activation, product.activation, device, ring.ways),
        lambda piece: product.parts.op(piece, weight),
    )


def scattering_back(
    product: Product, ring: Ring, activation: jax.Array, weight: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `scattering`: of the activation, and of the weight from this device's
    examples.
    """
    piece_shape = jax.eval_shape(
        lambda: piece_of(activation, product.activation, jnp.int32(0), ring.ways)
    )

    def work(totals: Any, device: Any, piece: Any) -> tuple[Any, Any]:
        to_activation, total = totals or (None, None)
        to_activation = put(
            to_activation,
            product.parts.to_activation(piece_shape, weight, piece),
            product.activation,
            device,
            ring.ways,
        )
        return to_activation, added(
            total,
            product.parts.partial_sums(
                piece_of(activation, product.activation, device, ring.ways), piece, weight.dtype
            ),
        )

    to_activation, total = ring.folded(cotangent, work)
    return to_activation, total.astype(weight.dtype)


def added(total: jax.Array | None, part: jax.Array) -> jax.Array:
    """A sum of parts of a gradient, at least in float32.

    Args:
        total: the sum so far; None for nothing.
    """
    part = part.astype(jnp.promote_types(part.dtype, jnp.float32))
    return part if total is None else total + part


def put(array: jax.Array | None, piece: jax.Array, dim: int, device: Index, size: int) -> jax.Array:
    """The array with the shard of a device in its place; an array is begun where there is none.

    Args:
        array: the array; None for none yet.
    """
    begun: jax.Array = (
        jax.lax.empty(
            (*piece.shape[:dim], size * piece.shape[dim], *piece.shape[dim + 1 :]), piece.dtype
        )
        if array is None
        else array
    )
    return jax.lax.dynamic_update_slice_in_dim(begun, piece, device * piece.shape[dim], axis=dim)


def piece_of(array: jax.Array, dim: int, device: Index, ways: int) -> jax.Array:
    """The shard of a device."""
    size = array.shape[dim] // ways
    return jax.lax.dynamic_slice_in_dim(array, device * size, size, axis=dim)
