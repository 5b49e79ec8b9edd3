"""What does training carry from step to step?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from shardlib.annotation.model import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A pytree with everything that a step reads and writes; a step donates it.

    Attributes:
        step: number of steps done, int32 scalar.
        params: trained arrays, nested dicts.
        model_state: what the model itself updates (random streams, batch statistics).
        opt_state: the optimizer's state.
    """

    step: Any
    params: Tree
    model_state: Tree
    opt_state: Tree
