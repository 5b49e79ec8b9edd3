"""Result types of HLO as text: the parts of a tuple, dtypes and dims of arrays, their bytes.

>>> elements("(f32[8,4]{1,0}, bf16[2])")
('f32[8,4]{1,0}', 'bf16[2]')
>>> arrays("(f32[8,4]{1,0}, bf16[2])"), array_bytes("(f32[8,4]{1,0}, bf16[2])")
([('f32', (8, 4)), ('bf16', (2,))], 132)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

#: Bits of an element; tokens and opaque values have none.
BITS: Mapping[str, int] = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3fnuz": 8,
    "f8e4m3b11fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")


class HloError(ValueError):
    """A piece of text that is no HLO, or that uses a word this reader does not know."""


def elements(shape: str) -> tuple[str, ...]:
    """The parts of a tuple type, or the type itself."""
    if not shape.startswith("("):
        return (shape,)
    parts: list[str] = []
    inside = shape[1:-1] + ","
    start = depth = 0
    for position, letter in enumerate(inside):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            part = re.sub(r"/\*.*?\*/", "", inside[start:position]).strip()
            parts += [part] if part else []
            start = position + 1
    return tuple(parts)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array of a type."""
    typed_dims: list[tuple[str, tuple[int, ...]]] = []
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)):
        if dtype not in BITS:
            raise HloError(f"unknown element type {dtype!r}")
        if "<" in dims:
            raise HloError(f"a dim of {dtype}[{dims}] is not static")
        typed_dims.append((dtype, tuple(int(size) for size in dims.split(",") if size.strip())))
    return typed_dims


def array_bytes(shape: str) -> int:
    """Bytes of all arrays of a type, without padding."""
    return sum(-(-BITS[dtype] * math.prod(dims) // 8) for dtype, dims in arrays(shape))
