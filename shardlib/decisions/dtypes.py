"""What has a dtype of its own in a plan, and which dtypes there are.

>>> ordered({"moment_dtype": "bfloat16", "param_dtype": "float32"})
(('param_dtype', 'float32'), ('moment_dtype', 'bfloat16'))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from shardlib.errors import PinError
from shardlib.graph.graph import ITEMSIZE
from shardlib.untrusted.json_types import Json
from shardlib.untrusted.shown import shown

#: What has a dtype: stored parameters; operands of the products of layers' weights; gradients kept
#: over the microbatches of a step; gradients in collectives; the arrays of optimizer state that
#: have a parameter's shape.
DTYPES: tuple[str, ...] = (
    "param_dtype",
    "matmul_dtype",
    "gradient_dtype",
    "reduction_dtype",
    "moment_dtype",
)
#: Dtypes that programs are lowered to; and those of products beside them.
LOWERED_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
LOWERED_PRODUCTS: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")
#: What people call some of them.
SHORT: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp8", "e4m3", "float8"), "float8_e4m3fn"),
}
#: (what, dtype) of everything whose dtype is not that of the traced model, in the order of
#: `DTYPES`.
Dtypes = tuple[tuple[str, str], ...]
#: (what, dtypes) that the planner may choose beside those of the traced model.
Allowed = tuple[tuple[str, tuple[str, ...]], ...]


def read_dtype(word: str, value: object) -> str:
    """A dtype of floating-point numbers; an error names those that have a lowering.

    >>> import numpy as np
    >>> read_dtype("moment_dtype", np.float16), read_dtype("moment_dtype", np.dtype("float32"))
    ('float16', 'float32')

    Args:
        word: of the decision, for messages.
        value: its name; or a dtype or scalar type of NumPy or JAX, such as `jnp.bfloat16`.

    Raises:
        PinError: it is none.
    """
    name = _name(value)
    if name is None or "float" not in name or name not in ITEMSIZE:
        legal = lowered_dtypes(word.rpartition(".")[2])
        meant = SHORT.get(value.lower()) if isinstance(value, str) else None
        raise PinError(
            f"{word} is {shown(value)}; it is one of {', '.join(legal)}"
            + (f"; did you mean {meant!r}?" if meant in legal else "")
        )
    return name


def _name(value: object) -> str | None:
    """What a dtype is called: by its name, or as an object of NumPy or JAX; None for what is none
    of these.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, np.dtype | type):
        return None
    try:
        return np.dtype(cast("type[Any]", value)).name
    except TypeError:
        return None


def lowered_dtypes(word: str) -> tuple[str, ...]:
    """The dtypes that programs can have something in.

    >>> lowered_dtypes("moment_dtype")
    ('float32', 'bfloat16', 'float16')

    Args:
        word: what has the dtype, such as "moment_dtype".
    """
    return (*LOWERED_DTYPES, *(LOWERED_PRODUCTS if word == "matmul_dtype" else ()))


def ordered(words: Mapping[str, str]) -> Dtypes:
    """Dtypes in their order."""
    return tuple((word, words[word]) for word in DTYPES if word in words)


def read_dtypes(word: str, value: Json) -> Dtypes:
    """Dtypes from a mapping.

    Args:
        value: {"moment_dtype": "bfloat16", ...}.
    """
    return ordered({name: read_dtype(name, dtype) for name, dtype in _named(word, value).items()})


def read_allowed(word: str, value: Json) -> Allowed:
    """Dtypes that the planner may choose, from a mapping to one or several.

    Args:
        value: {"moment_dtype": ["bfloat16", ...], ...}.
    """
    listed = {
        name: [dtypes] if _name(dtypes) else dtypes for name, dtypes in _named(word, value).items()
    }
    for name, dtypes in listed.items():
        if not isinstance(dtypes, list | tuple):
            raise PinError(f"{word}.{name} is {dtypes!r}; it is a list of dtypes")
    return tuple(
        (name, tuple(dict.fromkeys(read_dtype(f"{word}.{name}", dtype) for dtype in listed[name])))
        for name in DTYPES
        if name in listed
    )


def _named(word: str, value: Any) -> Mapping[str, Any]:
    """A mapping from what has a dtype."""
    unknown = (
        [name for name in cast("Mapping[str, Any]", value) if name not in DTYPES]
        if isinstance(value, Mapping)
        else None
    )
    if unknown is None:
        raise PinError(f"{word} is {value!r}; it is a mapping from {', '.join(DTYPES)}")
    if unknown:
        raise PinError(
            f"{word} names {', '.join(map(repr, unknown))}; dtypes are those of {', '.join(DTYPES)}"
        )
    return cast("Mapping[str, Any]", value)
