"""A program in two parts computes what it computes in one, and multiplies no matrix twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.tracing.folding import Split, SplitLoop, split
from shardlib.tracing.program import flatten, subjaxprs

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
    shared, x = (
        jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
        jnp.asarray(rng.normal(size=(4, WIDTH)), jnp.float32),
    )
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
    first, second = (
        jax.make_jaxpr(parts.run_first)(inputs).jaxpr,
        jax.make_jaxpr(parts.run_second)(junk, passed).jaxpr,
    )
    assert matmuls(first) + matmuls(second) == matmuls(traced.jaxpr)
    assert matmuls(second) >= 6  # two products in each of three layers
    assert any(isinstance(step, SplitLoop) for step in parts.second)


def test_what_is_wanted_early_alone_leaves_nothing_for_later():
    program = flatten(
        jax.make_jaxpr(lambda x, w: (x @ w, jnp.tanh(x @ w)))(jnp.ones((2, 2)), jnp.ones((2, 2)))
    )
    parts = split(program, program.outputs, (), program.inputs)
    assert parts.second == () == parts.passed and len(parts.first) == len(program.equations)
