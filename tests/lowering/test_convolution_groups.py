"""Gradients of convolutions in groups are those of one device on every mesh. XLA's automatic
partitioning doubles them where rows are sharded and another axis has nothing to do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib
from tests.zoo.parity import capture, relative_errors

ROWS, CHANNELS = 16, 8
MESHES: dict[str, dict[str, Any]] = {
    "rows and tensor": {"mesh": {"data": 4, "tensor": 2}},
    "zero 3": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3},
    "microbatches": {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 2, "microbatches": 2},
}
#: Tensor shards the layers behind the convolution, and not its channels.
RULES = (("batch", ("data", "fsdp")), ("wide", "tensor"))
AXES = {"up": (None, "wide"), "down": ("wide", None)}
#: Groups, window and size of an image, and channels that are made of each group.
FORMS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {
    "depthwise": (CHANNELS, (7, 7), (2, 2), 1),
    "two groups": (2, (3, 3), (4, 4), 1),
    "multiplied": (CHANNELS, (3, 3), (4, 4), 2),
    "causal": (CHANNELS, (4,), (12,), 1),
}


def job(form: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Parameters, a loss and a batch; `first` makes the channels, `groups` is in groups."""
    groups, window, size, times = FORMS[form]
    made = CHANNELS * times

    def init(key: jax.Array) -> dict[str, jax.Array]:
        shapes = {
            "first": (3, CHANNELS),
            "groups": (made, CHANNELS // groups, *window),
            "up": (made, 16),
            "down": (16, 5),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(one, shape) / shape[0]
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = jnp.moveaxis(batch["x"] @ params["first"], -1, 1)
        padding = [(n - 1, 0) for n in window]
        x = jax.lax.conv_general_dilated(
            x, params["groups"], (1,) * len(window), padding, feature_group_count=groups
        )
        found = jnp.tanh(jnp.tanh(jnp.moveaxis(x, 1, -1)) @ params["up"]) @ params["down"]
        return ((found.mean(tuple(range(1, found.ndim - 1))) - batch["y"]) ** 2).mean()

    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(ROWS, *size, 3)), numbers.normal(size=(ROWS, 5))
    return init, loss, {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def require_near(mine: Any, theirs: Any) -> None:
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_of_groups_get_the_gradient_of_one_device(form: str, mesh: str):
    init, loss, batch = job(form)
    program = shardlib.compile(
        shardlib.tree(init, AXES),
        loss,
        capture(),
        batch,
        topology="cpu:8",
        pin={**MESHES[mesh], "rules": RULES},
    )
    assert max(relative_errors(program, loss, batch).values()) <= 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_so_do_those_of_a_step_of_the_users_own(form: str):
    init, loss, batch = job(form)

    def step(params: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda one, by: one - by, params, gradients), {"loss": value}

    wanted = jax.jit(step)(jax.jit(init)(jax.random.key(0)), batch)
    program = shardlib.compile_step(
        init,
        step,
        batch,
        topology="cpu:8",
        pin={"mesh": {"data": 4, "tensor": 2}, "rules": RULES},
        axes=AXES,
    )
    require_near(program.step(program.init(seed=0), batch), wanted)
