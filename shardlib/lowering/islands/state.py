"""What islands carry from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import StateError
from shardlib.lowering.runtime.state import TrainState


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OuterState:
    """What belongs to all islands, on the devices of each.

    Attributes:
        step: number of steps that every island has done, int32 of the host.
        params: trained parameters that all islands started this round from, float32.
        momentum: of the outer update, like `params`.
    """

    step: Any
    params: list[Any]
    momentum: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FlyingState(OuterState):
    """What belongs to all islands, and what is on the way between them.

    Attributes:
        sent: the outer gradients that every island sent last, one island after the other along the
            first dim, float32, for each trained parameter.
        sent_at: the step after which those were sent that have not arrived, int32 of the host; 0
            where nothing is on the way.
    """

    sent: list[Any]
    sent_at: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResidualState:
    """What was not sent of gradients, and what compresses the next ones.

    Attributes:
        step: number of steps that every island has done, int32 of the host.
        residual: what every island did not send, one after the other along the first dim, float32,
            for each trained parameter.
        momentum: sums of gradients, like `residual`; empty where nothing is summed.
        factors: Q of each trained parameter, alike on all islands; a scalar of what is no matrix;
            empty where there are none.
    """

    step: Any
    residual: list[Any]
    momentum: list[Any]
    factors: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IslandsState:
    """A pytree with the state of every island, and what is outer; a step donates it.

    Attributes:
        islands: a state for each island.
        exchange: what belongs to all of them.
        trained: paths of the trained parameters, in the order of what is outer.
    """

    islands: tuple[TrainState, ...]
    exchange: OuterState | ResidualState
    trained: tuple[str, ...] = field(default=(), metadata={"static": True})

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.exchange.step)

    @property
    def guard(self) -> None:
        """There is no guard of all islands: each has its own."""


def outer_of(state: IslandsState) -> OuterState:
    """What is outer of a state."""
    if not isinstance(state.exchange, OuterState):
        raise StateError(
            "the state has residuals of compressed gradients, and the program meets\nTry:"
            " program.init(), or a checkpoint of this exchange"
        )
    return state.exchange


def require_arrived(outer: OuterState) -> None:
    """Refuses what is outer of islands that meet with a delay: what is on the way would be lost."""
    if isinstance(outer, FlyingState):
        raise StateError(
            "the state has what is on the way between islands, and the program meets without a"
            " delay\nTry: program.init(), or a checkpoint, which goes on as this exchange"
        )


class IslandMetrics(Mapping[str, np.ndarray]):
    """Metrics of a step: the mean over islands, taken when it is asked for, so that no number
    crosses and a step does not wait.

    Attributes:
        islands: the metrics of each island, arrays on its devices.
    """

    def __init__(self, islands: tuple[dict[str, Tree], ...]) -> None:
        self.islands = islands

    def __getitem__(self, name: str) -> np.ndarray:
        values = [np.asarray(one[name]) for one in self.islands]
        return np.asarray(np.mean(values, axis=0, dtype=np.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self.islands[0])

    def __len__(self) -> int:
        return len(self.islands[0])
