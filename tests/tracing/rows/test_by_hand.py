"""Derivatives that were written by hand, and what else is known of a loss only when one looks for
it.
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
    name: np.random.default_rng(at).normal(size=(16, 8)).astype(np.float32)
    for at, name in enumerate("xt")
}
#: (operand, cotangent) -> gradient, and whether that is linear in the cotangent.
BACKWARD = {
    "clipped": (lambda x, g: jnp.clip(g, -1e-2, 1e-2), False),
    "sign": (lambda x, g: jnp.sign(g), False),
    "rounded": (lambda x, g: jnp.round(g), False),
    "of length one": (lambda x, g: g / jnp.linalg.norm(g, axis=-1, keepdims=True), False),
    "with a term": (lambda x, g: g + 0.01 * x, False),
    "whole numbers": (lambda x, g: g.astype(jnp.int32).astype(jnp.float32), False),
    "branch on it": (
        lambda x, g: jax.lax.cond(g[0, 0] > 0, lambda g: g, lambda g: 2 * g, g),
        False,
    ),
    "looped and squared": (lambda x, g: jax.lax.fori_loop(0, 2, lambda _, c: c * c, g), False),
    "straight through": (lambda x, g: g, True),
    "masked": (lambda x, g: jnp.where(x > 0, g, 0.0), True),
    "scaled": (lambda x, g: g * jnp.cos(x), True),
    "none": (lambda x, g: jnp.zeros_like(g), True),
    "in 16 bits": (lambda x, g: g.astype(jnp.bfloat16).astype(jnp.float32), True),
    "looped": (
        lambda x, g: jax.lax.fori_loop(0, 3, lambda i, c: c + g * i, jnp.zeros_like(g)),
        True,
    ),
    "scanned": (
        lambda x, g: jax.lax.scan(lambda c, s: (c + s, 2 * c), jnp.zeros_like(g[:, 0]), g.T)[1].T,
        True,
    ),
    "picked": (lambda x, g: jnp.take_along_axis(g, jnp.argsort(x, -1), -1), True),
    "times a matrix": (lambda x, g: g @ jnp.ones((g.shape[1], g.shape[1])), True),
}


def rows(loss):
    return problem(shardlib.tree(init), loss, optax.sgd(1.0), BATCH).rows


def init(key):
    return {"w": jax.random.normal(key, (8, 8))}


def by_hand(backward):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return same


@pytest.mark.parametrize("name", BACKWARD)
def test_a_derivative_that_is_not_linear_in_what_comes_in_is_never_split(name: str):
    backward, linear = BACKWARD[name]
    same = by_hand(backward)
    for loss in (
        lambda p, b: jnp.mean((same(b["x"] @ p["w"]) - b["t"]) ** 2),
        lambda p, b: jnp.sum((b["x"] @ same(p["w"]) - b["t"]) ** 2),
    ):
        found = rows(loss)
        assert found.splits == linear, found
        assert linear or "is not linear in the gradient that comes in" in found.reasons[0]


def test_two_functions_that_differ_by_their_derivative_alone():
    straight, clipped = (by_hand(BACKWARD[name][0]) for name in ("straight through", "clipped"))
    assert not rows(lambda p, b: jnp.mean(clipped(straight(b["x"] @ p["w"])) ** 2)).splits


@pytest.mark.parametrize(
    "loss",
    [
        lambda each: each.mean() if len(each) > 8 else each.sum(),
        lambda each: each.mean() if len(each) >= 16 else 2 * each.mean() + 1,
        lambda each: each.mean() if len(each) % 8 == 0 else jnp.sqrt(each.mean()),
    ],
    ids=["sum of few", "twice the mean of few", "root where rows do not divide"],
)
def test_a_loss_that_is_another_one_for_a_microbatch_is_never_split(loss):
    def of(p, b):
        return loss(((b["x"] @ p["w"] - b["t"]) ** 2).mean(-1))

    with pytest.raises(
        shardlib.PinError,
        match="it computes other operations for 4 rows, of one of 4 microbatches, than for 16",
    ):
        shardlib.compile(
            shardlib.tree(init),
            of,
            optax.sgd(1.0),
            BATCH,
            topology="cpu:1",
            pin={"microbatches": 4},
        )
    assert (
        shardlib.compile(
            shardlib.tree(init), of, optax.sgd(1.0), BATCH, topology="cpu:1"
        ).plan.microbatches
        == 1
    )


@pytest.mark.parametrize(
    "metric",
    [
        lambda each: each.mean().astype(jnp.int32),
        lambda each: (each.mean() * 10).astype(jnp.uint8),
        lambda each: each.sum() > 1,
        lambda each: each.mean().astype(bool),
    ],
)
def test_whole_numbers_of_a_sum_are_no_sums(metric):
    assert not rows(
        lambda p, b: (jnp.mean(b["x"] @ p["w"]), {"metric": metric((b["x"] @ p["w"]) ** 2)})
    ).splits


def test_counts_in_whole_numbers_are_sums():
    found = rows(
        lambda p, b: (
            jnp.mean(b["x"] @ p["w"]),
            {"right": (b["x"] @ p["w"] > 0).sum(), "share": (b["x"] @ p["w"] > 0).mean()},
        )
    )
    assert [one.kind for _, one in found.metrics] == ["sum", "mean"]


@pytest.mark.parametrize(
    ("total", "weight", "splits"),
    [
        (lambda e: e.sum(), lambda m: m.sum(), True),
        (lambda e: e.mean(), lambda m: m.mean(), True),
        (lambda e: e.sum(), lambda m: m.shape[0], True),
        (lambda e: jnp.take(e, jnp.argsort(e)).sum(), lambda m: m.sum(), True),
        (lambda e: e.sum(), lambda m: jnp.maximum(m.sum(), 4.0), False),
        (lambda e: e.sum(), lambda m: 16, False),
        (lambda e: e.mean(), lambda m: m.sum(), False),
        (lambda e: jnp.sqrt(e.sum()), lambda m: m.sum(), False),
    ],
    ids=[
        "sums",
        "means",
        "number of rows",
        "nobody knows",
        "at least four",
        "a number",
        "a mean and a sum",
        "a root",
    ],
)
def test_weighted_means_of_what_is_known_to_be_no_sum(total, weight, splits):
    def loss(p, b):
        mask = (b["t"][:, 0] > 0).astype(jnp.float32)
        return shardlib.WeightedMean(
            total(((b["x"] @ p["w"]) ** 2).mean(-1) * mask), jnp.asarray(weight(mask), jnp.float32)
        )

    assert rows(loss).splits == splits, rows(loss)


def test_where_rows_meet_in_a_jitted_function_the_callers_line_is_named():
    (reason,) = rows(
        lambda p, b: jnp.mean((b["x"] @ p["w"]) * jnp.roll(b["x"] @ p["w"], 1, axis=0))
    ).reasons
    assert "test_by_hand.py:" in reason


def test_recurrent_cells_that_split_what_they_carry():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.RNN(nnx.GRUCell(4, 6, rngs=rngs))

    found = problem(
        Model,
        lambda model, batch: jnp.mean(model.cells(batch["x"]) ** 2),
        optax.sgd(0.1),
        {"x": np.ones((16, 5, 4), np.float32)},
    ).rows
    assert found.loss.kind == "mean"


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: (x.reshape(-1, 8) @ p["w"]).mean(),
        lambda p, x: (
            (x.reshape(x.shape[0] * 2, 4) @ p["w"][:4]).reshape(x.shape[0], 2, 8).sum(1) ** 2
        ).mean(),
        lambda p, x: (
            jnp.einsum("bsd,de->bes", x.reshape(-1, 2, 4), p["w"][:4]).reshape(-1, 2).mean()
        ),
    ],
)
def test_microbatches_of_one_row(loss):
    program = shardlib.compile(
        shardlib.tree(init),
        lambda p, b: loss(p, b["x"]),
        optax.sgd(1.0),
        BATCH,
        topology="cpu:1",
        pin={"microbatches": 16},
    )
    state = program.init(0)
    params = jax.tree.map(np.asarray, state.params)
    value, gradients = jax.value_and_grad(loss)(params, BATCH["x"])
    state, metrics = program.step(state, BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(
        params["w"] - np.asarray(state.params["w"]), gradients["w"], rtol=1e-4, atol=1e-6
    )


def test_a_folder_of_the_users_may_have_the_name_of_the_package():
    """A clone of this repository is one."""
    place = {"jnp": jnp}
    code = "loss = lambda p, b: jnp.mean((b['x'] @ p['w']) * jnp.roll(b['x'] @ p['w'], 1, axis=0))"
    exec(compile(code, "/home/me/shardlib/train.py", "exec"), place)
    (reason,) = rows(place["loss"]).reasons
    assert "train.py:1" in reason
