"""Training goes on at any step, on other devices, with the examples that it would have had."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import numpy as np
import optax

import shardlib
from shardlib.data.batches import Loader
from shardlib.data.open import read

AXES = {"table": ("vocab", "embed"), "head": ("embed", "vocab")}


def init(key: jax.Array) -> dict[str, jax.Array]:
    """A table of what follows which byte."""
    return {
        "table": 0.1 * jax.random.normal(key, (256, 16)),
        "head": 0.1 * jax.random.normal(key, (16, 256)),
    }


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy, in nats a byte."""
    return optax.softmax_cross_entropy_with_integer_labels(
        params["table"][batch["inputs"]] @ params["head"], batch["targets"]
    ).mean()


def test_losses_after_a_change_of_the_mesh_are_those_of_one_run(tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(500)))
    data = read(tmp_path / "text.txt", seq=16, cache=tmp_path / "cache")

    def program(**mesh: int) -> shardlib.Program:
        return shardlib.compile(
            shardlib.tree(init, AXES),
            loss,
            optax.sgd(0.5),
            data.batch(0, 8),
            topology="cpu:8",
            pin={"mesh": mesh},
            batch_axes={"inputs": ("batch", None), "targets": ("batch", None)},
        )

    first, second = program(data=8), program(data=4)
    state, expected = first.init(0), list[float]()
    for step in range(4):
        state, metrics = first.step(state, data.batch(step * 8, 8))
        expected.append(float(metrics["loss"]))
    state, found = first.init(0), list[float]()
    with Loader(data, first.batch) as loader:
        for _, batch in itertools.islice(loader, 2):
            state, metrics = first.step(state, batch)
            found.append(float(metrics["loss"]))
    state = jax.device_put(
        jax.tree.map(np.asarray, state), jax.tree.map(lambda leaf: leaf.sharding, second.state)
    )
    with Loader(data, second.batch, start=2, stop=4) as loader:
        for _, batch in loader:
            state, metrics = second.step(state, batch)
            found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
