"""Runs of parameters to the host, and outer parameters back into them.

A run may begin and end anywhere in a parameter; what lies outside of it stays as it is. Copies are
made on the devices, so that a step may donate the parameters while they are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.exchanges.parts import Part
from shardlib.jax_types import Value
from shardlib.processes.values import whole


def copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies in float32, which nothing donates."""
    return [_copy(array) for array in arrays]


def runs(arrays: Sequence[jax.Array], parts: Sequence[Part]) -> list[np.ndarray]:
    """The runs of parameters, on the host."""
    return [
        whole(array).reshape(-1)[part.start : part.stop]
        for array, part in zip(arrays, parts, strict=True)
    ]


def placed_outer(parameter: jax.Array, outer: np.ndarray) -> jax.Array:
    """An outer parameter, placed as the island's is."""
    # A buffer of its own: on CPU devices a placed array may share the host's, which changes.
    return jax.device_put(np.array(outer), parameter.sharding)


def mixed(parameter: jax.Array, placed: jax.Array, part: Part, mixing: float) -> jax.Array:
    """A parameter whose run has become `mixing` times itself and the rest of the outer one;
    `parameter` is donated.
    """
    bounds = (
        None if part.stop - part.start == math.prod(parameter.shape) else (part.start, part.stop)
    )
    return _mixer(parameter.sharding)(parameter, placed, bounds, mixing)


@cache
def _mixer(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    return jax.jit(_mixed, static_argnums=(2, 3), donate_argnums=0, out_shardings=sharding)


def _mixed(parameter: Value, outer: Value, bounds: tuple[int, int] | None, mixing: float) -> Value:
    target = outer
    if mixing:
        target = mixing * parameter.astype(jnp.float32) + (1 - mixing) * outer
    new = target.astype(parameter.dtype)
    return new if bounds is None else jnp.where(_within(parameter.shape, *bounds), new, parameter)


def _within(shape: tuple[int, ...], start: int, stop: int) -> Value:
    """Where elements have a place from `start` to before `stop`; rows and places in a row are told
    apart, so that no number is larger than an int32.
    """
    each = math.prod(shape[1:])
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    place = jnp.zeros(shape, jnp.int32)
    for dim in range(1, len(shape)):
        stride = math.prod(shape[dim + 1 :])
        place = place + jax.lax.broadcasted_iota(jnp.int32, shape, dim) * stride

    def before(limit: int) -> Value:
        rows, columns = divmod(limit, each)
        return (row < rows) | ((row == rows) & (place < columns))

    return before(stop) & ~before(start)


@jax.jit
def _copy(array: Value) -> Value:
    return jnp.copy(array.astype(jnp.float32))
