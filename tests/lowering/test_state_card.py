"""A state as a card: what each device has of its arrays, also after a step has donated them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.lowering.runtime import TrainState
from tests.report.test_text import read


def test_it_says_the_bytes_that_a_device_has():
    mesh = jax.make_mesh((8,), ("fsdp",))
    sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
    weight = jax.device_put(jnp.zeros((64, 32), jnp.float32), sharded)
    params = {"<weight>": weight, "bias": jnp.zeros((32,), jnp.float32)}
    state = TrainState(step=jnp.int32(0), params=params, model_state={}, opt_state={})
    held = max(
        sum(s.data.nbytes for a in params.values() for s in a.addressable_shards if s.device == d)
        for d in jax.devices()
    )
    text = read(state._repr_html_())
    assert held == 64 * 32 * 4 // 8 + 32 * 4 and "params: 2 arrays, 1.12 KiB a device" in text
    assert "64 x 32" in text and "('fsdp',)" in text and "params['<weight>']" in text
    weight.delete()
    assert text.startswith(read(state._repr_html_()))  # the tree is left out
