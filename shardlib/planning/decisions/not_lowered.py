"""Decisions that are planned and priced, and of which no program can be made yet.

>>> from shardlib.axes import MeshShape
>>> waits_for(Decisions(mesh=MeshShape(data=2), dtypes=(("moment_dtype", "float8_e5m2"),)))
('moment dtype float8_e5m2',)
"""

from __future__ import annotations

from shardlib.decisions.dtypes import Allowed
from shardlib.decisions.table import TABLE, Decisions
from shardlib.schedules.table import lowered

#: Mesh axes that programs are lowered to today; plans may use the others, and say so.
LOWERED_AXES: tuple[str, ...] = ("stage", "data", "fsdp", "expert", "context", "tensor")
#: Dtypes that programs are lowered to; those of 64 bits need a mode of JAX.
LOWERED_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
#: Dtypes of products beside them: what is stored in 8 bits would need scales that are stored with
#: it.
LOWERED_PRODUCTS: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")
_NOT_LOWERED: tuple[str, ...] = tuple(word for word, entry in TABLE.items() if not entry.lowered)


def waits_for(decisions: Decisions, *, by_group: bool = False) -> tuple[str, ...]:
    """What of a plan has no lowering yet.

    Args:
        decisions: of a plan, or of a candidate.
        by_group: whether the layer groups of a candidate follow policies of their own.
    """
    one = decisions
    waits = [f"the {axis} axis" for axis in one.mesh if axis not in LOWERED_AXES]
    waits += [] if lowered(one.schedule) else [f"the schedule {one.schedule}"]
    if "stage" in one.mesh:
        waits += (
            ["rematerialising by layer group in stages"]
            if by_group or one.remat_classes
            else ["recomputing a part of the layers of stages"]
            if one.remat_layers
            else []
        )
    waits += (
        ["activations in host memory"]
        if "activations" in one.offload and ("stage" in one.mesh or one.remat == "none")
        else []
    )
    waits += [
        f"{word.replace('_', ' ')} {dtype}"
        for word, dtype in one.dtypes
        if not _lowered(word, dtype)
    ]
    waits += ["axes in another order on the links"] if one.axis_order else []
    waits += [
        f"{word.replace('_', ' ')} {getattr(one, word)}"
        for word in _NOT_LOWERED
        if getattr(one, word) != TABLE[word].default
    ]
    return tuple(waits)


def lowered_dtypes(allowed: Allowed) -> Allowed:
    """Of dtypes that are allowed those that programs are lowered to."""
    return tuple(
        (word, tuple(dtype for dtype in dtypes if _lowered(word, dtype)))
        for word, dtypes in allowed
    )


def _lowered(word: str, dtype: str) -> bool:
    return dtype in LOWERED_DTYPES or (word == "matmul_dtype" and dtype in LOWERED_PRODUCTS)
