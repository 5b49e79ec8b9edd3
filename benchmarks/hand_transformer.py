"""The reference transformer once more, sharded by hand: what a careful Flax user writes without
shardlib.

The mathematics and the parameter tree are those of `shardlib.models.transformer` for a dense
decoder with RMS norms, rotary positions and a gated feed-forward; nothing is imported from there.
The recipe is the usual one:

- batch over data and fsdp; heads, mlp and vocab over tensor (Megatron, arXiv:1909.08053);
- parameters and Adam moments cut over fsdp along embed as well, gathered by the compiler where they
  are used (FSDP, ZeRO 3);
- activations constrained at every layer boundary, at the heads, at the mlp hidden and at the
  logits;
- one jitted step with explicit in_shardings and out_shardings and donated state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.models.config import TransformerConfig

BATCH = ("data", "fsdp")


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over the first devices, all axes automatic."""
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


class Block(nnx.Module):
    """All layers, each parameter with a leading layer dim."""

    def __init__(self, shape: TransformerConfig, mesh: Mesh):
        heads, layers = "tensor", shape.layers
        kv_heads = "tensor" if shape.kv_heads % mesh.shape["tensor"] == 0 else None
        self.attention_norm = Scale((layers, shape.embed), P(None, None))
        self.attention = nnx.Dict(
            query=param(
                (layers, shape.embed, shape.heads, shape.head_dim), P(None, "fsdp", heads, None)
            ),
            key=param(
                (layers, shape.embed, shape.kv_heads, shape.head_dim),
                P(None, "fsdp", kv_heads, None),
            ),
            value=param(
                (layers, shape.embed, shape.kv_heads, shape.head_dim),
                P(None, "fsdp", kv_heads, None),
            ),
            out=param(
                (layers, shape.heads, shape.head_dim, shape.embed), P(None, heads, None, "fsdp")
            ),
        )
        self.mlp_norm = Scale((layers, shape.embed), P(None, None))
        self.mlp = nnx.Dict(
            gate=param((layers, shape.embed, shape.mlp), P(None, "fsdp", "tensor")),
            up=param((layers, shape.embed, shape.mlp), P(None, "fsdp", "tensor")),
            down=param((layers, shape.mlp, shape.embed), P(None, "tensor", "fsdp")),
        )


class Scale(nnx.Module):
    """The scale of an RMS norm."""

    def __init__(self, shape: tuple[int, ...], spec: P):
        self.scale = param(shape, spec)


class HandTransformer(nnx.Module):
    """[batch, seq] token ids -> [batch, seq, vocab] logits."""

    def __init__(self, shape: TransformerConfig, mesh: Mesh):
        self.shape, self.mesh = shape, mesh
        self.embedding = param((shape.vocab_size, shape.embed), P("tensor", "fsdp"))
        self.layers = Block(shape, mesh)
        self.norm = Scale((shape.embed,), P(None))
        self.head = param((shape.embed, shape.vocab_size), P("fsdp", "tensor"))

    def cut(self, x: jax.Array, *spec: Any) -> jax.Array:
        """Constrains an activation."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.cut(
            self.embedding[...], "tensor", None
        )  # gathered over fsdp first: the lookup of a table cut twice is slow in XLA
        x = self.cut(jnp.take(table, ids, axis=0, mode="clip"), BATCH, None, None)
        angles = rotary(ids.shape[1], self.shape.head_dim)
        layers = jax.tree.map(
            lambda value: value, nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))
        )
        x, _ = jax.lax.scan(lambda x, layer: (self.layer(x, layer, angles), None), x, layers)
        return self.cut(rms(x, self.norm.scale[...]) @ self.head[...], BATCH, None, "tensor")

    def layer(
        self, x: jax.Array, layer: Mapping[str, Any], angles: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """One layer; residual stream in and out."""
        x = x + self.attend(rms(x, layer["attention_norm"]["scale"]), layer["attention"], angles)
        x = self.cut(x, BATCH, None, None)
        y, mlp = rms(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        hidden = self.cut(jax.nn.silu(y @ mlp["gate"]) * (y @ mlp["up"]), BATCH, None, "tensor")
        return self.cut(x + hidden @ mlp["down"], BATCH, None, None)

    def attend(
        self, x: jax.Array, weights: Mapping[str, jax.Array], angles: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Causal grouped-query attention."""
        shape, (batch, seq, _) = self.shape, x.shape
        kv_heads = "tensor" if shape.kv_heads % self.mesh.shape["tensor"] == 0 else None
        query = self.cut(
            jnp.einsum("bsd,dnh->bsnh", x, weights["query"]), BATCH, None, "tensor", None
        )
        key = self.cut(jnp.einsum("bsd,dnh->bsnh", x, weights["key"]), BATCH, None, kv_heads, None)
        value = self.cut(
            jnp.einsum("bsd,dnh->bsnh", x, weights["value"]), BATCH, None, kv_heads, None
        )
        query, key = turn(query, *angles), turn(key, *angles)
        query = query.reshape(
            batch, seq, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
        )
        scores = jnp.einsum("bskgh,btkh->bkgst", query, key) * shape.head_dim**-0.5
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)
        mixed = jnp.einsum(
            "bkgst,btkh->bskgh",
            jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), axis=-1),
            value,
        )
        mixed = self.cut(
            mixed.reshape(batch, seq, shape.heads, shape.head_dim), BATCH, None, "tensor", None
        )
        return jnp.einsum("bsnh,nhd->bsd", mixed, weights["out"])


def param(shape: tuple[int, ...], spec: P) -> nnx.Param[jax.Array]:
    """A parameter that knows its sharding; its numbers come later."""
    return nnx.Param(jnp.zeros(shape), spec=spec)


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm over the last dim."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def rotary(seq: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [seq, width / 2] of the rotary positions."""
    angles = np.arange(seq)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [batch, seq, heads, width] by halves."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy, nats; a masked sum keeps the vocabulary cut."""
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    hits = targets[..., None] == jnp.arange(logits.shape[-1])
    return (jnp.log(jnp.exp(shifted).sum(-1)) - jnp.where(hits, shifted, 0.0).sum(-1)).mean()


@dataclass(frozen=True, kw_only=True)
class HandStep:
    """The step before it is compiled, with what it needs.

    Attributes:
        step: (params, optimizer state, batch) -> (params, optimizer state, loss); donates the first
            two.
        params: sharded parameters, a pure dict.
        opt_state: sharded optimizer state.
        batch_sharding: where batches live.
        places: shardings of what the step takes: parameters, optimizer state and batch.
        mesh: of all of them.
        batch: abstract.
    """

    step: Any
    params: Any
    opt_state: Any
    batch_sharding: NamedSharding
    places: tuple[Any, ...]
    mesh: Mesh
    batch: Mapping[str, jax.ShapeDtypeStruct]

    def compiled(self) -> Any:
        """The compiled step; traced and compiled at each call."""
        jitted = jax.jit(
            lambda *arguments: self.step(*arguments),
            in_shardings=self.places,
            out_shardings=(*self.places[:2], NamedSharding(self.mesh, P())),
            donate_argnums=(0, 1),
        )
        with jax.set_mesh(self.mesh):
            return jitted.lower(self.params, self.opt_state, self.batch).compile()


def prepared(
    shape: TransformerConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    values: Mapping[str, Any],
    batch: Mapping[str, np.ndarray],
) -> HandStep:
    """The hand-sharded training step for the shapes of a batch, its state placed; `values` are the
    initial parameters, a nested dict of arrays.
    """
    graphdef, state = nnx.split(HandTransformer(shape, mesh))
    whole = NamedSharding(mesh, P())
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    pure = nnx.to_pure_dict(state)
    shardings = jax.tree.unflatten(
        jax.tree.structure(pure), [NamedSharding(mesh, v.get_metadata()["spec"]) for v in variables]
    )
    params = jax.tree.map(
        lambda value, sharding: jax.device_put(np.asarray(value), sharding), dict(values), shardings
    )
    opt_shapes = jax.eval_shape(optimizer.init, params)
    opt_shardings = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_shapes,
        shardings,
        transform_non_params=lambda _: whole,
    )
    opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
    batch_sharding = NamedSharding(mesh, P(BATCH, None))

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return cross_entropy(merge(graphdef, state, params)(batch["inputs"]), batch["targets"])

    def step(
        params: Any, opt_state: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return HandStep(
        step=step,
        params=params,
        opt_state=opt_state,
        batch_sharding=batch_sharding,
        places=(shardings, opt_shardings, dict.fromkeys(batch, batch_sharding)),
        mesh=mesh,
        batch={
            name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()
        },
    )


def merge(
    graphdef: nnx.GraphDef[HandTransformer], state: nnx.State, params: Any
) -> HandTransformer:
    """The module with these parameters."""
    filled = jax.tree.map(lambda value: value, state)
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(graphdef, filled)
