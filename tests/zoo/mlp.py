"""A multilayer perceptron with layer norms: the smallest model with two dims worth cutting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.case import Case, named, nnx_case, normals

INPUTS, HIDDEN, OUTPUTS = 16, 64, 8


class MLP(nnx.Module):
    """[batch, features] -> [batch, classes]."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.first = nnx.Linear(
            INPUTS,
            HIDDEN,
            kernel_metadata=named(annotated, "embed", "mlp"),
            bias_metadata=named(annotated, "mlp"),
            rngs=rngs,
        )
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.second = nnx.Linear(
            HIDDEN,
            HIDDEN,
            kernel_metadata=named(annotated, "mlp", "hidden"),
            bias_metadata=named(annotated, "hidden"),
            rngs=rngs,
        )
        self.last = nnx.Linear(
            HIDDEN, OUTPUTS, kernel_metadata=named(annotated, "hidden", "classes"), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.second(self.norm(nnx.relu(self.first(x))))))


def case(*, annotated: bool) -> Case:
    """The perceptron with a squared error."""
    return nnx_case(
        "mlp",
        lambda rngs: MLP(rngs, annotated=annotated),
        lambda model, batch: model(batch["x"]),
        lambda y, batch: jnp.mean((y - batch["y"]) ** 2),
        {"x": normals(0, INPUTS), "y": normals(1, OUTPUTS)},
        annotated=annotated,
        batch_axes={"x": ("batch", "embed"), "y": ("batch", "classes")},
    )


CASES = (case(annotated=True), case(annotated=False))
