"""The outer step of islands, whatever joins them: the outer update, the parameters from which an
island goes on, and the form in which numbers cross; for arrays of JAX (islands in one process) and
of NumPy (islands over TCP) alike.

>>> import numpy as np
>>> numbers, scales = narrow(np.float32([[1.0, -0.5]]), "int8", block=2)
>>> [round(float(number), 3) for number in widen(numbers, scales, "int8", block=2)[0]]
[1.0, -0.504]
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from shardlib.islands.exchanges import BLOCK, DiLoCo, blocks

#: The largest number of so many bits, the same with either sign.
LARGEST = {"int8": 127, "int4": 7}


def outer_update(exchange: DiLoCo, gradient: Any, theta: Any, momentum: Any) -> tuple[Any, Any]:
    """Outer parameters and momentum after an outer gradient, in Nesterov's form
    (arXiv:2311.08105, algorithm 1).
    """
    decay, rate = np.float32(exchange.momentum), np.float32(exchange.rate)
    momentum = gradient + decay * momentum
    return theta - rate * (gradient + decay * momentum), momentum


def mixed(mixing: float, local: Any, theta: Any) -> Any:
    """The parameters from which an island goes on, float32: `mixing` times its own and the rest of
    the outer ones.
    """
    return mixing * local.astype(np.float32) + (1 - mixing) * theta if mixing else theta


def narrow(rows: Any, wire: str, block: int = BLOCK) -> tuple[Any, Any]:
    """Numbers [rows, n] as integers that cross, which no compiler widens, and the float32 scales of
    their blocks [rows, n / block]; None of bfloat16, which has none.
    """
    xp = rows.__array_namespace__()
    if not blocks(wire):
        return rows.astype(ml_dtypes.bfloat16).view(np.uint16), None
    grouped = rows.reshape(rows.shape[0], -1, block)
    scales = xp.max(xp.abs(grouped), axis=-1, keepdims=True) / np.float32(LARGEST[wire])
    rounded = xp.round(grouped / xp.where(scales > 0, scales, np.float32(1)))
    bits = rounded.astype(np.int8).view(np.uint8).reshape(rows.shape[0], -1)
    if wire == "int4":
        bits = (bits[:, ::2] & np.uint8(15)) | (bits[:, 1::2] << np.uint8(4))
    return bits, scales[..., 0]


def widen(bits: Any, scales: Any, wire: str, block: int = BLOCK) -> Any:
    """The float32 numbers of what `narrow` gave."""
    xp = bits.__array_namespace__()
    if not blocks(wire):
        return bits.view(ml_dtypes.bfloat16).astype(np.float32)
    if wire == "int4":
        pairs = xp.stack([bits & np.uint8(15), bits >> np.uint8(4)], axis=-1)
        # four bits with a sign
        integers = (pairs.astype(np.int8) ^ np.int8(8)) - np.int8(8)
    else:
        integers = bits.view(np.int8)
    grouped = integers.reshape(bits.shape[0], -1, block).astype(np.float32)
    return (grouped * scales[..., None]).reshape(bits.shape[0], -1)
