"""A table of which a loss takes a slice, with the numbers of one device: the slice is taken of the
shards, and its gradient comes back to them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.planner.plan import Link

ROWS, LENGTH, WIDTH, BATCH = 32, 8, 16, 16
AXES = {"positions": ("positions", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
SGD = optax.sgd(1.0)


def values():
    sizes = {"positions": (ROWS, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH)}
    return {
        name: jnp.sin(1.0 + i + jnp.arange(float(np.prod(shape)))).reshape(shape)
        for i, (name, shape) in enumerate(sizes.items())
    }


def first_rows(table):
    return table[:LENGTH]


def some_rows(table):
    """Rows from one that is known only when the program runs."""
    start = jnp.argmax(jax.lax.stop_gradient(table[:4]).sum(1))
    return jax.lax.dynamic_slice_in_dim(table, start, LENGTH, 0)


def rows_and_a_column(table):
    """Another slice, along the dim that is sharded: both are taken of the whole table."""
    return table[:LENGTH] + table[:LENGTH, :1]


def every_other_row(table):
    return jax.lax.slice(table, (1, 0), (1 + 2 * LENGTH, WIDTH), (2, 1))


def loss_with(rows, dtype=jnp.float32):
    def loss(params, batch):
        x = batch["x"] + rows(params["positions"]).astype(dtype).astype(jnp.float32)
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    return loss


def updated(loss, batch, mesh, zero):
    """Parameters after a step, where explicit gathers and reductions run: links are said to be
    those of a torus.
    """
    model = shardlib.tree(lambda key: values(), AXES)
    given = {
        "topology": "cpu:8",
        "pin": {"mesh": mesh, "zero": zero, "microbatches": 1},
        "batch_axes": {"x": ("batch", "seq", "embed")},
    }
    plan = shardlib.plan(model, loss, SGD, batch, **given)
    link = Link(kind="torus", ways=mesh["fsdp"])
    program = shardlib.compile(
        model,
        loss,
        SGD,
        batch,
        plan=dataclasses.replace(plan, placement=(("fsdp", (link,)),)),
        batch_axes=given["batch_axes"],
    )
    state, _ = program.step(program.init(0), batch)
    layout = next(one for one in plan.parameters if one.path.endswith("positions"))
    return jax.tree.map(np.asarray, state.params), layout


@pytest.mark.parametrize("zero", (1, 3))
@pytest.mark.parametrize("mesh", ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}), ids=str)
@pytest.mark.parametrize("rows", (first_rows, some_rows, every_other_row, rows_and_a_column))
def test_slices_of_shards_compute_the_numbers_of_one_device(rows, mesh, zero):
    batch = {"x": np.cos(np.arange(BATCH * LENGTH * WIDTH, dtype=np.float32))}
    batch = {"x": batch["x"].reshape(BATCH, LENGTH, WIDTH)}
    loss = loss_with(rows)
    wanted = jax.tree.map(lambda p, g: p - g, values(), jax.grad(loss)(values(), batch))
    found, layout = updated(loss, batch, mesh, zero)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), wanted, found)
    assert "fsdp" not in layout.state[0] and "fsdp" in layout.state[1]


def test_slices_are_rounded_as_the_loss_rounds_them():
    batch = {"x": np.ones((BATCH, LENGTH, WIDTH), np.float32)}
    loss = loss_with(first_rows, jnp.bfloat16)
    wanted = jax.tree.map(lambda p, g: p - g, values(), jax.grad(loss)(values(), batch))
    found, _ = updated(loss, batch, {"fsdp": 8}, 3)
    # the gradient of the table is a cotangent in bfloat16, which is summed over the batch
    np.testing.assert_allclose(found["up"], wanted["up"], atol=1e-6)
    np.testing.assert_allclose(found["positions"], wanted["positions"], atol=2e-3)
