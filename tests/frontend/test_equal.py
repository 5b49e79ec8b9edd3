"""Any step on any mesh gives the numbers of plain JAX on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import shardlib
from tests.frontend.examples import EXAMPLES

STEPS = 3
MESHES: dict[str, dict[str, Any]] = {
    "data8": {"mesh": {"data": 8}},
    "tensor4": {"mesh": {"tensor": 4}},
    **{f"fsdp8-zero{zero}": {"mesh": {"fsdp": 8}, "zero": zero} for zero in (1, 3)},
    **{
        f"all-zero{zero}": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": zero}
        for zero in (1, 2, 3)
    },
    "fsdp4-tensor2-zero3": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    "planned": {},
}


def plain(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf,
            np.float64,
        )
        for leaf in jax.tree.leaves(tree)
    ]


@cache
def reference(name: str) -> list[list[np.ndarray]]:
    example = EXAMPLES[name]()
    step, state = jax.jit(example.step), jax.jit(example.init)(jax.random.key(3))
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, example.batch)
        found.append(plain((state, metrics)))
    return found


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str):
    example = EXAMPLES[name]()
    program = shardlib.compile_step(
        example.init,
        example.step,
        example.batch,
        topology="cpu:8",
        pin=MESHES[mesh],
        batch_axes=example.batch_axes,
    )
    state = program.init(seed=3)
    for wanted in reference(name):
        state, metrics = program.step(state, example.batch)
        for mine, theirs in zip(plain((state, metrics)), wanted, strict=True):
            assert np.abs(mine - theirs).max(initial=0) <= 1e-5 * max(
                1.0, np.abs(theirs).max(initial=0)
            )
    kept = jax.tree.map(lambda leaf, asked: leaf.sharding == asked.sharding, state, program.state)
    assert all(jax.tree.leaves(kept))
