"""What training carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Leaf
from shardlib.lowering.runtime.state_card import state_card


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What guards carry from step to step (`shardlib.lowering.program.guards`); None where they
    carry no such thing.

    Attributes:
        scale: the loss is multiplied by it before gradients are taken, float32 scalar.
        good: steps since the scale changed, int32 scalar.
        limit: a step whose loss is above it is skipped, float32 scalar.
    """

    scale: Any = None
    good: Any = None
    limit: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A pytree with everything that a step reads and writes; a step donates it.

    Attributes:
        step: number of steps done, int32 scalar; skipped ones count.
        params: trained and frozen arrays, nested dicts.
        model_state: what the model itself updates (random streams, batch statistics).
        opt_state: the optimizer's state.
        guard: what guards carry; None without guards.
        exchange: what devices keep of partial sums of gradients, by the path of the operation that
            makes them (`shardlib.lowering.mesh.gradient_exchange`); None where they keep nothing.
    """

    step: Any
    params: Tree
    model_state: Tree
    opt_state: Tree
    guard: GuardState | None = None
    exchange: dict[str, Any] | None = None

    def __repr__(self) -> str:
        parts = (
            ("params", self.params),
            ("model state", self.model_state),
            ("optimizer state", self.opt_state),
        )
        counts = [
            f"{len(leaves)} arrays of {name}"
            for name, tree in parts
            if (leaves := jax.tree.leaves(tree))
        ]
        return f"<TrainState {', '.join(counts)}>"

    def _repr_html_(self) -> str:
        parts = {
            "params": self.params,
            "model state": self.model_state,
            "optimizer state": self.opt_state,
        }
        return state_card(repr(self), parts)

    @property
    def inference(self) -> dict[str, Tree]:
        """What an evaluation needs, parameters and model state."""
        return {"params": self.params, "model_state": self.model_state}

    @property
    def inputs(self) -> Tree:
        """Model state as the loss takes it: with the scale of the loss beside it where there is
        one.
        """
        return (
            self.model_state
            if self.guard is None or self.guard.scale is None
            else scaled_state(self.model_state, self.guard.scale)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the first half of a step found: a pytree, for the second half.

    Attributes:
        params: gradients of the trained parameters, a tree like them, sharded as the optimizer
            reads them. With a scale of the loss they are multiplied by it.
        loss: of the batch.
        metrics: the user's own, by name.
        model_state: what the model itself has updated.
        exchange: see `TrainState.exchange`.
    """

    params: Tree
    loss: Any
    metrics: dict[str, Any]
    model_state: Tree
    exchange: dict[str, Any] | None = None


def scaled_state(model_state: Tree, scale: Leaf) -> dict[str, Tree]:
    """Model state with the scale of the loss beside it."""
    return {"model": model_state, "scale": scale}
