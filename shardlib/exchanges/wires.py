"""In which dtype numbers cross, and how many bytes they are.

A sum in float32 is one all-reduce. What is narrower crosses in two halves, so that it is summed in
float32: each island sends every other one its part of the sum (all-to-all), and then all send the
sums (all-gather). Numbers of "int8" and "int4" have a float32 scale for each block of them, which
travels with them.

>>> wire_bytes("int8", 512), wire_bytes("int4", 512), wire_bytes("bfloat16", 512)
(520, 264, 1024)
"""

from __future__ import annotations

#: Bits of a number, by the word for a wire.
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
WIRES = tuple(BITS)
#: Numbers that share a scale, and bytes of the scale.
BLOCK, SCALE = 256, 4


def padded(wire: str, count: int, islands: int) -> int:
    """How many numbers cross: a whole number of blocks for every island.

    Args:
        wire: as it is spelled.
        count: numbers that there are.
        islands: their number.
    """
    if wire == "float32":
        return count
    part = islands * (BLOCK if blocks(wire) else 1)
    return -(-count // part) * part


def aligned(wire: str, count: int) -> int:
    """Numbers up to where the next block begins. What several devices hold alike shares no block
    with what they hold apart, so that rounding leaves it alike.

    Args:
        wire: as it is spelled.
        count: numbers that there are.
    """
    return -(-count // BLOCK) * BLOCK if blocks(wire) else count


def blocks(wire: str) -> bool:
    """Whether numbers share scales.

    Args:
        wire: as it is spelled.
    """
    return wire in ("int8", "int4")


def wire_bytes(wire: str, count: int) -> int:
    """Bytes of so many numbers, with their scales.

    Args:
        wire: as it is spelled.
        count: numbers; whole blocks.
    """
    return count * BITS[wire] // 8 + (SCALE * count // BLOCK if blocks(wire) else 0)
