"""Is the step that is sharded by hand for TPUs that of the reference model?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from benchmarks.hand_llama import AXIS, HandLlama
from benchmarks.hlo_collectives import by_overlap
from shardlib import models
from shardlib.layout import MeshShape

CONFIG = models.TransformerConfig(
    name="tiny",
    vocab_size=64,
    layers=2,
    embed=32,
    heads=2,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    max_seq=16,
)


class WithoutKernel(HandLlama):
    """The same with attention that any device computes."""

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        seq = query.shape[1]
        scores = jnp.einsum("bqhw,bkhw->bhqk", query, key, preferred_element_type=jnp.float32)
        seen = jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(seen, scores * self.config.head_dim**-0.5, -jnp.inf)
        return jnp.einsum("bhqk,bkhw->bqhw", jax.nn.softmax(scores).astype(value.dtype), value)


@pytest.mark.long
def test_loss_is_that_of_the_reference_model() -> None:
    init, loss = models.build(CONFIG)
    model = init(nnx.Rngs(0))
    numbers = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(numbers.integers(0, CONFIG.vocab_size, (2, CONFIG.max_seq)), jnp.int32)
        for name in ("inputs", "targets")
    }
    layers = model.layers
    params = {
        "embedding": model.embedding[...],
        "attention_norm": layers.attention_norm.scale[...],
        "mlp_norm": layers.mlp_norm.scale[...],
        **{k: getattr(layers.attention, k)[...] for k in ("query", "key", "value", "out")},
        **{k: getattr(layers.mlp, k)[...] for k in ("gate", "up", "down")},
        "norm": model.norm.scale[...],
        "head": model.head[...],
    }
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))
    hand = WithoutKernel(config=CONFIG, mesh=mesh)
    assert {k: v.shape for k, v in params.items()} == {
        k: shape for k, (shape, _) in hand.shapes().items()
    }
    found = jax.jit(hand.loss)(params, batch)
    np.testing.assert_allclose(found, loss(model, batch)[0], rtol=1e-4)


def test_collectives_that_are_started_or_carried_by_a_fusion_overlap() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=8

%carried (p: f32[8,4]) -> f32[64,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %gathered = f32[64,4]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %begun = f32[64,4]{1,0} custom-call(%gathered), custom_call_target="AsyncCollectiveStart"
}

ENTRY %main (a: f32[8,4]) -> f32[64,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %r = f32[8,4]{1,0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
  %s = (f32[8,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%r), replica_groups=[1,8]<=[8], dimensions={0}
  %d = f32[64,4]{1,0} all-gather-done(%s)
  ROOT %f = f32[64,4]{1,0} fusion(%a), kind=kOutput, calls=%carried
}
"""
    rows, _ = by_overlap(text, MeshShape(fsdp=8))
    assert {k: (row["waited"], row["overlapped"]) for k, row in rows.items()} == {
        "all-gather": (0, 2),
        "all-reduce": (1, 0),
    }
