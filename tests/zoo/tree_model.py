"""A model that is a plain pytree of arrays and a function: token mixing by a convolution over time,
two residual layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardlib
from tests.zoo.case import VOCAB, Case, cross_entropy, tokens

EMBED, MLP, TAPS, LAYERS = 32, 64, 3, 2
AXES = {
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "layers": [
        {"taps": (None, "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
        for _ in range(LAYERS)
    ],
}


def initialise(key: jax.Array) -> dict[str, Any]:
    """Normally distributed parameters."""
    keys = iter(jax.random.split(key, 2 + 3 * LAYERS))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    layers = [
        {"taps": weight(TAPS, EMBED), "up": weight(EMBED, MLP), "down": weight(MLP, EMBED)}
        for _ in range(LAYERS)
    ]
    return {"embedding": weight(VOCAB, EMBED), "layers": layers, "head": weight(EMBED, VOCAB)}


def apply(params: dict[str, Any], batch: Any) -> jax.Array:
    """[batch, seq] token ids -> [batch, seq, vocab] logits; position t sees t and the two
    before.
    """
    x = params["embedding"][batch["inputs"]]
    for layer in params["layers"]:
        padded = jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))
        mixed = sum(padded[:, i : i + x.shape[1]] * layer["taps"][i] for i in range(TAPS))
        x = x + jax.nn.silu(mixed @ layer["up"]) @ layer["down"]
    return x @ params["head"]


def error(logits: jax.Array, batch: Any) -> jax.Array:
    """Cross entropy."""
    return cross_entropy(logits, batch["targets"])


def case(*, annotated: bool) -> Case:
    """A language model on random tokens; the loss also returns a metric."""
    batch = {"inputs": tokens(7), "targets": tokens(8)}

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = apply(params, batch)
        return error(logits, batch), {
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == batch["targets"])
        }

    def build(seed: int) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
        return initialise(jax.random.key(seed)), apply

    axes = (
        AXES
        if annotated
        else jax.tree.map(lambda _: None, AXES, is_leaf=lambda leaf: isinstance(leaf, tuple))
    )
    return Case(
        name=f"tree-{'annotated' if annotated else 'unannotated'}",
        init=shardlib.tree(initialise, axes),
        loss=loss,
        batch=batch,
        batch_axes={"inputs": ("batch", "seq"), "targets": ("batch", "seq")} if annotated else None,
        annotated=annotated,
        build=build,
        error=error,
    )


CASES = (case(annotated=True), case(annotated=False))
