"""Decoders in JAX's explicit mode, as owners write them who shard by hand: meshes of Explicit axes,
`out_sharding` of products, `reshard`, and experts in a `shard_map` of their own.

Axes: B batch, T sequence, D embed, N heads, K key and value heads, H head dim, F mlp, V vocab,
E experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, reshard
from jax.sharding import PartitionSpec as P

V, D, N, K, H, F, E, LAYERS = 64, 32, 4, 2, 8, 64, 4, 1
Params = dict[str, Any]


def mesh(*sizes: int) -> Mesh:
    """A mesh of axes "x" and "y", both Explicit."""
    return jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def batch(rows: int = 16, length: int = 8) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, V, (rows, length + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def init(key: jax.Array) -> Params:
    """Weights as a plain tree, with the layouts of their owner."""

    def drawn(*shape: int, spec: P) -> jax.Array:
        nonlocal key
        key, own = jax.random.split(key)
        return reshard(jax.random.normal(own, shape) / np.sqrt(shape[-2]), spec)

    def layer() -> Params:
        return {
            "q": drawn(N, D, H, spec=P("y", None, None)),
            "kv": drawn(2, K, D, H, spec=P(None, "y", None, None)),
            "o": drawn(N, H, D, spec=P("y", None, None)),
            "gate": drawn(2, D, F, spec=P(None, None, "y")),
            "down": drawn(F, D, spec=P("y", None)),
            "norms": jnp.zeros((2, D)),
        }

    return {
        "embed": drawn(V, D, spec=P("y", None)),
        "layers": [layer() for _ in range(LAYERS)],
        "final": jnp.zeros(D),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


def rope(x: jax.Array) -> jax.Array:
    angle = np.arange(x.shape[1])[:, None] / 1e4 ** (np.arange(H // 2) / (H // 2))
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    one, two = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attention(w: Params, x: jax.Array) -> jax.Array:
    heads = P("x", None, "y", None)
    q = rope(jnp.einsum("btd,ndh->btnh", x, w["q"], out_sharding=heads))
    k, v = jnp.einsum("btd,ckdh->cbtkh", x, w["kv"], out_sharding=P(None, *heads))
    q = q.reshape(*q.shape[:2], K, N // K, H, out_sharding=P("x", None, "y", None, None))
    scores = jnp.einsum("btkgh,bskh->bkgts", q, rope(k)) / np.sqrt(H)
    seen = np.tril(np.ones(scores.shape[-2:], bool))
    probabilities = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", probabilities, v)
    mixed = mixed.reshape(*mixed.shape[:2], N, H, out_sharding=heads)
    return jnp.einsum("btnh,nhd->btd", mixed, w["o"], out_sharding=P("x", None, None))


def mlp(w: Params, x: jax.Array) -> jax.Array:
    gate, up = jnp.einsum("btd,cdf->cbtf", x, w["gate"], out_sharding=P(None, "x", None, "y"))
    hidden = jax.nn.gelu(gate, approximate=True) * up
    return jnp.einsum("btf,fd->btd", hidden, w["down"], out_sharding=P("x", None, None))


def gemma_loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Next tokens by a decoder of Gemma's kind: grouped queries, a gated MLP, tied embedding."""
    tokens = reshard(batch["tokens"], P("x", None))
    table = params["embed"]
    x = table.at[tokens].get(out_sharding=P("x", None, None)) * np.sqrt(D)
    for w in params["layers"]:
        x = x + attention(w, norm(x, w["norms"][0]))
        x = x + mlp(w, norm(x, w["norms"][1]))
    x = norm(x, params["final"])
    logits = jnp.einsum("btd,vd->btv", x, table, out_sharding=P("x", None, "y"))
    targets = jax.nn.one_hot(reshard(batch["targets"], P("x", None)), V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * reshard(targets, P("x", None, "y")), -1))


def moe_init(key: jax.Array) -> Params:
    """Weights of a mixture of experts."""
    one, two, three, four = jax.random.split(key, 4)
    return {
        "in": jax.random.normal(one, (D, D)) / np.sqrt(D),
        "router": jax.random.normal(two, (D, E)) / np.sqrt(D),
        "up": jax.random.normal(three, (E, D, F)) / np.sqrt(D),
        "down": jax.random.normal(four, (E, F, D)) / np.sqrt(F),
    }


def moe_loss(own: Mesh) -> Any:
    """The loss of a mixture of experts that shards its experts over "y" by a `shard_map`.

    Args:
        own: mesh of axes "x" and "y", closed over.
    """
    local = E // own.shape["y"]

    def experts(x: jax.Array, chosen: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        mine = chosen - jax.lax.axis_index("y") * local
        mine = jnp.where((mine >= 0) & (mine < local), mine, local)
        order = jnp.argsort(mine)
        sizes = jnp.bincount(mine, length=local + 1)[:local]
        hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], up, sizes))
        out = jax.lax.ragged_dot(hidden, down, sizes)
        inside = jnp.arange(len(x)) < sizes.sum()
        out = jnp.where(inside[:, None], out, 0)[jnp.argsort(order)]
        return jax.lax.psum(out, "y")

    sharded = jax.shard_map(
        experts,
        mesh=own,
        in_specs=(P("x", None), P("x"), P("y", None, None), P("y", None, None)),
        out_specs=P("x", None),
        check_vma=False,
    )

    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"] @ params["in"]
        chosen = jnp.argmax(x @ params["router"], -1)
        out = sharded(x, chosen, params["up"], params["down"])
        return jnp.mean((x + out - batch["y"]) ** 2)

    return loss


def rows(count: int = 32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.normal(size=(count, D)).astype(np.float32) for name in ("x", "y")}
