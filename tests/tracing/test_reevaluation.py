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
from shardlib.tracing.folding import Split, SplitLoop, split
from shardlib.tracing.program import by_masking, flatten, is_element_lookup, subjaxprs
from shardlib.tracing.rewriting import LoopSums, Walk, evaluate, evaluate_program
from shardlib.tracing.trace import graph_from_jaxpr

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
        return evaluate(closed, [x, w], on_value=place, remat=remat)[0]

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
        closed, [X], on_value=lambda path, index, value: value * 2 if path == "0/0" else value
    )
    np.testing.assert_allclose(doubled, 2 * jnp.sum(jnp.exp(X)), rtol=1e-6)


def test_place_reaches_the_carry_of_a_scan() -> None:
    closed = jax.make_jaxpr(PROGRAMS["scan"])(X, W)
    (stopped,) = evaluate(
        closed,
        [X, W],
        on_value=lambda path, index, value: value * 0 if path.endswith("/carry/0") else value,
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
    with pytest.raises(TracingError, match="'half' is not a remat policy"):
        evaluate(jax.make_jaxpr(jnp.sin)(X), [X], remat="half")


# A program in two parts computes what it computes in one, and multiplies no matrix twice.

WIDTH = 6


def layer(carry, weights):
    x, norm = carry
    up, down = weights
    hidden = jnp.tanh(x @ up) * jax.nn.sigmoid(x @ up[:, ::-1])
    return (x + norm * (hidden @ down), norm), jnp.sum(hidden, -1)


def stack(weights, shared, x):
    (x, _), seen = jax.lax.scan(layer, (x, shared), weights)
    return (x * shared).sum() + (seen**2).mean()


def nested(weights, shared, x):
    """A loop over layers, each of which works through its input in two blocks."""

    def body(x, weights):
        def block(total, part):
            return total + (part @ weights[0]).sum() * shared.sum(), part @ weights[0] @ weights[1]

        total, parts = jax.lax.scan(block, jnp.zeros(()), x.reshape(2, -1, WIDTH))
        return x + parts.reshape(x.shape) + jnp.tanh(total), None

    return (jax.lax.scan(body, x, weights)[0] ** 2).sum()


def remat(weights, shared, x):
    (x, _), _ = jax.lax.scan(jax.checkpoint(layer), (x, shared), weights)
    return (x**2).sum()


def matmuls(jaxpr, times=1):
    """Matrix products of a jaxpr, each as often as its loops run."""
    found = 0
    for eqn in jaxpr.eqns:
        found += times * (eqn.primitive.name == "dot_general")
        found += sum(
            matmuls(
                inner.jaxpr if hasattr(inner, "consts") else inner,
                times * eqn.params.get("length", 1),
            )
            for inner in subjaxprs(eqn)
        )
    return found


def halves(function) -> tuple[Split, list, list]:
    rng = np.random.default_rng(0)
    weights = tuple(
        jnp.asarray(rng.normal(size=(3, WIDTH, WIDTH)) / 3, jnp.float32) for _ in range(2)
    )
    shared = jnp.asarray(rng.normal(size=WIDTH), jnp.float32)
    x = jnp.asarray(rng.normal(size=(4, WIDTH)), jnp.float32)
    _, pull = jax.vjp(function, weights, shared, x)
    leaves, tree = jax.tree.flatten(pull)

    def backward(leaves, cotangent):
        return jax.tree.leaves(jax.tree.unflatten(tree, leaves)(cotangent))

    traced = jax.make_jaxpr(backward)(leaves, jnp.ones(()))
    program = flatten(traced, remat=True)
    inputs = [*leaves, jnp.ones(())]
    return (
        split(program, program.outputs[3:], program.outputs[:3], program.inputs[:-1]),
        inputs,
        [traced, jax.jit(backward)(leaves, jnp.ones(()))],
    )


@pytest.mark.parametrize("function", [stack, nested, remat])
def test_both_parts_together_are_the_whole(function):
    parts, inputs, (traced, wanted) = halves(function)
    early, passed = parts.run_first(inputs)
    junk = [*inputs[:-1], jnp.full((), jnp.nan)]  # the cotangent is gone by then
    late = parts.run_second(junk, passed)
    for found, gradient in zip([*late, *early], wanted, strict=True):
        assert np.abs(found - gradient).max() <= 2e-6 * np.abs(gradient).max()
    first = jax.make_jaxpr(parts.run_first)(inputs).jaxpr
    second = jax.make_jaxpr(parts.run_second)(junk, passed).jaxpr
    assert matmuls(first) + matmuls(second) == matmuls(traced.jaxpr)
    assert matmuls(second) >= 6  # two products in each of three layers
    assert any(isinstance(step, SplitLoop) for step in parts.second)


def test_what_is_wanted_early_alone_leaves_nothing_for_later():
    program = flatten(
        jax.make_jaxpr(lambda x, w: (x @ w, jnp.tanh(x @ w)))(jnp.ones((2, 2)), jnp.ones((2, 2)))
    )
    parts = split(program, program.outputs, (), program.inputs)
    assert parts.second == () == parts.passed and len(parts.first) == len(program.equations)


# Elements that are looked up in rows are what JAX's own gather finds, and so are gradients.

MODES = ("fill", "clip", "promise_in_bounds")


def lookups(function, *arrays):
    """The gathers of a function that are lookups of elements."""
    program = flatten(jax.make_jaxpr(function)(*arrays))
    return [one for one in program.equations if is_element_lookup(one)], program


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 11), (2, 5, 40)])
@pytest.mark.parametrize("each", [1, 3])
def test_values_and_gradients_are_those_of_the_gather(mode, shape, each):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    low, high = (0, shape[-1]) if mode == "promise_in_bounds" else (-shape[-1] - 3, shape[-1] + 3)
    indices = jnp.asarray(rng.integers(low, high, (*shape[:-1], each)))
    weights = jnp.asarray(rng.standard_normal(indices.shape), jnp.float32)

    def looked_up(rows):
        return jnp.take_along_axis(rows, indices, axis=-1, mode=mode)

    found, program = lookups(looked_up, rows)
    assert found

    def picked(rows):
        return evaluate_program(program, [rows], Walk(run=by_masking))[0]

    np.testing.assert_array_equal(picked(rows), looked_up(rows))
    gradients = [
        jax.grad(lambda rows, f=f: jnp.nansum(f(rows) * weights))(rows) for f in (looked_up, picked)
    ]
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i[:, 0]],  # rows of a table
        lambda x, i: jnp.take_along_axis(x, i, axis=0),
        lambda x, i: jnp.take_along_axis(x, jnp.tile(i, (1, 9)), axis=1),  # too many in a row
        lambda x, i: x[:, 3],
    ],
)
def test_other_lookups_stay_as_they_are(function):
    x, i = jnp.zeros((4, 12)), jnp.zeros((4, 1), jnp.int32)
    assert not lookups(function, x, i)[0]


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("name", ["scan", "scan with stack", "nested scan", "remat in scan"])
def test_loops_add_gradients_to_their_sums(name: str, layers: int):
    program = flatten(jax.make_jaxpr(PROGRAMS[name])(X, W))
    (loop,) = (equation.path for equation in program.equations if equation.name == "scan")
    path = f"{loop}/enter/0"
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = LoopSums(arrays=arrays, shardings={path: sharding})
        policies = {loop: ("full", layers)} if layers else {}
        (value,) = evaluate_program(program, [X, W], Walk(sums=sums, layer_policies=policies))
        return value, sums.returned

    before = jnp.asarray(np.random.default_rng(2).normal(size=W.shape), jnp.float32)
    (value, _), backward = jax.vjp(run, {path: jnp.zeros_like(W)})
    ((after,),) = (sums.values() for sums in backward((jnp.ones_like(value), {path: before})))
    expected, gradient = jax.value_and_grad(PROGRAMS[name], argnums=1)(X, W)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(after, before + gradient, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(gradient).max()) > 0.01
