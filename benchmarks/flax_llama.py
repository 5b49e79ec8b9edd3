"""A Llama as one writes it in Flax Linen, knowing nothing of this package: layers in a scan with
rematerialisation, FSDP over `data` and tensor parallelism over `model` by hand, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = AbstractMesh((4, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True)
class Config:
    """Sizes of Llama 3 8B."""

    layers: int = 32
    embed: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336
    vocab: int = 128256


def layout(x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def init(*spec: str | None) -> Callable[..., Any]:
    return nn.with_partitioning(nn.initializers.lecun_normal(), spec)


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = self.config
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=jnp.bfloat16)
        heads = init("data", "model", None)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q = rotated(dense((c.heads, c.head_dim), kernel_init=heads, name="q")(h))
        k = rotated(dense((c.kv_heads, c.head_dim), kernel_init=heads, name="k")(h))
        v = dense((c.kv_heads, c.head_dim), kernel_init=heads, name="v")(h)
        q = layout(q, "data", None, "model")
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        out = init("model", None, "data")
        x += dense(c.embed, axis=(-2, -1), kernel_init=out, name="out")(a)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        gate = dense(c.mlp, kernel_init=init("data", "model"), name="gate")(h)
        up = dense(c.mlp, kernel_init=init("data", "model"), name="up")(h)
        h = layout(nn.silu(gate) * up, "data", None, "model")
        x += dense(c.embed, kernel_init=init("model", "data"), name="down")(h)
        return layout(x, "data"), None


class Llama(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        table = nn.Embed(c.vocab, c.embed, dtype=jnp.bfloat16, embedding_init=init("model", "data"))
        x = layout(table(tokens), "data")
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = layers(c, name="layers")(x, None)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        head = nn.Dense(
            c.vocab, use_bias=False, dtype=jnp.bfloat16, kernel_init=init("data", "model")
        )
        return layout(head(x), "data", None, "model")


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def arguments(
    config: Config | None = None, rows: int = 8, length: int = 2048, mesh: AbstractMesh = MESH
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes and shardings of the state and the batch."""
    model = Llama(config or Config())
    tokens = jax.ShapeDtypeStruct(
        (rows, length), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((rows, length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    state = jax.eval_shape(create, jax.random.key(0))
    shardings = nn.get_sharding(state, mesh)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        nn.meta.unbox(state),
        nn.meta.unbox(shardings),
    )
    return state, {"inputs": tokens, "targets": tokens}


def train_step_8b() -> tuple[Callable[..., Any], Any]:
    """What `shardlib why` takes."""
    return jax.jit(train_step, donate_argnums=0), arguments()
