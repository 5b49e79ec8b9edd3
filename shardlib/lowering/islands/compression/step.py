"""A step of islands that exchange compressed gradients: each island's gradients, the exchange, each
island's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.exchanges.compressed import Compressed
from shardlib.jax_types import Metrics
from shardlib.lowering.islands.compression.exchange import GradientExchange
from shardlib.lowering.islands.compression.matrices import Gradient
from shardlib.lowering.islands.halves import GradientProgram, UpdateProgram
from shardlib.lowering.islands.stacked import local, stacked
from shardlib.lowering.islands.state import ResidualState
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.islands.compression import stacked as is_stacked


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedStep:
    """The step of all islands.

    Attributes:
        exchange: how gradients are compressed.
        programs: of the islands.
        mesh: of all islands.
    """

    exchange: Compressed
    programs: tuple[Program, ...]
    mesh: Mesh

    def first(self) -> ResidualState:
        """What is kept before the first step."""
        residual, momentum, factors = self.exchanges[0].first()
        return ResidualState(
            step=np.int32(0), residual=residual, momentum=momentum, factors=factors
        )

    def __call__(
        self, states: Sequence[TrainState], kept: ResidualState, batches: Sequence[Tree]
    ) -> tuple[list[TrainState], ResidualState, list[Metrics]]:
        """Does a step; donates states and what is kept."""
        found = [
            half.call(state.params, state.model_state, rows)
            for (half, _), state, rows in zip(self._halves, states, batches, strict=True)
        ]
        gradients = [
            stacked(arrays, self.mesh)
            for arrays in zip(*(jax.tree.leaves(one[1]) for one in found), strict=True)
        ]
        means, residual, momentum, factors = self.exchanges[self.exchange.due(int(kept.step))](
            gradients, kept.residual, kept.momentum, kept.factors
        )
        after: list[TrainState] = []
        for (_, half), state, (metrics, own, model_state) in zip(
            self._halves, states, found, strict=True
        ):
            specs = jax.tree.leaves(half.program.parts.params.state)
            mine = [local(mean, spec) for mean, spec in zip(means, specs, strict=True)]
            after.append(
                half.call(
                    state, jax.tree.structure(own).unflatten(mine), model_state, metrics["loss"]
                )
            )
        kept = replace(kept, residual=residual, momentum=momentum, factors=factors)
        return after, kept, [one[0] for one in found]

    def prepare(self) -> None:
        """Compiles all of it, if that has not been done."""
        _ = self._halves
        for one in self.exchanges:
            one.prepare()

    @cached_property
    def exchanges(self) -> tuple[GradientExchange, ...]:
        """The exchanges that differ."""
        return exchanges_of(self.exchange, self.programs[0], self.mesh)

    @cached_property
    def _halves(self) -> list[tuple[GradientProgram, UpdateProgram]]:
        return [(GradientProgram.of(one), UpdateProgram.of(one)) for one in self.programs]


def exchanges_of(
    exchange: Compressed, program: Program, mesh: Mesh | AbstractMesh
) -> tuple[GradientExchange, ...]:
    """The exchanges of gradients that differ."""
    trained = program.model.partition.trained(program.state.params)
    planned = {one.path: one for one in program.plan.parameters if one.trained}
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(trained)
    states, given = (
        jax.tree.leaves(tree)
        for tree in (program.parts.params.state, program.parts.params.gradient)
    )
    gradients = [
        Gradient.of(tuple(leaf.shape), is_stacked(planned[path_text(path)]), state, exchange.by)
        for (path, leaf), state in zip(leaves, states, strict=True)
    ]
    return tuple(
        GradientExchange(
            exchange=exchange, number=number, mesh=mesh, gradients=gradients, given=given
        )
        for number in range(exchange.meetings)
    )
