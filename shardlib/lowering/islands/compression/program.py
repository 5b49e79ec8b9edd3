"""What a user holds of islands that exchange compressed gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import StateError
from shardlib.exchanges.compressed import Compressed
from shardlib.lowering.islands.checks import require_islands
from shardlib.lowering.islands.compression.step import CompressedStep
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.rows import IslandBatches
from shardlib.lowering.islands.state import IslandMetrics, IslandsState, ResidualState
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.state import TrainState


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedProgram(IslandsProgram):
    """The programs of islands that exchange compressed gradients in every step; parameters are
    alike on all islands.
    """

    exchange: Compressed

    def step(self, state: IslandsState, batch: Tree) -> tuple[IslandsState, IslandMetrics]:
        """Does one step; see `IslandsProgram.step`."""
        require_islands(state, len(self.programs))
        require_present("step", (state.islands[0].params, _residual(state).residual))
        rows = batch if isinstance(batch, IslandBatches) else self.put(batch)
        kept = replace(_residual(state), step=np.int32(int(state.exchange.step) + 1))
        islands, kept, metrics = self.compressed(state.islands, kept, rows.islands)
        after = replace(state, islands=tuple(islands), exchange=kept)
        return after, IslandMetrics(tuple(metrics))

    def meet(self, state: IslandsState, meeting: int = 0) -> IslandsState:
        """Refused: gradients cross within a step."""
        raise StateError(
            f"islands under {self.exchange} do not meet: gradients cross in every step"
        )

    def outer(self, state: IslandsState) -> TrainState:
        """The state of the first island; parameters are alike on all."""
        require_islands(state, len(self.programs))
        require_present("outer", (state.islands[0].inference,))
        return state.islands[0]

    def prepare(self) -> None:
        """Compiles all that steps run, if that has not been done."""
        self.compressed.prepare()

    @cached_property
    def compressed(self) -> CompressedStep:
        """The step of all islands: gradients, exchange, update."""
        return CompressedStep(exchange=self.exchange, programs=self.programs, mesh=self.mesh)

    def _kept(self) -> ResidualState:
        _, residual, momentum, factors = self.compressed.exchanges[0].arguments()
        whole = NamedSharding(self.mesh, PartitionSpec())
        step = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        return ResidualState(step=step, residual=residual, momentum=momentum, factors=factors)

    def _first(self, states: tuple[TrainState, ...]) -> ResidualState:
        return self.compressed.first()


def _residual(state: IslandsState) -> ResidualState:
    kept = state.exchange
    if not isinstance(kept, ResidualState):
        raise StateError(
            "the state has no residuals of compressed gradients\nTry: program.init(), or a"
            " checkpoint of this exchange"
        )
    return kept
