"""In which dtype numbers cross, and how many bytes they are.

A sum in float32 is one all-reduce. What is narrower crosses in two halves, so that it is summed in
float32: each island sends every other one its part of the sum (all-to-all), and then all send the
sums (all-gather). Numbers of "int8" and "int4" have a float32 scale for each block of them, which
travels with them.

>>> wire_bytes("int8", 512), wire_bytes("int4", 512), wire_bytes("bfloat16", 512)
(520, 264, 1024)
"""

from __future__ import annotations

from collections.abc import Iterable

#: Bits of a number, by the word for a wire.
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
WIRES = tuple(BITS)
#: Numbers that share a scale, and bytes of the scale.
BLOCK, SCALE = 256, 4


def spaces(wire: str, sizes: Iterable[int], block: int = BLOCK) -> list[int]:
    """How many places each array has: whole blocks, so that scales are those of one array, and
    devices that hold the same of it send the same.
    """
    each = block if blocks(wire) else 1
    return [-(-size // each) * each for size in sizes]


def padded(wire: str, sizes: Iterable[int], islands: int, block: int = BLOCK) -> int:
    """How many numbers cross: a whole number of blocks for every island."""
    count = sum(spaces(wire, sizes, block))
    if wire == "float32":
        return count
    part = islands * (block if blocks(wire) else 1)
    return -(-count // part) * part


def blocks(wire: str) -> bool:
    """Whether numbers share scales."""
    return wire in ("int8", "int4")


def wire_bytes(wire: str, count: int, block: int = BLOCK) -> int:
    """Bytes of so many numbers, with their scales."""
    return count * BITS[wire] // 8 + (SCALE * count // block if blocks(wire) else 0)
