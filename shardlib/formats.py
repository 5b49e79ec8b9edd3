"""Number formats: their bytes, what multiplies them, and what programs do with them.

>>> FORMATS["nvfp4"].bytes, FORMATS["float8_e5m2"].units
(0.5625, ('float8_e4m3fn', 'bfloat16', 'float32'))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of numbers.

    Attributes:
        bytes: of an element, with its share of the scale of a block; elements of less than a byte
            without such scales count whole ones, as they are stored on CPUs.
        units: formats in which matrix units without this one multiply it, the best first.
        floating: True for floating-point formats, which a plan can choose.
        scaled: True if operands of products are scaled to its range.
        stored: True if programs store parameters, gradients and optimizer state in it.
        multiplied: True if programs multiply in it.
        words: common abbreviations.
    """

    bytes: float
    units: tuple[str, ...] = ()
    floating: bool = False
    scaled: bool = False
    stored: bool = False
    multiplied: bool = False
    words: tuple[str, ...] = ()


_WIDE = Format(bytes=4, floating=True, stored=True, multiplied=True)
_HALF = replace(_WIDE, bytes=2)
_INT8 = Format(bytes=1, units=("bfloat16", "float32"), scaled=True)
_INT4 = replace(_INT8, units=("int8", *_INT8.units))
_FP8 = Format(bytes=1, units=("float8_e4m3fn", *_INT8.units), floating=True, scaled=True)

#: Every format by its name: dtypes of JAX, and formats of blocks that share a scale, of which
#: "mxfp8" has a byte for 32 elements (Open Compute Project, "OCP Microscaling Formats (MX)"), and
#: "nvfp4" a byte for 16 elements of 4 bits (arXiv:2509.25149, section 2).
FORMATS: Mapping[str, Format] = {
    "float32": replace(_WIDE, units=("bfloat16",), words=("fp32", "f32", "float", "single")),
    "bfloat16": replace(_HALF, units=("float16", "float32"), words=("bf16", "bfloat")),
    "float16": replace(_HALF, units=("bfloat16", "float32"), words=("fp16", "f16", "half")),
    "float8_e4m3fn": replace(_FP8, multiplied=True, words=("fp8", "e4m3", "float8")),
    "float8_e5m2": replace(_FP8, multiplied=True),
    "mxfp8": replace(_FP8, bytes=1 + 1 / 32),
    "nvfp4": replace(_FP8, bytes=1 / 2 + 1 / 16, units=("float4_e2m1fn", *_FP8.units)),
    **dict.fromkeys(
        (
            *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3"),
            *("float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"),
        ),
        _FP8,
    ),
    "int8": _INT8,
    **dict.fromkeys(("uint8", "int4", "uint4"), _INT4),
    **dict.fromkeys(("bool", "int1", "uint1", "int2", "uint2"), Format(bytes=1)),
    **dict.fromkeys(("int16", "uint16"), Format(bytes=2)),
    **dict.fromkeys(("int32", "uint32"), Format(bytes=4)),
    **dict.fromkeys(("int64", "uint64", "complex64"), Format(bytes=8)),
    "float64": Format(bytes=8, floating=True),
    "complex128": Format(bytes=16),
}


def bytes_of(name: str) -> float:
    """Bytes of an element; 4 for a dtype that is not among `FORMATS`, such as keys."""
    return FORMATS[name].bytes if name in FORMATS else 4
