"""The order of use is that of the computation, whatever names and trees say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from shardlib.graph import Graph
from shardlib.islands.exchanges import Part
from shardlib.islands.transfers import first_uses, in_buckets, in_order, work_before
from shardlib.planner.plan import source_of

SHAPES = {
    "z_embed": (8, 4),
    "m.up": (3, 4, 6),
    "m.down": (3, 6, 4),
    "b_scale": (4,),
    "a_head": (4, 8),
}


def _graph(loss: Any) -> Graph:
    params = {
        "z_embed": np.zeros((8, 4), np.float32),
        "m": {"up": np.zeros((3, 4, 6), np.float32), "down": np.zeros((3, 6, 4), np.float32)},
        "b_scale": np.zeros(4, np.float32),
        "a_head": np.zeros((4, 8), np.float32),
    }
    axes = jax.tree.map(lambda leaf: (None,) * leaf.ndim, params)
    batch = {"tokens": np.zeros((4, 2), np.int32)}
    init = shardlib.tree(lambda key: jax.tree.map(jnp.asarray, params), axes)
    plan = shardlib.plan(init, loss, optax.sgd(0.1), batch, topology="cpu:1")
    return source_of(plan).workload.problem.forward


def _scanned(params: Any, batch: Any) -> jax.Array:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)  # no use of any

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + (jnp.tanh(x @ w["up"]) @ w["down"]) * params["b_scale"], None

    x, _ = jax.lax.scan(layer, params["z_embed"][batch["tokens"]], params["m"])
    return (x @ params["a_head"]).astype(jnp.float32).mean()


def _written_out(params: Any, batch: Any) -> jax.Array:
    x = params["z_embed"][batch["tokens"]]
    for layer in range(3):
        x = x + (jnp.tanh(x @ params["m"]["up"][layer]) @ params["m"]["down"][layer])
    return ((x * params["b_scale"]) @ params["a_head"]).mean() + (params["b_scale"] ** 2).sum()


def test_layers_of_stacks_are_used_one_after_the_other() -> None:
    parts = in_order(first_uses(_graph(_scanned)), SHAPES)
    assert [str(part) for part in parts] == [
        "z_embed[0:32]",
        "m.up[0:24]",
        "m.down[0:24]",
        "b_scale[0:4]",
        "m.up[24:48]",
        "m.down[24:48]",
        "m.up[48:72]",
        "m.down[48:72]",
        "a_head[0:32]",
    ]


def test_what_is_written_out_is_used_as_a_whole_at_its_first_layer() -> None:
    uses = first_uses(_graph(_written_out))
    assert [use.path for use in uses] == ["z_embed", "m.up", "m.down", "b_scale", "a_head"]
    assert not any(use.rows for use in uses)


def test_work_before_a_place_adds_up_to_that_of_the_whole() -> None:
    graph = _graph(_scanned)
    uses = {use.path: use for use in first_uses(graph)}
    up, head = uses["m.up"], uses["a_head"]
    before = work_before(graph, [up.of_row(row) for row in range(3)] + [head.place])
    iteration = before[1] - before[0]
    assert iteration >= 4 * 2 * 4 * 2 * 6 * 2  # two matmuls of eight rows, 4 x 6
    assert before[2] - before[1] == iteration and before[3] <= before[0] + 3 * iteration
    assert before[0] >= 0 and before[3] < graph.flops


def test_buckets_are_all_elements_once_and_in_order() -> None:
    parts = in_order(first_uses(_graph(_scanned)), SHAPES)
    for elements in (1, 7, 50, 10_000):
        buckets = in_buckets(parts, elements=elements)
        sizes = [sum(part.stop - part.start for part in bucket) for bucket in buckets]
        assert all(size == elements for size in sizes[:-1]) and 0 < sizes[-1] <= elements
        flat = [(p.path, n) for bucket in buckets for p in bucket for n in range(p.start, p.stop)]
        assert flat == [(p.path, n) for p in parts for n in range(p.start, p.stop)]


def test_nothing_makes_no_bucket() -> None:
    assert in_buckets([], elements=4) == ()
    assert in_buckets([Part(path="w", start=0, stop=0)], elements=4) == ()
