"""A program evaluated again computes what it computed, in value and gradient, under every policy,
on every kind of control flow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.errors import TracingError
from shardlib.tracing.jaxpr_to_graph import graph_from_jaxpr
from shardlib.tracing.rewriting import evaluate

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 4)), jnp.float32)


@jax.custom_vjp
def doubled_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def loop_while(x: jax.Array, w: jax.Array) -> jax.Array:
    state = jax.lax.while_loop(
        lambda s: s[0] < jnp.sum(w[0] > 9) + 3,
        lambda s: (s[0] + 1, s[1] * 0.5),
        (0, jax.lax.stop_gradient(x)),
    )
    return jnp.sum(state[1] @ w[0] * x)


PROGRAMS: dict[str, Callable[..., jax.Array]] = {
    "scan": lambda x, w: jnp.sum(jax.lax.scan(lambda c, k: (jnp.tanh(c @ k), jnp.sum(c)), x, w)[0]),
    "scan with stack": lambda x, w: jnp.sum(
        jax.lax.scan(lambda c, k: (jnp.tanh(c @ k), c[0]), x, w, reverse=True)[1] ** 2
    ),
    "scan from literal": lambda x, w: jax.lax.scan(lambda c, k: (c + jnp.sum(x @ k), None), 0.0, w)[
        0
    ],
    "nested scan": lambda x, w: jnp.sum(
        jax.lax.scan(
            lambda c, k: (
                jax.lax.scan(
                    lambda d, r: (jnp.tanh(d * 0.5 + 0.2 * jnp.dot(d, r)), None), c @ k, k
                )[0],
                None,
            ),
            x,
            w,
        )[0]
    ),
    "cond": lambda x, w: jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: x @ w[0], lambda: x * 2)),
    "switch": lambda x, w: jnp.sum(
        jax.lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.cos, jnp.tanh, lambda y: y @ w[1]], x)
    ),
    "while": loop_while,
    "remat": lambda x, w: jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))(x, w[0])),
    "remat in scan": lambda x, w: jnp.sum(
        jax.lax.scan(jax.checkpoint(lambda c, k: (jnp.sin(c @ k), None)), x, w)[0]
    ),
    "custom jvp": lambda x, w: jnp.sum(jax.nn.relu(x @ w[0])),
    "custom vjp": lambda x, w: jnp.sum(jax.jit(doubled_gradient)(x @ w[0])),
    "captured array": lambda x, w: jnp.sum(
        jax.jit(lambda y: y * np.arange(16.0, dtype=np.float32).reshape(4, 4))(x) @ w[0]
    ),
    "written-out layers": lambda x, w: jnp.sum(
        functools.reduce(lambda y, k: jnp.tanh(y @ k), jnp.unstack(w), x)
    ),
    "random": lambda x, w: jnp.sum(
        jax.random.normal(jax.random.fold_in(jax.random.key(0), 3), (4, 4)) * (x @ w[0])
    ),
    "callback": lambda x, w: jnp.sum(
        jax.pure_callback(
            np.sin, jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.lax.stop_gradient(x)
        )
        * x
    ),
}


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_value_and_gradient_are_unchanged(name: str, remat: str) -> None:
    program = PROGRAMS[name]
    closed = jax.make_jaxpr(program)(X, W)
    graph = graph_from_jaxpr(closed, [("x", "batch"), ("w", "parameter")])
    made = {
        (op.path, k): graph.values[value].shape
        for op in graph.ops
        for k, value in enumerate(op.results)
    }
    placed: set[tuple[str, int]] = set()

    def place(path: str, index: int, value: Any) -> Any:
        assert made[path, index] == value.shape
        placed.add((path, index))
        return value

    def again(x: jax.Array, w: jax.Array) -> jax.Array:
        return evaluate(closed, [x, w], place=place, remat=remat)[0]

    expected, gradients = jax.value_and_grad(program, argnums=(0, 1))(X, W)
    found, others = jax.value_and_grad(again, argnums=(0, 1))(X, W)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for a, b in zip(gradients, others, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    conditions = {key for key in made if "/cond/" in key[0]}
    custom = {key for key in made if name in ("custom vjp", "custom jvp") and key not in placed}
    assert set(made) - placed <= conditions | custom


def test_place_changes_a_value() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sum(jax.jit(jnp.exp)(x)))(X)
    (doubled,) = evaluate(
        closed, [X], place=lambda path, index, value: value * 2 if path == "0/0" else value
    )
    np.testing.assert_allclose(doubled, 2 * jnp.sum(jnp.exp(X)), rtol=1e-6)


def test_place_reaches_the_carry_of_a_scan() -> None:
    closed = jax.make_jaxpr(PROGRAMS["scan"])(X, W)
    (stopped,) = evaluate(
        closed,
        [X, W],
        place=lambda path, index, value: value * 0 if path.endswith("/carry/0") else value,
    )
    assert stopped == 0


@pytest.mark.parametrize("name", ["scan", "written-out layers"])
def test_remat_recomputes_matmuls(name: str) -> None:
    closed = jax.make_jaxpr(PROGRAMS[name])(X, W)

    def matmul_flops(remat: str) -> float:
        gradient = jax.make_jaxpr(jax.grad(lambda w: evaluate(closed, [X, w], remat=remat)[0]))(W)
        graph = graph_from_jaxpr(gradient, [("w", "parameter")])
        return sum(
            op.flops * graph.trips(op.region) for op in graph.ops if op.kind == "dot_general"
        )

    assert matmul_flops("full") > matmul_flops("none")
    assert matmul_flops("dots") == matmul_flops("none")


def test_unknown_policy() -> None:
    with pytest.raises(TracingError, match="'half' is no remat policy"):
        evaluate(jax.make_jaxpr(jnp.sin)(X), [X], remat="half")
