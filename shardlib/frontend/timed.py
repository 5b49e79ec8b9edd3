"""Steps of programs on attached devices, run in turns."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.lowering.program import Program


def stepping(program: Program, batch: Tree) -> Callable[[], object]:
    """A function that trains a program by one more step and returns what the step returns."""
    placed = program.put(example(batch))
    state = [program.init(0)]

    def step() -> object:
        state[0], metrics = program.step(state[0], placed)
        return state[0], metrics

    return step


def example(batch: Tree) -> Tree:
    """A batch with values where it is abstract: small integers, which are indices of any table, and
    normal numbers.
    """
    numbers = np.random.default_rng(0)

    def filled(leaf: object) -> object:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if np.issubdtype(leaf.dtype, np.integer) or leaf.dtype == np.bool_:
            return numbers.integers(0, 2, leaf.shape).astype(leaf.dtype)
        return numbers.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)

    return jax.tree.map(filled, batch)
