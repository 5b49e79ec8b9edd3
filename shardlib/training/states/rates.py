"""What a state says about itself: the learning rate, and the steps that are done."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.processes.values import whole


def learning_rate(state: Tree) -> float | None:
    """The learning rate of the step that made a state, where the optimizer keeps it, as that of
    `optax.inject_hyperparams` does; waits for the state.

    Returns:
        The rate; None where no array of the state is called `learning_rate`.
    """
    return _scalar(state, "learning_rate")


def steps_done(state: Tree) -> int | None:
    """The steps that are done, by the state's own count: `TrainState.step`, or else an integer that
    is called "step" or "count".

    Returns:
        The number; None where there is none.
    """
    for name in ("step", "count"):
        found = _scalar(state, name, integer=True)
        if found is not None:
            return int(found)
    return None


def _scalar(state: Tree, name: str, *, integer: bool = False) -> float | None:
    """The first scalar whose path ends with a name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if path_text(path).split(".")[-1] == name and not np.shape(leaf):
            value: Any = whole(leaf)
            if not integer or np.issubdtype(value.dtype, np.integer):
                return float(value)
    return None
