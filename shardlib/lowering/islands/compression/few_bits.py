"""Gradients in few bits a number, in a region that is manual over all mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardlib.axes import ISLAND
from shardlib.exchanges.compressors import Quantised
from shardlib.jax_types import Value
from shardlib.lowering.islands.compression.matrices import Gradient
from shardlib.lowering.islands.meeting.wires import joined, packed, split, unpacked


def quantised(
    by: Quantised, islands: int, sums: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """What is sent of gradients. Who sums a part of them rounds the mean as well, and keeps what
    that leaves out.

    Args:
        by: dtype and block.
    """
    rows = joined(sums, by.dtype, islands, by.block)
    bits = packed(rows, by.dtype, by.block)
    left = rows - unpacked(bits, by.dtype, by.block)
    mine = jax.lax.all_to_all(bits, ISLAND.name, 0, 0, tiled=True)
    mean = jnp.mean(unpacked(mine, by.dtype, by.block), axis=0, keepdims=True)
    sent = packed(mean, by.dtype, by.block)
    over = islands * (mean - unpacked(sent, by.dtype, by.block))
    left = left.at[jax.lax.axis_index(ISLAND.name)].add(over[0])
    every = jax.lax.all_gather(sent, ISLAND.name, axis=0, tiled=True)
    means = unpacked(every, by.dtype, by.block)
    return split(means, sums, by.dtype, by.block), split(left, sums, by.dtype, by.block)


def signs(
    gradients: Sequence[Gradient], islands: int, sums: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """What is sent of gradients: their signs, times the mean of their absolute numbers."""
    scales = [_scale(*one) for one in zip(gradients, sums, strict=True)]
    mine = [_signs(one, scale) for one, scale in zip(sums, scales, strict=True)]
    bits = [_bits(one) for one in sums]
    numbers = jax.lax.bitcast_convert_type(jnp.stack(scales), jnp.uint8).reshape(-1)
    every = jax.lax.all_gather(jnp.concatenate([*bits, numbers]), ISLAND.name)
    ends = jax.lax.bitcast_convert_type(
        every[:, -4 * len(sums) :].reshape(islands, len(sums), 4), jnp.float32
    )
    means, start = list[Value](), 0
    for number, (one, own) in enumerate(zip(sums, bits, strict=True)):
        part = every[:, start : start + own.shape[0]]
        start += own.shape[0]
        spread = (part[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        flat = spread.reshape(islands, -1)[:, : math.prod(one.shape)].astype(jnp.float32)
        total = jnp.sum((2 * flat - 1) * ends[:, number, None], axis=0)
        means.append((total / islands).reshape(one.shape))
    return means, [one - sent for one, sent in zip(sums, mine, strict=True)]


def _scale(gradient: Gradient, total: Value) -> Value:
    """The mean of the absolute numbers of a whole parameter."""
    found = jnp.sum(jnp.abs(total))
    if gradient.every:
        found = jax.lax.psum(found, gradient.every)
    return found / max(1, math.prod(gradient.shape))


def _signs(total: Value, scale: Value) -> Value:
    return jnp.where(total >= 0, scale, -scale)


def _bits(total: Value) -> Value:
    """Eight signs a byte."""
    flat = (total.reshape(-1) >= 0).astype(jnp.uint8)
    wide = jnp.pad(flat, (0, -flat.shape[0] % 8)).reshape(-1, 8)
    return jnp.sum(wide << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)
