"""Small transformers, traced once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import optax

from shardlib import models
from shardlib.annotation.model import read
from shardlib.cost.activations import saved_pairs
from shardlib.graph import Problem, StepGraph
from shardlib.models.config import Experts, LatentAttention, TransformerConfig
from shardlib.tracing.trace import trace

SEQ, BATCH = 256, 2
LLAMA = TransformerConfig(
    name="llama",
    vocab_size=128,
    layers=2,
    embed=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=192,
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
)
GPT = TransformerConfig(
    name="gpt",
    vocab_size=128,
    layers=2,
    embed=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    mlp=256,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    learned_positions=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
)
LATENT = replace(
    LLAMA,
    name="latent",
    kv_heads=4,
    latent=LatentAttention(q_lora=32, kv_lora=16, rope_dim=8, nope_dim=16, v_dim=16),
)
WINDOWS = replace(
    LLAMA,
    name="windows",
    layers=4,
    sliding_window=64,
    global_every=2,
    attention_softcap=50.0,
    qk_norm=True,
)
LOCAL = replace(LLAMA, name="local", sliding_window=64)
MIXTURE = replace(LLAMA, name="mixture", experts=Experts(count=4, per_token=2, mlp=64))
SQUARE = replace(LLAMA, name="square", heads=2, kv_heads=1, head_dim=SEQ)
CONFIGS = {config.name: config for config in (LLAMA, GPT, LATENT, WINDOWS, LOCAL, MIXTURE, SQUARE)}


@lru_cache(maxsize=16)
def problem(name: str, policies: tuple[str, ...] = ("none", "full", "dots")) -> Problem:
    """The training step of a small transformer, under the remat policies that a test looks at."""
    config = CONFIGS[name]
    init, loss = models.build(config)
    batch = models.example_batch(config, BATCH, SEQ)
    return trace(
        read(init), loss, batch, optimizer=optax.adamw(1e-4), policies=policies, rows="mean"
    ).problem


def plain(name: str) -> Problem:
    """`problem` without rematerialisation alone, which takes a third of the tracing."""
    return problem(name, ("none",))


def saved_bytes(step: StepGraph) -> int:
    """Bytes that loops save for other loops, without copies of weights."""
    weights, graph = step.weights(), step.graph
    values = {graph.ops[pair.exit].results[0]: pair.value for pair in saved_pairs(graph)}
    return sum(
        graph.values[stacked].bytes for stacked, value in values.items() if value not in weights
    )
