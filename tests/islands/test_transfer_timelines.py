"""The exchange of a plan as a timeline."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.transfers import CROSSING, Transfers, at_once
from shardlib.planner.plan import Plan

WIDTH, LAYERS, VOCABULARY = 256, 48, 2048
MACHINE = "2@100gbit-1ms*h100:2"


def _weights(key: jax.Array) -> Any:
    return {
        "z_embed": jnp.zeros((VOCABULARY, WIDTH)),
        "layers": {
            "up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)),
            "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH)),
        },
        "a_head": jnp.zeros((WIDTH, VOCABULARY)),
    }


AXES = {
    "z_embed": ("vocab", "embed"),
    "layers": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
    "a_head": ("embed", "vocab"),
}


def _loss(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["z_embed"][batch["tokens"]], params["layers"])
    return jnp.mean((x @ params["a_head"]) ** 2)


def _plan(**pin: Any) -> Plan:
    batch = {"tokens": np.zeros((16, 64), np.int32)}
    init = shardlib.tree(_weights, AXES)
    pin |= {"mesh.stage": 1}
    return shardlib.plan(init, _loss, optax.sgd(0.1), batch, topology=MACHINE, pin=pin)


def _exchange(**pin: Any) -> Transfers:
    found = _plan(**pin).timeline().exchange
    assert found is not None
    return found


@pytest.mark.parametrize("exchange", ["diloco:2:4", "compressed:2:quantised:dtype=int8"])
def test_buckets_cross_in_the_order_of_use_once_each(exchange: str) -> None:
    found = _exchange(exchange=exchange)
    order = list(dict.fromkeys(part.path for bucket in found.buckets for part in bucket))
    assert order == ["z_embed", "layers.up", "layers.down", "a_head"]
    shapes = jax.eval_shape(_weights, jax.ShapeDtypeStruct((), np.uint32))
    elements = sum(part.stop - part.start for bucket in found.buckets for part in bucket)
    assert elements == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    if exchange.startswith("diloco"):  # all parameters are there at the same time
        crossing = [span.bucket for span in found.replay.spans if span.kind == CROSSING]
        assert crossing == list(range(len(found.buckets)))
    assert found.replay.seconds <= found.at_once == at_once(found.replay.loads).seconds


def test_it_is_text_and_plain_data() -> None:
    timeline = _plan(exchange="diloco:2:4").timeline()
    lines = str(timeline).splitlines()
    assert lines[0].endswith("diloco:2:4, 25 buckets in order of use")
    assert [line.split()[0] for line in lines[1:4]] == ["backward", "link", "forward"]
    assert max(map(len, lines[:4])) <= 110 and "in the order of use" in str(timeline)
    data = json.loads(json.dumps(timeline.to_json()))
    assert len(data["exchange"]["buckets"]) == 25 and timeline.bubble == 0


@pytest.mark.parametrize("exchange", ["exact", "diloco:2:8:delay=2", "diloco:2:8:fragments=2"])
def test_steps_that_do_not_wait_as_a_whole_show_none(exchange: str) -> None:
    with pytest.raises(shardlib.PlanError, match="no pipeline stages to draw"):
        _plan(exchange=exchange).timeline()
