"""A matrix of which a loss takes a slice, or that is only added to activations, with the numbers of
one device: slices are taken of shards, and gradients come back to them over one part of a torus
after the other.
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
SGD = optax.sgd(1.0)
NAMES = {"x": ("batch", "seq", "embed")}
TWO_PARTS = tuple(Link(kind="torus", ways=ways) for ways in (2, 4))


def values(rows):
    sizes = {"table": (rows, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH)}
    return {
        name: jnp.sin(1.0 + i + jnp.arange(float(np.prod(shape)))).reshape(shape)
        for i, (name, shape) in enumerate(sizes.items())
    }


def first_rows(table, x):
    return x + table[:LENGTH]


def some_rows(table, x):
    """Rows from one that is known only when the program runs."""
    start = jnp.argmax(jax.lax.stop_gradient(table[:4]).sum(1))
    return x + jax.lax.dynamic_slice_in_dim(table, start, LENGTH, 0)


def rows_and_a_column(table, x):
    """Another slice, along the dim that is sharded: both are taken of the whole table."""
    return x + table[:LENGTH] + table[:LENGTH, :1]


def every_other_row(table, x):
    return x + jax.lax.slice(table, (1, 0), (1 + 2 * LENGTH, WIDTH), (2, 1))


def rounded(table, x):
    return x + table[:LENGTH].astype(jnp.bfloat16).astype(jnp.float32)


def added(table, x):
    return x + table


def added_first(table, x):
    return table[None].astype(jnp.float32) + x


def added_twice(table, x):
    return jnp.tanh(x + table) + table


def stepped(read, mesh, zero, links=None, rows=ROWS):
    """(parameters after a step, those of one device, program), where explicit gathers and
    reductions run: links are said to be those of a torus.
    """

    def loss(params, batch):
        x = read(params["table"], batch["x"])
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    x = np.cos(np.arange(BATCH * LENGTH * WIDTH, dtype=np.float32))
    batch = {"x": x.reshape(BATCH, LENGTH, WIDTH)}
    first = "positions" if rows == ROWS else "seq"
    axes = {"table": (first, "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
    model = shardlib.tree(lambda key: values(rows), axes)
    pin = {"mesh": mesh, "zero": zero, "microbatches": 1}
    plan = shardlib.plan(model, loss, SGD, batch, topology="cpu:8", pin=pin, batch_axes=NAMES)
    links = links or (Link(kind="torus", ways=mesh["fsdp"]),)
    plan = dataclasses.replace(plan, placement=(("fsdp", links),))
    program = shardlib.compile(model, loss, SGD, batch, plan=plan, batch_axes=NAMES)
    state, _ = program.step(program.init(0), batch)
    gradients = jax.grad(loss)(values(rows), batch)
    return state.params, jax.tree.map(lambda p, g: p - g, values(rows), gradients), program


@pytest.mark.matrix
@pytest.mark.parametrize("zero", (1, 3))
@pytest.mark.parametrize(
    ("read", "mesh"),
    [
        (first_rows, {"fsdp": 8}),
        (some_rows, {"fsdp": 4, "tensor": 2}),
        (every_other_row, {"fsdp": 8}),
        (rows_and_a_column, {"fsdp": 4, "tensor": 2}),
        (rounded, {"fsdp": 8}),
    ],
)
def test_slices_of_shards_compute_the_numbers_of_one_device(read, mesh, zero):
    actual, wanted, program = stepped(read, mesh, zero)
    for name, array in wanted.items():
        # the gradient of a rounded table is a cotangent in bfloat16, summed over the batch
        near = 2e-3 if (read, name) == (rounded, "table") else 1e-6
        np.testing.assert_allclose(actual[name], array, atol=near)
    (table,) = [one for one in program.plan.parameters if one.path == "table"]
    assert "fsdp" not in table.state[0] and "fsdp" in table.state[1]


@pytest.mark.parametrize("read", (added, added_first, added_twice))
@pytest.mark.parametrize("zero", (2, 3))
def test_what_is_only_added_has_the_numbers_of_one_device(read, zero):
    actual, wanted, program = stepped(read, {"fsdp": 8}, zero, TWO_PARTS, LENGTH)
    for name, array in wanted.items():
        np.testing.assert_allclose(actual[name], array, atol=1e-6)
    matrices = 2 if read is added_twice else 3  # of two uses the sum is the compiler's
    text = program.lower().as_text()
    assert text.count("stablehlo.reduce_scatter") == matrices * len(TWO_PARTS)
