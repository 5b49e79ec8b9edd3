"""Decisions that can be fixed by hand for a step, and those that are fixed for every step."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.axes import INNER_AXES
from shardlib.decisions.pins import PinMapping
from shardlib.errors import PinError

#: Decisions that a step leaves open.
OPEN: frozenset[str] = frozenset({"mesh", "rules", "sequence_parallel", "zero", "axis_order"})
#: Mesh axes of a step.
STEP_AXES: tuple[str, ...] = ("data", "fsdp", "tensor")
#: The others, which need the loss apart from its gradients and its update.
FIXED: PinMapping = {
    "microbatches": 1,
    "remat": "none",
    "attention": "traced",
    "collective_matmul": "none",
    "offload": [],
}


def step_pins(pin: PinMapping | None) -> PinMapping:
    """The pins of a search for a step.

    Args:
        pin: what a user fixes.

    Raises:
        PinError: it needs the loss apart from its update.
    """
    given = dict(pin or {})
    refused = [
        word
        for word in given
        if word.split(".")[0] not in OPEN and not (word in FIXED and given[word] == FIXED[word])
    ]
    if refused:
        raise PinError(
            f"{', '.join(refused)}: a step has its loss, its gradients and its update inside, and"
            f" this needs them apart\nTry: shardlib.compile(init, loss, optimizer, batch); of a"
            f" step {', '.join(sorted(OPEN))} can be pinned"
        )
    others = [axis for axis in INNER_AXES if axis not in STEP_AXES]
    mesh = given.get("mesh")
    sizes = (
        {f"mesh.{axis}": size for axis, size in mesh.items()} if isinstance(mesh, Mapping) else {}
    )
    wrong = [
        axis for axis in others if ({**given, **sizes}).get(f"mesh.{axis}", 1) not in (None, 1)
    ]
    if wrong:
        raise PinError(
            f"the mesh of a step has no axis {', '.join(wrong)}: it needs the loss apart from its"
            f" update\nTry: {', '.join(STEP_AXES)}"
        )
    whole = {} if mesh is not None else {f"mesh.{axis}": 1 for axis in others}
    return {**FIXED, **whole, **given}
