"""Decisions that can be fixed by hand for a step, and those that are fixed for every step."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.axes import INNER_AXES
from shardlib.decisions.pin_words import aliased
from shardlib.decisions.pins import PinMapping
from shardlib.decisions.readers import PinValue
from shardlib.errors import PinError, raise_all

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
#: Decisions about what a marked step has outside of its losses, as they are for every one.
CLOSED: PinMapping = {
    "offload": [],
    "pipeline": "lockstep",
    "exchange": "exact",
    "dtypes": {},
    "allow": {},
    **dict.fromkeys(
        ("param_dtype", "gradient_dtype", "reduction_dtype", "moment_dtype", "matmul_dtype"), None
    ),
}


def step_pins(pin: PinMapping | None) -> PinMapping:
    """The pins of a search for a step."""
    given = aliased(pin or {})
    refused = [
        word
        for word in given
        if word.split(".")[0] not in OPEN and not (word in FIXED and given[word] == FIXED[word])
    ]
    if refused:
        raise PinError(
            f"{', '.join(refused)}: a step has its loss, its gradients and its update inside, and"
            f" this needs them apart\nTry: shardlib.value_and_grad(loss) in the step, which marks"
            f" it; of a step that does not, {', '.join(sorted(OPEN))} can be pinned"
        )
    others = [axis for axis in INNER_AXES if axis not in STEP_AXES]
    sizes = _sizes(given)
    wrong = [axis for axis in others if sizes.get(axis, 1) not in (None, 1)]
    if wrong:
        raise PinError(
            f"the mesh of a step has no axis {', '.join(wrong)}: it needs the loss apart from its"
            f" update\nTry: {', '.join(STEP_AXES)}; or shardlib.value_and_grad(loss) in the step"
        )
    whole = {} if given.get("mesh") is not None else {f"mesh.{axis}": 1 for axis in others}
    return {**FIXED, **whole, **given}


def marked_pins(pin: PinMapping | None, unstaged: str, unsharded: str) -> PinMapping:
    """The pins of a search for a step that marks its losses."""
    given = aliased(pin or {})
    refused = [word for word in given if word in CLOSED and given[word] != CLOSED[word]]
    if refused:
        raise PinError(
            f"{', '.join(refused)}: a step updates its state itself, in dtypes and memories of its"
            " own\nTry: shardlib.compile(init, loss, optimizer, batch)"
        )
    why = {
        **({"stage": unstaged} if unstaged else {}),
        **({"context": unsharded, "expert": unsharded} if unsharded else {}),
    }
    sizes = _sizes(given)
    wrong = [
        f"{axis}: {reason}" for axis, reason in why.items() if sizes.get(axis, 1) not in (None, 1)
    ]
    if wrong:
        raise_all(
            PinError,
            "the mesh of this step has no such axes",
            wrong,
            hint="one marked loss that gets all weights and has all calls",
        )
    whole = {} if "mesh" in given else {f"mesh.{axis}": 1 for axis in why}
    return {**{word: CLOSED[word] for word in ("offload", "pipeline")}, **whole, **given}


def _sizes(pins: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Pinned sizes of mesh axes, None where one is left open."""
    mesh = pins.get("mesh")
    return {
        **{
            word.removeprefix("mesh."): size
            for word, size in pins.items()
            if word.startswith("mesh.")
        },
        **({str(axis): size for axis, size in mesh.items()} if isinstance(mesh, Mapping) else {}),
    }
