"""Jobs whose plans are ordered on simulated devices: small models with a loss and a batch, each with
other traffic and other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from benchmarks.stepping import random_tokens
from shardlib import models
from shardlib.models.config import Experts, TransformerConfig

Tree = Any
#: What `shardlib.plan` takes of a model: init, loss, optimizer, batch.
Job = dict[str, Any]


def transformer(batch: int, seq: int, **changes: Any) -> Job:
    """A transformer of the reference models."""
    shape = {"layers": 3, "embed": 192, "heads": 6, "kv_heads": 6, "head_dim": 32, "mlp": 768}
    config = TransformerConfig(
        name="job",
        vocab_size=512,
        max_seq=seq,
        compute_dtype="float32",
        activation="gelu_tanh",
        gated=False,
        **{**shape, **changes},
    )
    init, loss = models.build(config)
    return _job(init, loss, random_tokens(512, batch, seq))


def _job(init: Any, loss: Callable[[Any, Any], jax.Array], batch: dict[str, np.ndarray]) -> Job:
    return {"init": init, "loss": loss, "optimizer": optax.adamw(1e-3), "batch": batch}


def _weights(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * float(np.prod(shape[:-1])) ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _batch(classes: int, *shape: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    return {
        "x": numbers.standard_normal(shape).astype(np.float32),
        "y": numbers.integers(0, classes, shape[0]).astype(np.int32),
    }


def _entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def mlp() -> Job:
    """Four wide layers on vectors."""
    shapes = {"a": (256, 1024), "b": (1024, 512), "c": (512, 1024), "d": (1024, 64)}
    axes = {"a": ("in", "mlp"), "b": ("mlp", "mid"), "c": ("mid", "wide"), "d": ("wide", "out")}

    def loss(p: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for name in "abc":
            x = jax.nn.relu(x @ p[name])
        return _entropy(x @ p["d"], batch["y"])

    return _job(shardlib.tree(lambda key: _weights(key, shapes), axes), loss, _batch(64, 512, 256))


def convolutions() -> Job:
    """Three convolutions on small images, and a head."""
    shapes = {"a": (3, 3, 3, 32), "b": (3, 3, 32, 64), "c": (3, 3, 64, 64), "head": (64, 16)}
    axes = {
        "a": (None, None, None, "first"),
        "b": (None, None, "first", "second"),
        "c": (None, None, "second", "third"),
        "head": ("third", "out"),
    }

    def loss(p: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for name, stride in (("a", 1), ("b", 2), ("c", 2)):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x,
                    p[name],
                    (stride, stride),
                    "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
            )
        return _entropy(x.mean((1, 2)) @ p["head"], batch["y"])

    return _job(
        shardlib.tree(lambda key: _weights(key, shapes), axes), loss, _batch(16, 64, 24, 24, 3)
    )


def lstm() -> Job:
    """An LSTM over a sequence of vectors, and a head."""
    width = 256
    shapes = {"x": (128, 4 * width), "h": (width, 4 * width), "head": (width, 32)}
    axes = {"x": ("in", "gates"), "h": ("hidden", "gates"), "head": ("hidden", "out")}

    def loss(p: Tree, batch: Tree) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> Tree:
            c, h = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

        start = jnp.zeros((batch["x"].shape[0], width))
        (_, h), _ = jax.lax.scan(step, (start, start), jnp.swapaxes(batch["x"], 0, 1))
        return _entropy(h @ p["head"], batch["y"])

    return _job(
        shardlib.tree(lambda key: _weights(key, shapes), axes), loss, _batch(32, 128, 24, 128)
    )


#: Name -> the job.
JOBS: Mapping[str, Callable[[], Job]] = {
    "transformer": lambda: transformer(32, 96),
    "long": lambda: transformer(8, 256, layers=2, kv_heads=2),
    "experts": lambda: transformer(
        16, 64, layers=2, experts=Experts(count=8, per_token=2, mlp=256)
    ),
    "mlp": mlp,
    "convolutions": convolutions,
    "lstm": lstm,
}
