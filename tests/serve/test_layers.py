"""Weights held by layers, and attention that reads all its pages at once: the forms of CPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlib import models
from shardlib.annotation.tree import read
from shardlib.functions.attention import Attention
from shardlib.serve.cache import (
    Layered,
    Sets,
    all_plain,
    by_layer,
    is_held,
    joined,
    layer,
    over_pages,
    plain,
    store,
    written_out,
)
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Asked, Capacity
from tests.serve.test_meshes import FAMILIES, LONGEST, forward, prompts

PAGE, PAGES, TABLE = 4, 200, 48


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_that_is_written_out_computes_what_the_loop_does(reverse: bool):
    draw = np.random.default_rng(0)
    matrices, shifts = draw.normal(size=(3, 4, 4)), draw.normal(size=(3, 4))
    held = by_layer(jnp.asarray(matrices))

    def body(carry: Any, rows: Any) -> Any:
        after = jnp.tanh(carry @ rows[0] + rows[1])
        return after, (after, 2 * rows[1])

    scanned = (jnp.asarray(matrices), jnp.asarray(shifts))
    right = jax.lax.scan(body, jnp.ones(4), scanned, reverse=reverse)
    found = written_out(body, jnp.ones(4), (held, scanned[1]), length=3, reverse=reverse)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, right)


def test_rows_stay_where_the_array_is():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    array = jax.device_put(np.arange(48.0, dtype=np.float32).reshape(3, 4, 4), where)
    held = by_layer(array)
    assert held.shape == array.shape and held.dtype == array.dtype
    assert held.sharding == where
    mine = NamedSharding(mesh, PartitionSpec("tensor"))
    assert all(leaf.sharding == mine for leaf in jax.tree.leaves(held.rows))
    np.testing.assert_array_equal(plain(held), array)
    stored = store(array, 1, "int8")
    rows = by_layer(stored)
    np.testing.assert_array_equal(plain(rows), plain(stored))
    np.testing.assert_array_equal(plain(layer(rows, 2)), plain(stored)[2])


def test_engines_on_cpus_hold_the_layers_of_a_loop_one_by_one():
    model = read(models.build(FAMILIES["grouped"])[0])
    served = Engine(
        models.build(FAMILIES["grouped"])[0],
        forward,
        weights=3,
        capacity=Capacity(longest=LONGEST, slots=2, page=4, budget=8),
        tensor=2,
    )
    held = jax.tree.leaves(served.compute.weights[0], is_leaf=is_held)
    whole = jax.tree.leaves(model.init(3)[0])
    assert sum(isinstance(one, Layered) for one in held) >= 7
    for one, right in zip(held, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(plain(one)), np.asarray(right))


def test_adapters_of_layers_in_a_loop_answer_as_models_that_have_them():
    init, sizes = (
        models.build(FAMILIES["grouped"])[0],
        Capacity(longest=LONGEST, slots=2, page=4, budget=8, adapters=2),
    )
    params, state = jax.tree.map(np.asarray, read(init).init(3))
    other = np.asarray(read(init).init(8)[0]["layers"]["mlp"]["up"])
    served = Engine(init, forward, weights=(params, state), capacity=sizes)
    merged = {
        **params,
        "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "up": other}},
    }
    alone = Engine(init, forward, weights=(merged, state), capacity=sizes, check=False)
    before = served.generate([prompts()[0]], 6)
    served.adapt("other", {"layers.mlp.up": other})
    asked = [Asked(prompt=prompts()[0], most=6, adapter=name) for name in ("", "other")]
    requests = [served.add(one) for one in asked]
    served.run()
    assert [requests[0].answer] == before
    assert [requests[1].answer] == alone.generate([prompts()[0]], 6)


def attended(
    form: Attention, query: np.ndarray, key: np.ndarray, value: np.ndarray, at: int
) -> np.ndarray:
    """Attention of a token [N, H] over keys and values [U, K, H], by the textbook."""
    group = query.shape[0] // key.shape[1]
    seen = np.arange(len(key)) <= at
    if form.window:
        seen &= at - np.arange(len(key)) < form.window
    scores = np.einsum("nh,unh->nu", query, key.repeat(group, axis=1)) * form.scale
    if form.softcap:
        scores = form.softcap * np.tanh(scores / form.softcap)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("nu,unv->nv", weights, value.repeat(group, axis=1))


@pytest.mark.parametrize(
    ("chunk", "heads", "window", "softcap", "last"),
    [(1, 4, 0, 5.0, 100), (1, 4, 9, 0.0, 150), (1, 16, 0, 0.0, 180), (3, 4, 0, 0.0, 30)],
)
def test_attention_over_pages_is_attention(
    chunk: int, heads: int, window: int, softcap: float, last: int
):
    form = Attention(
        scale=0.3,
        causal=True,
        window=window,
        softcap=softcap,
        block=0,
        parts=1,
        chosen=False,
        packed=False,
    )
    draw = np.random.default_rng(last + heads)
    keys, values = draw.normal(size=(2, PAGES, PAGE, heads, 8)).astype(np.float32)
    table = draw.permutation(PAGES)[: 2 * TABLE].reshape(2, TABLE)
    queries = draw.normal(size=(2, chunk, 2 * heads, 8)).astype(np.float32)
    first = np.asarray([last - chunk, 5])
    position = first[:, None] + np.arange(chunk)
    given = Sets(
        table=jnp.asarray(table, jnp.int32),
        columns=TABLE,
        position=jnp.asarray(position, jnp.int32),
        queries=[jnp.asarray(queries)],
        everywhere=None,
    )

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(keys)[pages], jnp.asarray(values)[pages]

    parts = over_pages(form, given, read, size=PAGE, tokens_per_page=PAGE, first=0)
    found = joined(jax.tree.map(lambda one: one[None], parts))
    for row in range(2):
        mine, own = (one[table[row]].reshape(-1, heads, 8) for one in (keys, values))
        for token in range(chunk):
            right = attended(form, queries[row, token], mine, own, int(position[row, token]))
            np.testing.assert_allclose(found[row, token], right, rtol=2e-5, atol=2e-6)


def test_what_is_held_by_layers_is_the_tree_again():
    tree = {"a": by_layer(jnp.arange(6.0).reshape(3, 2)), "b": jnp.ones(2)}
    found = all_plain(tree)
    np.testing.assert_array_equal(found["a"], np.arange(6.0).reshape(3, 2))
    assert found["b"] is tree["b"]
