"""The models of published inference runs, as forward passes of a few lines.

Sizes: GPT-J 6B (EleutherAI, config.json), Llama 2 (arXiv:2307.09288) and 3 (arXiv:2407.21783),
Falcon 180B (tiiuae, config.json), PaLM 62B and 540B (arXiv:2204.02311, table 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

import shardlib
from shardlib.annotation.model import read
from shardlib.serve.cost import ServedModel
from shardlib.serve.frontend import traced_served

Tree = dict[str, jax.Array]


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; `parallel` where attention and MLP read the same and are added up together."""

    layers: int
    embed: int
    heads: int
    groups: int
    width: int
    mlp: int
    vocab: int
    gated: bool = True
    parallel: bool = False


LLAMA3_70B = Sizes(80, 8192, 64, 8, 128, 28672, 128256)
MODELS: Mapping[str, Sizes] = {
    "gptj-6b": Sizes(28, 4096, 16, 16, 256, 16384, 50400, gated=False, parallel=True),
    "llama2-7b": Sizes(32, 4096, 32, 32, 128, 11008, 32000),
    "llama2-70b": Sizes(80, 8192, 64, 8, 128, 28672, 32000),
    "falcon-180b": Sizes(80, 14848, 232, 8, 64, 59392, 65024, gated=False, parallel=True),
    "llama3.1-8b": Sizes(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3.1-70b": LLAMA3_70B,
    "llama3.3-70b": LLAMA3_70B,
    "llama3.1-405b": Sizes(126, 16384, 128, 8, 128, 53248, 128256),
    "palm-540b": Sizes(118, 18432, 48, 1, 256, 73728, 256000, parallel=True),
    "palm-62b": Sizes(64, 8192, 32, 1, 256, 32768, 256000, parallel=True),
}


@lru_cache
def served(name: str) -> ServedModel:
    """The model of a row, traced."""
    sizes = MODELS[name]
    model = read(shardlib.tree(lambda key: _weights(sizes, key), _axes(sizes)))
    return traced_served(model, _forward(sizes), longest=4096)


def _shapes(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    n, d, f = sizes.layers, sizes.embed, sizes.mlp
    return {
        "table": ((sizes.vocab, d), ("vocab", "embed")),
        "head": ((d, sizes.vocab), ("embed", "vocab")),
        "query": ((n, d, sizes.heads, sizes.width), (None, "embed", "heads", None)),
        "key": ((n, d, sizes.groups, sizes.width), (None, "embed", "kv_heads", None)),
        "value": ((n, d, sizes.groups, sizes.width), (None, "embed", "kv_heads", None)),
        "out": ((n, sizes.heads, sizes.width, d), (None, "heads", None, "embed")),
        "up": ((n, d, f), (None, "embed", "mlp")),
        **({"gate": ((n, d, f), (None, "embed", "mlp"))} if sizes.gated else {}),
        "down": ((n, f, d), (None, "mlp", "embed")),
    }


def _weights(sizes: Sizes, key: jax.Array) -> Tree:
    del key
    return {name: jnp.zeros(shape, jnp.bfloat16) for name, (shape, _) in _shapes(sizes).items()}


def _axes(sizes: Sizes) -> dict[str, tuple[str | None, ...]]:
    return {name: axes for name, (_, axes) in _shapes(sizes).items()}


def _forward(sizes: Sizes):
    def layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        y = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        q, k, v = (
            jnp.einsum("bsd,dnh->bsnh", y, weights[name]) for name in ("query", "key", "value")
        )
        mixed = jnp.einsum("bsnh,nhd->bsd", shardlib.attention(q, k, v), weights["out"])
        if not sizes.parallel:
            x = x + mixed
            y = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        hidden = y @ weights["up"]
        hidden = jax.nn.silu(y @ weights["gate"]) * hidden if sizes.gated else jax.nn.gelu(hidden)
        out = hidden @ weights["down"]
        return (x + (mixed + out) if sizes.parallel else x + out), None

    def forward(params: Tree, tokens: jax.Array) -> jax.Array:
        layers = {name: one for name, one in params.items() if name not in ("table", "head")}
        x, _ = jax.lax.scan(layer, params["table"][tokens], layers)
        return x @ params["head"]

    return forward
