"""Any step on any mesh gives the numbers of plain JAX on one device: with its losses marked or not,
with losses that close over their batch, and with several kinds of gradients in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import shardlib
from tests.frontend.equality import compiled, reference, require_near
from tests.frontend.examples import EXAMPLES, Example
from tests.frontend.marked import MARKED, in_batch
from tests.frontend.test_unmarked import adversaries, shared

ALL = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES: dict[str, dict[str, Any]] = {
    "data8": {"mesh": {"data": 8}},
    "tensor4": {"mesh": {"tensor": 4}},
    **{f"fsdp8-zero{zero}": {"mesh": {"fsdp": 8}, "zero": zero} for zero in (1, 3)},
    **{f"all-zero{zero}": {"mesh": ALL, "zero": zero} for zero in (1, 2, 3)},
    "fsdp4-tensor2-zero3": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    "planned": {},
}
#: Meshes with microbatches, which a marked loss can be split into.
PARTS: dict[str, dict[str, Any]] = {
    "data4-parts4": {"mesh": {"data": 4}, "microbatches": 4},
    **{
        f"all-zero{zero}-parts2": {"mesh": ALL, "zero": zero, "microbatches": 2}
        for zero in (1, 2, 3)
    },
    "fsdp4-zero3-parts4": {"mesh": {"fsdp": 4}, "zero": 3, "microbatches": 4},
    "marked-planned": {},
}
#: Plans of repeated layers, in one loss that gets all weights.
DEEP: dict[str, dict[str, Any]] = {
    "remat": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 2, "remat": "full"},
    "context2-parts2": {"mesh": {"data": 2, "context": 2}, "microbatches": 2},
    "stage2-parts4": {"mesh": {"data": 2, "stage": 2}, "microbatches": 4},
    "stage2-fsdp4-zero2": {"mesh": {"fsdp": 4, "stage": 2}, "microbatches": 2, "zero": 2},
}
#: Meshes of those that call `shardlib.attention` and `shardlib.visit`.
CALLS: dict[str, dict[str, Any]] = {
    "attending ring": {"mesh": {"data": 2, "context": 2}, "microbatches": 2, "context": "ring"},
    "attending ulysses": {"mesh": {"fsdp": 2, "context": 2}, "zero": 3, "context": "ulysses"},
    "experts dropless": {
        "mesh": {"data": 2, "expert": 2},
        "microbatches": 2,
        "experts": "dropless",
    },
    "experts zero3": {"mesh": {"fsdp": 2, "expert": 4}, "zero": 3, "experts": "dropless"},
}
PINS = {**MESHES, **PARTS, **DEEP, **CALLS}


def closing(loss: Any, **options: Any) -> Any:
    """The form of Flax's examples: of params alone, with the batch from outside."""

    def gradients(params: Any, *rest: Any) -> Any:
        return shardlib.value_and_grad(lambda params: loss(params, *rest), **options)(params)

    return gradients


def mixed(value_and_grad: Any) -> Example:
    """The first of two losses is marked."""
    return adversaries(value_and_grad, jax.value_and_grad)


def twice(value_and_grad: Any) -> Example:
    """A marked loss beside another one of the same weights."""
    return shared(jax.value_and_grad, value_and_grad)


UNMARKED = {"mixed": mixed, "twice": twice}
MAKERS: dict[str, Callable[..., Example]] = {**MARKED, "in_batch": in_batch, **UNMARKED}
CASES = [
    *((name, "unmarked", mesh) for name in EXAMPLES for mesh in MESHES),
    *((name, "marked", mesh) for name in MARKED for mesh in PARTS),
    *((name, "marked", mesh) for name in ("language_model", "dpo") for mesh in DEEP),
    *((mesh.split()[0], "marked", mesh) for mesh in CALLS),
    *((name, "closing", "all-zero3-parts2") for name in MARKED),
    *(("in_batch", "marked", mesh) for mesh in ("fsdp8-zero3", "all-zero2", "remat")),
    *((name, "marked", f"all-zero{zero}-parts2") for name in UNMARKED for zero in (1, 3)),
]
GRADIENTS = {
    "unmarked": jax.value_and_grad,
    "marked": shardlib.value_and_grad,
    "closing": closing,
}


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize(("name", "gradients", "mesh"), CASES)
def test_a_step_gives_the_numbers_of_one_device(name: str, gradients: str, mesh: str):
    make, pin = MAKERS[name], PINS[mesh]
    example = make(GRADIENTS[gradients])
    program = compiled(example, pin)
    assert program.plan.microbatches == pin.get("microbatches", program.plan.microbatches)
    state = program.init(seed=3)
    for wanted in reference(make):
        state, metrics = program.step(state, example.batch)
        require_near((state, metrics), wanted)
    kept = jax.tree.map(lambda leaf, asked: leaf.sharding == asked.sharding, state, program.state)
    assert all(jax.tree.leaves(kept))
    warnings = [one for one in program.findings if one.code == "unmarked-gradient"]
    assert len(warnings) == (name in UNMARKED)
    assert all("one of 2 microbatches" in one.message for one in warnings)
