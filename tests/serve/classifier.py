"""A model of a user's own that is not a language model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Classifier(nnx.Module):
    """Rows of features to logits of three classes, with dropout and a running mean."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def forward(model: Classifier, batch: Any) -> dict[str, jax.Array]:
    logits = model(batch["x"])
    return {"probabilities": jax.nn.softmax(logits), "best": jnp.argmax(logits, axis=-1)[:, None]}


def classifier() -> dict[str, Any]:
    """As `shardlib export tests.serve.classifier:classifier` takes it."""
    return {
        "init": Classifier,
        "loss": lambda model, batch: model(batch["x"]).mean(),
        "batch": {"x": jax.ShapeDtypeStruct((4, 5), jnp.float32)},
        "outputs": forward,
        "weights": 7,
    }
