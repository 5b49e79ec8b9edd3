"""Weights held as the first operands of their products: the form of CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib
from shardlib import models
from shardlib.annotation.tree import read
from shardlib.annotation.trees import path_text
from shardlib.serve import cache
from shardlib.serve.cache import Columns, Layered, in_columns, is_held, plain, product, whole
from shardlib.serve.engine import Engine
from shardlib.serve.layers import summed_dims
from shardlib.serve.program import traced_forward
from shardlib.serve.requests import Capacity
from shardlib.tracing.program import flatten
from tests.serve.test_meshes import FAMILIES, LONGEST, forward


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
