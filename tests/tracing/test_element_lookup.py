"""Elements that are looked up in rows are what JAX's own gather finds, and so are gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.tracing.program import by_elements, flatten, is_element_lookup
from shardlib.tracing.rewriting import Walk, evaluate_program

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
        return evaluate_program(program, [rows], Walk(run=by_elements))[0]

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
