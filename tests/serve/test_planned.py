"""What a plan says of a device is what an engine and the compiler make of it."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import shardlib
from shardlib import models
from shardlib.models.config import Experts, TransformerConfig
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity

CONFIG = TransformerConfig(
    name="served",
    vocab_size=512,
    layers=3,
    embed=256,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp=512,
    max_seq=256,
    compute_dtype="float32",
)
MODELS = {
    "dense": CONFIG,
    "few key heads": replace(CONFIG, kv_heads=1),
    "windows": replace(CONFIG, sliding_window=40),
    "windows in some layers": replace(CONFIG, sliding_window=40, global_every=2),
    "experts": replace(CONFIG, experts=Experts(count=4, per_token=2, mlp=256)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor", [2, 4])
def test_bytes_of_a_device_are_those_of_an_engine(name: str, tensor: int):
    def forward(model, tokens):
        return model(tokens)

    init = models.build(MODELS[name])[0]
    plan = shardlib.plan_serving(
        init,
        forward,
        topology=f"cpu:{tensor}",
        prompt=100,
        output=28,
        weights="model",
        cache="model",
        pin={"tensor": tensor, "batch": 4, "page": 16},
    )
    engine = Engine(
        init,
        forward,
        capacity=Capacity.of(plan),
        tensor=plan.choice.tensor,
        check=False,
    )
    assert engine.capacity.slots == 4 and engine.capacity.longest == 128
    assert engine.capacity.most_tokens == 4 + plan.choice.chunk
    device = jax.devices()[0]

    def held(tree) -> int:
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == device
        )

    # and it serves a whole batch of the requests that were planned, side by side
    answers = engine.generate([[1 + n] * 100 for n in range(4)], 4)
    assert [len(one) for one in answers] == [4] * 4 and engine.schedule.preempted == 0
    predicted = plan.estimate.device_bytes
    assert held(engine.compute.weights) == pytest.approx(predicted.weights, rel=0.03)
    assert held(engine.compute.pages) == predicted.cache
