"""Weights and a cache of eight bits: how far logits move."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.annotation.trees import path_text
from shardlib.errors import ArgumentError
from shardlib.functions.attention import Attention
from shardlib.serve import cache
from shardlib.serve.cache import (
    Columns,
    Layered,
    TokenSets,
    all_plain,
    by_layer,
    in_columns,
    is_held,
    is_stored,
    joined,
    layer,
    over_pages,
    plain,
    product,
    read_pages,
    store,
    whole,
    write_rows,
)
from shardlib.serve.engine import Engine
from shardlib.serve.layers import summed_dims, written_out
from shardlib.serve.program import stored_page, traced_forward
from shardlib.serve.requests import Capacity, GenerationRequest, Storage
from shardlib.tracing.program import flatten
from tests.serve.test_meshes import FAMILIES, LONGEST, forward, prompts


def engine(family: str, tensor: int, **stored: str) -> Engine:
    """It compares its logits with those of the forward pass with the weights that it holds."""
    return Engine(
        models.build(FAMILIES[family])[0],
        forward,
        weights=3,
        capacity=Capacity(longest=LONGEST, slots=4, page=4, budget=8, storage=Storage(**stored)),
        tensor=tensor,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tensor", "how", "moved"),
    [("grouped", 4, "int8", 0.03), ("latent", 2, "int8", 0.03), ("grouped", 1, "fp8", 0.12)],
)
def test_logits_hardly_move_with_weights_of_eight_bits(
    family: str, tensor: int, how: str, moved: float
):
    model = read(models.build(FAMILIES[family])[0])
    served = engine(family, tensor, weights=how)
    held = served.compute.weights
    tokens = np.random.default_rng(0).integers(0, 61, (2, LONGEST))
    exact = np.asarray(forward(model.rebuild(*model.init(3)), tokens))
    found = np.asarray(forward(model.rebuild(*jax.device_get(all_plain(held))), tokens))
    # of matrices the eight bits; with experts a choice of another one moves logits, too
    off = np.abs(found - exact).max(axis=-1) / np.abs(exact).max()
    assert 0 < np.median(off) <= moved, np.median(off)
    stored = [leaf for leaf in jax.tree.leaves(held[0], is_leaf=is_stored) if is_stored(leaf)]
    assert len(stored) >= 7 and all(leaf.values.dtype.itemsize == 1 for leaf in stored)
    assert all(leaf.scale.size < leaf.values.size for leaf in stored)
    (answer,) = served.generate([[5, 3, 9]], 4)
    assert len(answer) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "how", "tensor", "moved"),
    [("grouped", "fp8", 2, 0.1), ("grouped", "int8", 4, 0.02), ("latent", "int8", 2, 0.02)],
)
def test_logarithms_hardly_move_with_a_cache_of_eight_bits(
    family: str, how: str, tensor: int, moved: float
):
    found: list[np.ndarray] = []
    for kind in ("model", how):
        served = engine(family, tensor, cache=kind)
        request = served.add(GenerationRequest(prompt=prompts()[0], most=1, scored=True))
        served.run()
        found.append(np.asarray([one.logprob for one in request.scores]))
        dtypes = {str(page.dtype) for page in jax.tree.leaves(served.compute.pages)}
        kept = {"model": {"float32"}, "fp8": {"float8_e4m3fn"}, "int8": {"int8", "float32"}}
        assert dtypes == kept[kind]
        (answer,) = served.generate([[5, 3, 9, *range(20)]], 4)  # chunks, and tokens after them
        assert len(answer) == 4
    off = np.abs(found[0] - found[1])
    assert 0 < off.max() <= moved, off


def test_rows_of_an_int8_cache_are_those_that_were_written():
    draw = np.random.default_rng(0)
    rows = jnp.asarray(draw.normal(size=(5, 2, 16)) * [[[1.0], [30.0]]], jnp.float32)
    page = stored_page(jax.ShapeDtypeStruct((1, 3, 4, 2, 16), jnp.float32), "int8")
    pages = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), page)
    number, place = jnp.asarray([0, 0, 2, 2, 3]), jnp.asarray([0, 3, 1, 2, 0])  # the last nowhere
    found = read_pages(write_rows(pages, (0, number, place), rows), 0, jnp.arange(3))
    wanted = np.zeros((3, 4, 2, 16))
    wanted[number[:4], place[:4]] = rows[:4]
    largest = np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(found - wanted) <= largest / 254 + 1e-6).all(), "half a step of each head"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"weights": "int4"}, "weights are stored as 'int4'; known are model, int8, fp8"),
        ({"cache": "int4"}, "keys and values are stored as 'int4'; known are model, int8, fp8"),
    ],
    ids=["weights", "cache"],
)
def test_other_words_are_refused(stored: dict[str, str], said: str):
    with pytest.raises(ArgumentError, match=said):
        Storage(**stored)


@pytest.mark.parametrize(("how", "dtype"), [("fp8", jnp.float8_e4m3fn), ("int8", jnp.int8)])
def test_qwix_stores_no_better(how: str, dtype: type):
    """fp8 to the bit, and int8 with no smaller error."""
    qwix = pytest.importorskip("qwix", reason="needs the extra `fp8`")
    array = jax.random.normal(jax.random.key(1), (40, 24)) * jnp.exp(jnp.arange(24.0) / 4)
    theirs = qwix.dequantize(qwix.quantize(array, dtype, channelwise_axes=(1,)))
    ours = plain(store(array, 0, how))
    if how == "fp8":
        np.testing.assert_array_equal(ours, theirs)
    assert jnp.linalg.norm(ours - array) <= jnp.linalg.norm(theirs - array)


# Weights held as the first operands of their products: the form of CPUs.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "LEAST", 4)


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize(
    "equation", ["bsk,kn->bsn", "bsk,nk->bsn", "bshd,hdn->bsn", "bsk,khd->bshd", "nk,bsk->nbs"]
)
def test_products_of_tokens_are_those_of_the_array(equation: str, rows: int):
    draw = np.random.default_rng(rows)
    left, right = equation.split("->")[0].split(",")
    sizes = {"b": 1, "s": 1, "k": 6, "n": 10, "h": 2, "d": 5}
    first = "b" not in left
    weights = draw.normal(size=[sizes[dim] for dim in (left if first else right)]).astype(
        np.float32
    )
    tokens = draw.normal(size=[rows, *(sizes[dim] for dim in (right if first else left))]).astype(
        np.float32
    )

    def of(array: Any, token: Any) -> Any:
        return jnp.einsum(equation, *((array, token) if first else (token, array)))

    traced = jax.make_jaxpr(of)(weights, tokens[0])
    program = flatten(traced)
    (dot,) = (one for one in program.equations if one.name == "dot_general")
    turned = program.equations[-1] is not dot
    summed = summed_dims(program, (), {})[program.inputs[0]]
    held = in_columns(jnp.asarray(weights), summed=summed, parts=3)
    assert len(held.parts) == 3
    np.testing.assert_array_equal(whole(held), weights)
    by_number = {program.inputs[0]: held}

    def held_of(token: Any) -> Any:
        values = {**by_number, program.inputs[1]: token}
        return product(dot, [values[number] for number in dot.inputs])

    found = jax.vmap(held_of)(jnp.asarray(tokens))
    right_one = jax.vmap(lambda token: of(weights, token))(tokens)
    if turned:  # einsum puts dims in another order after the product
        (equation_after,) = program.equations[-1:]
        order = (0, *(1 + dim for dim in equation_after.params["permutation"]))
        found = found.transpose(order)
    np.testing.assert_allclose(found, right_one, rtol=1e-5, atol=1e-5)


def test_what_is_used_otherwise_stays_an_array():
    def run(looked: Any, twice: Any, across: Any, scaled: Any, out: Any, x: Any) -> Any:
        y = looked[0] @ twice + (x @ twice.T) @ across
        return jax.vmap(jnp.matmul)(y[None], scaled[None])[0] @ jnp.tanh(out)

    shapes = [(3, 4), (4, 4), (4, 4), (4, 4), (4, 4), (2, 4)]
    program = flatten(jax.make_jaxpr(run)(*(jnp.ones(shape) for shape in shapes)))
    found = summed_dims(program, (), {})
    assert [found.get(number) for number in program.inputs] == [None, None, (0,), None, None, (1,)]


@pytest.mark.parametrize("family", ["grouped", "latent", "experts"])
def test_engines_hold_what_is_only_multiplied_with(family: str):
    init = models.build(FAMILIES[family])[0]
    model = read(init)
    sizes = Capacity(longest=LONGEST, slots=2, page=4, budget=8)
    served = Engine(init, forward, weights=3, capacity=sizes)
    held = jax.tree.leaves(served.compute.weights[0], is_leaf=is_held)
    whole_ones = jax.tree_util.tree_leaves_with_path(model.init(3)[0])
    named: dict[str, bool] = {}
    for one, (path, right) in zip(held, whole_ones, strict=True):
        np.testing.assert_array_equal(np.asarray(plain(one)), np.asarray(right))
        rows = one.rows if isinstance(one, Layered) else (one,)
        named[path_text(path)] = all(isinstance(row, Columns) for row in rows)
    multiplied = traced_forward(model, forward, longest=LONGEST).factors
    assert sum(named.values()) == len(multiplied) > 2
    assert not any(one for name, one in named.items() if "norm" in name or "embed" in name)


def test_devices_that_share_weights_hold_arrays():
    init = models.build(FAMILIES["grouped"])[0]
    sizes = Capacity(longest=LONGEST, slots=2, page=4, budget=8)
    served = Engine(init, forward, weights=3, capacity=sizes, tensor=2)
    leaves = jax.tree.leaves(
        served.compute.weights[0], is_leaf=lambda one: isinstance(one, Columns)
    )
    assert not any(isinstance(one, Columns) for one in leaves)


@pytest.mark.long
@pytest.mark.parametrize("cast", [("up",), ("up", "down")])
def test_stacks_that_are_cast_before_a_loop_are_served(cast: tuple[str, ...]):
    def init(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 3)
        return {
            "embed": jax.random.normal(keys[0], (31, 16)),
            "up": jax.random.normal(keys[1], (2, 16, 48)) / 4,
            "down": jax.random.normal(keys[2], (2, 16, 16)) / 4,
        }

    def forward(params: Any, tokens: Any) -> Any:
        stack = {
            name: params[name].astype(jnp.bfloat16).astype(jnp.float32)
            if name in cast
            else params[name]
            for name in ("up", "down")
        }

        def layer(x: Any, row: Any) -> Any:
            heads = (x @ row["up"]).reshape(*x.shape[:2], 6, 8)
            mixed = shardlib.attention(*jnp.split(heads, 3, axis=2))
            return x + mixed.reshape(x.shape) @ row["down"], None

        x, _ = jax.lax.scan(layer, params["embed"][tokens], stack)
        return x @ params["embed"].T

    model = shardlib.tree(init, {})
    served = Engine(model, forward, weights=3, capacity=Capacity(longest=16, slots=2))
    prompt, right = [5, 2, 7], [5, 2, 7]
    params = read(model).init(3)[0]
    for _ in range(5):
        right.append(int(forward(params, jnp.asarray([right]))[0, -1].argmax()))
    assert served.generate([prompt], 5) == [right[3:]]


# Weights held by layers, and attention that reads all its pages at once: the forms of CPUs.

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


@pytest.mark.long
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
    asked = [GenerationRequest(prompt=prompts()[0], most=6, adapter=name) for name in ("", "other")]
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
    given = TokenSets(
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
