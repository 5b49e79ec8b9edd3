"""Linear algebra and random numbers row by row couple no rows; a loss that is written for one
number of rows is told so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.frontend.model import problem

BATCH = {
    "x": np.zeros((16, 4), np.float32),
    "a": np.zeros((16, 4, 4), np.float32),
}


def rows(loss):
    return problem(shardlib.tree(lambda key: {"w": jnp.eye(4)}), loss, optax.sgd(1.0), BATCH).rows


BY_ROW = {
    "solve": lambda p, b: jnp.linalg.solve(b["a"] @ p["w"], b["x"][..., None]),
    "solve of one matrix": lambda p, b: jax.vmap(lambda x: jnp.linalg.solve(p["w"], x))(b["x"]),
    "inv": lambda p, b: jnp.linalg.inv(b["a"] @ p["w"]),
    "cholesky": lambda p, b: jnp.linalg.cholesky(b["a"] @ p["w"]),
    "qr": lambda p, b: jnp.linalg.qr(b["a"] @ p["w"])[1],
    "eigh": lambda p, b: jnp.linalg.eigh(b["a"] @ p["w"])[0],
    "svd": lambda p, b: jnp.linalg.svd(b["a"] @ p["w"], compute_uv=False),
    "slogdet": lambda p, b: jnp.linalg.slogdet(b["a"] @ p["w"])[1],
    "triangular": lambda p, b: jax.scipy.linalg.solve_triangular(
        b["a"] @ p["w"], b["x"][..., None]
    ),
    "lu": lambda p, b: jax.lax.linalg.lu(b["a"] @ p["w"])[0],
    "fft": lambda p, b: jnp.abs(jnp.fft.fft(b["x"] @ p["w"])),
    "a token for each row": lambda p, b: jnp.concatenate(
        [jnp.tile(p["w"][None, :1], (len(b["x"]), 2, 1)), b["a"] @ p["w"]], 1
    ),
}
COUPLED = {
    "cholesky over rows": lambda p, b: jnp.linalg.cholesky((b["x"] @ p["w"]) @ (b["x"] @ p["w"]).T),
    "svd over rows": lambda p, b: jnp.linalg.svd(b["x"] @ p["w"], compute_uv=False),
    "solve over rows": lambda p, b: jnp.linalg.solve(
        b["x"] @ b["x"].T + jnp.sum(p["w"]) * jnp.eye(len(b["x"])), b["x"]
    ),
    "fft over rows": lambda p, b: jnp.abs(jnp.fft.fft(b["x"] @ p["w"], axis=0)),
    "a key for each row by a loop": lambda p, b: jax.lax.scan(
        lambda key, x: (jax.random.split(key)[0], x @ p["w"] * jax.random.normal(key)),
        jax.random.PRNGKey(0),
        b["x"],
    )[1],
    "a counter of rows": lambda p, b: jax.lax.scan(
        lambda number, x: (number + 1, x @ p["w"] * number), 1.0, b["x"]
    )[1],
    "gamma of what is learned": lambda p, b: jax.random.gamma(
        jax.random.PRNGKey(0), jnp.exp(b["x"] @ p["w"])
    ),
    "weights that are tiled over the rows": lambda p, b: (
        b["x"][:, 0] * jnp.tile(p["w"][0], len(b["x"]) // 4)
    ),
    "another generator in a loop": lambda p, b: jax.lax.scan(
        lambda x, key: (jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ p["w"], 0), None),
        b["x"],
        jax.random.split(jax.random.key(0, impl="rbg"), 3),
    )[0],
}


@pytest.mark.parametrize("name", BY_ROW)
def test_each_matrix_of_a_stack_is_worked_on_by_itself(name):
    found = rows(lambda p, b: jnp.mean(BY_ROW[name](p, b) ** 2))
    assert found.loss.kind == "mean", found.reasons


@pytest.mark.parametrize("name", COUPLED)
def test_what_meets_is_never_split(name):
    assert not rows(lambda p, b: jnp.mean(COUPLED[name](p, b) ** 2)).splits


def test_a_key_made_from_the_number_of_rows_is_that_of_the_whole_batch():
    def loss(p, b):
        key = jax.random.fold_in(jax.random.PRNGKey(0), len(b["x"]))
        return jnp.mean(b["x"] @ p["w"] * jax.random.normal(key, b["x"].shape))

    assert rows(loss).loss.kind == "weighted mean"


def test_a_loss_that_fixes_its_number_of_rows_is_told_so():
    def loss(p, b):
        return jnp.mean((b["x"] @ p["w"]).reshape(16, 2, 2) ** 2), {"sum": jnp.sum(b["x"])}

    found = rows(loss)
    assert len(found.reasons) == 1
    assert "its number of rows is fixed: with 32 rows in place of 16" in found.reasons[0]
    assert "test_by_row.py:" in found.reasons[0]
    with pytest.raises(shardlib.PinError, match="is written for one number of rows") as error:
        shardlib.plan(
            shardlib.tree(lambda key: {"w": jnp.eye(4)}),
            loss,
            optax.sgd(1.0),
            BATCH,
            topology="cpu:2",
            pin={"mesh": {"data": 2}, "microbatches": 2},
        )
    assert "x.shape[0]" in str(error.value)
