"""Keys of a batch, keys of the program and streams of a model: the numbers that plain JAX draws for
the whole batch, on any mesh, in any number of microbatches, and through stages.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import BatchError
from shardlib.lowering.random_keys import KeyFold
from tests.zoo.parity import capture, relative_errors

LAYERS, EMBED, VOCAB, ROWS = 4, 16, 32, 16
AXES = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}
RAW = {"tokens": ("batch", "seq"), "key": (None,)}


def init(key=None):
    shapes = {"table": (VOCAB, EMBED), "up": (LAYERS, EMBED, 32), "down": (LAYERS, 32, EMBED)}
    return {
        name: 0.4 * jnp.sin(1.3 * i + 1.7 * jnp.arange(np.prod(shape)).reshape(shape) % 61)
        for i, (name, shape) in enumerate(shapes.items())
    }


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)


def folded(params, batch):
    """Every layer folds its number into the key of the batch."""

    def layer(carry, p):
        x, number = carry
        return (
            x
            + dropped(jax.random.fold_in(batch["key"], number), jnp.tanh(x @ p["up"]) @ p["down"]),
            number + 1,
        ), None

    (x, _), _ = jax.lax.scan(
        layer,
        (params["table"][batch["tokens"]], 0),
        {name: params[name] for name in ("up", "down")},
    )
    return jnp.mean((x @ params["table"].T) ** 2)


def dealt(params, batch):
    """Every layer has one of the keys that the batch's key is split into."""

    def layer(x, given):
        p, key = given
        return x + dropped(key, jnp.tanh(x @ p["up"]) @ p["down"]), None

    x, _ = jax.lax.scan(
        layer,
        params["table"][batch["tokens"]],
        ({name: params[name] for name in ("up", "down")}, jax.random.split(batch["key"], LAYERS)),
    )
    return jnp.mean((x @ params["table"].T) ** 2)


def by_row(params, batch):
    x = jax.vmap(dropped)(batch["key"], params["table"][batch["tokens"]])
    return jnp.mean((jnp.tanh(x @ params["up"][0]) @ params["down"][0]) ** 2)


def batch(key):
    return {
        "tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, 4)).astype(np.int32),
        "key": key,
    }


PINS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("cpu:8", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "microbatches": 1, "zero": 3}),
    "several": (
        "cpu:8",
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "microbatches": 2, "zero": 3},
    ),
    "once": ("cpu:8", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "microbatches": 4, "zero": 1}),
    "lockstep": ("cpu:4", {"mesh": {"stage": 2, "data": 2}, "microbatches": 4, "schedule": "1f1b"}),
    "programs": (
        "cpu:4",
        {
            "mesh": {"stage": 2, "data": 2},
            "microbatches": 4,
            "schedule": "1f1b",
            "pipeline": "programs",
        },
    ),
}


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("loss", "raw"),
    [(folded, False), (dealt, True)],
    ids=["typed, folded by layers", "integers, dealt out to layers"],
)
@pytest.mark.parametrize("pin", PINS)
def test_a_key_of_the_batch(pin, loss, raw):
    where, pins = PINS[pin]
    given = batch(jax.random.PRNGKey(7) if raw else jax.random.key(7))
    program = shardlib.compile(
        shardlib.tree(init, AXES),
        loss,
        capture(),
        given,
        topology=where,
        pin=pins,
        batch_axes=RAW if raw else None,
    )
    assert max(relative_errors(program, loss, given).values()) < 1e-5
    assert program.put(given)["key"].dtype == given["key"].dtype


@pytest.mark.long
@pytest.mark.parametrize("parts", [1, 4])
def test_keys_of_rows_are_split_like_rows(parts):
    given = batch(jax.random.split(jax.random.key(7), ROWS))
    program = shardlib.compile(
        shardlib.tree(init, AXES),
        by_row,
        capture(),
        given,
        topology="cpu:4",
        pin={"mesh": {"fsdp": 4}, "microbatches": parts},
    )
    assert max(relative_errors(program, by_row, given).values()) < 1e-5
    part = {"tokens": given["tokens"][:3], "key": given["key"][:3]}
    np.testing.assert_allclose(
        float(program.evaluate(program.init(0), part)["loss"]),
        float(by_row(init(), part)),
        rtol=1e-5,
    )


def test_an_unnamed_key_of_integers_says_what_to_write():
    with pytest.raises(BatchError, match=r"PRNGKey belongs to no row"):
        shardlib.plan(
            shardlib.tree(init, AXES),
            folded,
            optax.sgd(1.0),
            batch(jax.random.PRNGKey(7)),
            topology="cpu:4",
        )


def test_integers_of_a_key_are_no_rows():
    given = {"tokens": batch(None)["tokens"][:2], "key": jax.random.PRNGKey(7)}
    with pytest.raises(
        BatchError, match=r"the integers of a random key are not rows of the batch: batch\.key"
    ):
        shardlib.compile(shardlib.tree(init, AXES), folded, optax.sgd(1.0), given, topology="cpu:1")


class Streams(nnx.Module):
    """A model that draws from a typed key of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.4 * jnp.sin(jnp.arange(64.0).reshape(8, 8)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x @ self.kernel[...])


def streams_loss(model, batch):
    outputs = model(batch["x"])
    return jnp.mean((outputs - batch["y"]) ** 2), {"kept": jnp.mean(outputs != 0)}


def rows(count=8):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(count, 8)).astype(np.float32),
        "y": random.normal(size=(count, 8)).astype(np.float32),
    }


@pytest.mark.long
@pytest.mark.parametrize("guards", [None, shardlib.Guards(clip=1e6, scale=4.0)], ids=["", "guards"])
@pytest.mark.parametrize("parts", [1, 2])
def test_streams_of_nnx_advance_from_step_to_step_and_through_checkpoints(parts, guards, tmp_path):
    program = shardlib.compile(
        Streams,
        streams_loss,
        optax.sgd(0.1),
        rows(),
        topology="cpu:4",
        pin={"mesh": {"data": 2, "fsdp": 2}, "microbatches": parts},
        guards=guards,
    )
    model, state = Streams(nnx.Rngs(jax.random.key(0))), program.init(0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = set()
    for step in range(3):
        if step == 1:
            with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
                checkpoints.save(1, state, plan=program.plan, wait=True)
                state = checkpoints.restore(program).state
        state, metrics = program.step(state, rows())
        (value, aux), gradients = nnx.value_and_grad(streams_loss, has_aux=True)(model, rows())
        np.testing.assert_allclose(float(metrics["loss"]), float(value), rtol=1e-5)
        np.testing.assert_allclose(float(metrics["kept"]), float(aux["kept"]), rtol=1e-5)
        optimizer.update(model, gradients)
        np.testing.assert_allclose(state.params["kernel"], model.kernel[...], atol=1e-6)
        losses.add(float(value))
    assert len(losses) == 3
    count = jax.tree.leaves(nnx.state(model, nnx.RngCount))[0]
    assert int(count) == 3 and any(
        jnp.array_equal(count, leaf)
        for leaf in jax.tree.leaves(state.model_state)
        if leaf.dtype == count.dtype
    )


RECIPES = dict(
    re.findall(
        r"<!-- (\w+) -->\n```python\n(.*?)```",
        (Path(__file__).parents[2] / "docs" / "dropout.md").read_text(),
        re.DOTALL,
    )
)


@pytest.mark.parametrize("recipe", ["nnx", "linen", "tree"])
def test_the_recipes_of_the_docs_train_with_dropout_and_evaluate_without(recipe):
    names: dict[str, Any] = {
        "jax": jax,
        "jnp": jnp,
        "nnx": nnx,
        "linen": linen,
        "optax": optax,
        "shardlib": shardlib,
        "batch": rows(),
    }
    exec(RECIPES[recipe], names)
    program, state = names["program"], names["state"]
    again, other = (float(program.evaluate(state, rows())["loss"]) for _ in range(2))
    assert again == other == float(names["validation"]["loss"])
    assert abs(float(names["metrics"]["loss"]) - again) > 1e-3


def test_every_microbatch_has_a_key_of_its_own():
    key = jax.random.key(0)
    keys = jax.random.key_data(KeyFold().microbatch_keys(key, 3))
    for number in range(3):
        np.testing.assert_array_equal(
            keys[number], jax.random.key_data(jax.random.fold_in(key, number))
        )
