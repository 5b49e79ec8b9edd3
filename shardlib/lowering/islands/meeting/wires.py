"""Means over islands, in the dtype that crosses.

A narrower dtype than float32 is summed in float32: each island gets its part of the numbers of all
(all-to-all), and the means of the parts of all (all-gather). Numbers and their scales cross as
integers of their bits, which no compiler widens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardlib.axes import ISLAND
from shardlib.exchanges.wires import BLOCK, blocks, padded, spaces
from shardlib.jax_types import Value

#: The largest number of so many bits, the same with either sign.
LARGEST = {"int8": 127, "int4": 7}


def means(arrays: Sequence[Value], wire: str, islands: int) -> list[Value]:
    """The means over islands of what one device of each holds, in a region that is manual over all
    mesh axes.

    In float32 each array is reduced by itself, flat: a TPU pads the last two dims of an array to
    whole tiles, and sends them so.

    Args:
        wire: dtype that crosses.
    """
    if wire == "float32":
        return [jax.lax.pmean(one.reshape(-1), ISLAND.name).reshape(one.shape) for one in arrays]
    rows = joined(arrays, wire, islands)
    mine = jax.lax.all_to_all(packed(rows, wire), ISLAND.name, 0, 0, tiled=True)
    mean = jnp.mean(unpacked(mine, wire), axis=0, keepdims=True)
    every = jax.lax.all_gather(packed(mean, wire), ISLAND.name, axis=0, tiled=True)
    return split(unpacked(every, wire), arrays, wire)


def joined(arrays: Sequence[Value], wire: str, islands: int, block: int = BLOCK) -> Value:
    """Arrays one after the other, each in whole blocks, as rows for every island.

    Args:
        wire: dtype that crosses.
    """
    sizes = [math.prod(one.shape) for one in arrays]
    room = spaces(wire, sizes, block)
    rest = padded(wire, sizes, islands, block) - sum(room)
    flat = [
        jnp.pad(one.reshape(-1), (0, space - size))
        for one, size, space in zip(arrays, sizes, room, strict=True)
    ]
    return jnp.concatenate([*flat, jnp.zeros(rest, jnp.float32)]).reshape(islands, -1)


def split(rows: Value, like: Sequence[Value], wire: str, block: int = BLOCK) -> list[Value]:
    """The arrays of what `joined` gave.

    Args:
        wire: dtype that crosses.
    """
    flat, found, start = rows.reshape(-1), list[Value](), 0
    sizes = [math.prod(one.shape) for one in like]
    for one, size, space in zip(like, sizes, spaces(wire, sizes, block), strict=True):
        found.append(flat[start : start + size].reshape(one.shape))
        start += space
    return found


def packed(rows: Value, wire: str, block: int = BLOCK) -> Value:
    """Rows of numbers as integers that cross: of each row the numbers, then their scales.

    Args:
        wire: dtype that crosses.
    """
    if not blocks(wire):
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    grouped = rows.reshape(rows.shape[0], -1, block)
    scale = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / LARGEST[wire]
    number = jnp.round(grouped / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(number, jnp.uint8).reshape(rows.shape[0], -1)
    if wire == "int4":
        bits = (bits[:, ::2] & 15) | (bits[:, 1::2] << 4)
    scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8).reshape(rows.shape[0], -1)
    return jnp.concatenate([bits, scales], axis=1)


def unpacked(rows: Value, wire: str, block: int = BLOCK) -> Value:
    """The float32 numbers of what `packed` gave.

    Args:
        wire: dtype that crosses.
    """
    if not blocks(wire):
        return jax.lax.bitcast_convert_type(rows, jnp.bfloat16).astype(jnp.float32)
    each = block if wire == "int8" else block // 2
    groups = rows.shape[1] // (each + 4)
    bits, scales = rows[:, : groups * each], rows[:, groups * each :]
    if wire == "int4":
        low, high = bits & 15, bits >> 4
        bits = jnp.stack([low, high], axis=-1).reshape(rows.shape[0], -1)
        number = jnp.where(bits > 7, bits.astype(jnp.int32) - 16, bits.astype(jnp.int32))
    else:
        number = jax.lax.bitcast_convert_type(bits, jnp.int8)
    scale = jax.lax.bitcast_convert_type(scales.reshape(-1, groups, 4), jnp.float32)
    grouped = number.reshape(-1, groups, block).astype(jnp.float32) * scale[..., None]
    return grouped.reshape(rows.shape[0], -1)
