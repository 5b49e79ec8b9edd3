"""Gradients of contractions, held to JAX's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.lowering.contractions import AsWritten
from shardlib.tracing.program import flatten

#: Shapes of both operands, and their dimension numbers: contracting dims, batch dims.
CASES = {
    "weight": ((2, 3, 5), (5, 7), (((2,), (0,)), ((), ()))),
    "contracted last": ((2, 3, 5), (7, 5), (((2,), (1,)), ((), ()))),
    "two dims, crossed": ((5, 2, 4), (4, 7, 5), (((0, 2), (2, 0)), ((), ()))),
    "scores": ((2, 3, 6, 5), (2, 4, 3, 5), (((3,), (3,)), ((0, 1), (0, 2)))),
    "batch behind": ((3, 5, 2), (5, 7, 2, 4), (((1,), (0,)), ((2,), (2,)))),
    "vector": ((5,), (5, 7), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_jax(case: str, dtype: jnp.dtype) -> None:
    left_shape, right_shape, dims = CASES[case]
    numbers = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(numbers.integers(-4, 5, shape), dtype)

    left, right = drawn(left_shape), drawn(right_shape)

    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)

    made, back = jax.vjp(run, left, right)
    cotangent = jnp.asarray(numbers.integers(-4, 5, made.shape), made.dtype)
    contraction = AsWritten(equation=flatten(jax.make_jaxpr(run)(left, right)).equations[0])
    for wanted, (leaf, gradient) in enumerate(zip((left, right), back(cotangent), strict=True)):
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        found = contraction.slope(wanted, (left, right), cotangent, like)
        assert found.dtype == gradient.dtype
        np.testing.assert_array_equal(found, gradient)
