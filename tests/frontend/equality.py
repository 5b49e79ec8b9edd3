"""Programs of steps beside the same steps in plain JAX on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import shardlib
from tests.frontend import examples
from tests.frontend.examples import Example

STEPS = 3


def plain(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree in float64; of random keys their integers."""
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf,
            np.float64,
        )
        for leaf in jax.tree.leaves(tree)
    ]


@lru_cache(maxsize=16)
def reference(make: Callable[..., Example], rows: int = examples.ROWS) -> list[list[np.ndarray]]:
    """States and metrics after each step of an example in plain JAX, with batches of
    `examples.ROWS`, which is `rows`.
    """
    example = make(jax.value_and_grad)
    step, state = jax.jit(example.step), jax.jit(example.init)(jax.random.key(3))
    results = []
    for _ in range(STEPS):
        state, metrics = step(state, example.batch)
        results.append(plain((state, metrics)))
    return results


def compiled(example: Example, pin: dict[str, Any], devices: int = 8) -> Any:
    return shardlib.compile_step(
        example.init,
        example.step,
        example.batch,
        topology=f"cpu:{devices}",
        pin=pin,
        batch_axes=example.batch_axes,
    )


def require_near(mine: Any, wanted: list[np.ndarray]) -> None:
    for actual, theirs in zip(plain(mine), wanted, strict=True):
        limit = 1e-5 * max(1.0, np.abs(theirs).max(initial=0))
        assert np.abs(actual - theirs).max(initial=0) <= limit
