"""What is a model of the zoo, and what are its true loss and gradients?

A `Case` holds what a user would hand to shardlib, and computes the same loss and gradients with
plain `jax.value_and_grad` on one device, with no line of shardlib involved in the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BATCH = 8
SEQ = 16
VOCAB = 64

Batch = Mapping[str, np.ndarray]
Gradients = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model with its loss and one batch.

    Attributes:
        name: "decoder-annotated", say.
        init: what shardlib takes as its first argument.
        loss: what shardlib takes as its second argument.
        batch: NumPy arrays, leading dim `BATCH`.
        batch_axes: logical names of the batch's dims; None where the model carries no names.
        annotated: whether the parameters carry logical names.
        build: seed -> (params, function of params and batch to outputs), by the model's own library
            alone.
        error: (outputs, batch) -> scalar loss.
    """

    name: str
    init: Any
    loss: Callable[[Any, Any], Any]
    batch: Batch
    batch_axes: Mapping[str, tuple[str, ...]] | None
    annotated: bool
    build: Callable[[int], tuple[Any, Callable[[Any, Any], jax.Array]]]
    error: Callable[[Any, Any], jax.Array]

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cache  # noqa: B019 (cases live as long as the process)
    def reference(self, seed: int) -> tuple[float, Gradients]:
        """Loss and gradients by dotted parameter path, computed unsharded on one device."""
        with jax.default_device(jax.local_devices()[0]):
            params, apply = self.build(seed)
            loss, gradients = jax.jit(
                jax.value_and_grad(lambda p, batch: self.error(apply(p, batch), batch))
            )(params, dict(self.batch))
        return float(loss), leaves_by_path(gradients)


def leaves_by_path(tree: Any) -> Gradients:
    """The leaves of a parameter-like pytree as NumPy arrays by dotted path; boxes of Flax variables
    leave no trace in the path.
    """

    def text(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    return {
        ".".join(
            part for part in map(text, path) if part not in ("value", "raw_value")
        ): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def named(annotated: bool, *names: str | None) -> dict[str, Any]:
    """Metadata of a Flax NNX parameter: its logical names, or nothing."""
    return {"out_sharding": names} if annotated else {}


def param(
    annotated: bool, rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str, ...], fan_in: int
) -> nnx.Param[jax.Array]:
    """A normally distributed float32 parameter of variance 1 / fan_in."""
    return nnx.Param(
        jax.random.normal(rngs.params(), shape) * fan_in**-0.5, **named(annotated, *names)
    )


def nnx_case(
    name: str,
    init: Callable[[nnx.Rngs], nnx.Module],
    apply: Callable[[Any, Any], jax.Array],
    error: Callable[[Any, Any], jax.Array],
    batch: Batch,
    *,
    annotated: bool,
    batch_axes: Mapping[str, tuple[str, ...]],
) -> Case:
    """A case around a Flax NNX module; the reference builds the module with no mesh and no eager
    sharding.
    """

    def build(seed: int) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
        with nnx.use_eager_sharding(False):
            graphdef, params, rest = nnx.split(init(nnx.Rngs(seed)), nnx.Param, ...)
        return params, lambda params, batch: apply(
            nnx.merge(graphdef, params, rest, copy=True), batch
        )

    return Case(
        name=f"{name}-{'annotated' if annotated else 'unannotated'}",
        init=init,
        loss=lambda model, batch: error(apply(model, batch), batch),
        batch=batch,
        batch_axes=batch_axes if annotated else None,
        annotated=annotated,
        build=build,
        error=error,
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log likelihood of integer targets, nats."""
    hits = targets[..., None] == jnp.arange(logits.shape[-1])
    return -jnp.mean(jnp.sum(jnp.where(hits, jax.nn.log_softmax(logits), 0.0), axis=-1))


def tokens(seed: int, length: int = SEQ) -> np.ndarray:
    """A batch of token ids, int32 [BATCH, length]."""
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, length)).astype(np.int32)


def normals(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float32 numbers [BATCH, *shape]."""
    return np.random.default_rng(seed).standard_normal((BATCH, *shape)).astype(np.float32)
