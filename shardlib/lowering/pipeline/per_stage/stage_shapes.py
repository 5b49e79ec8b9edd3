"""Abstract arrays of the stages: what chunks hold, and where their gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.lowering.pipeline.per_stage.chunk_values import Held
from shardlib.lowering.pipeline.per_stage.chunk_work import Early, Late, Work
from shardlib.lowering.pipeline.per_stage.prologue import Opened, Opening
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class StageShapes:
    """Shapes, dtypes and shardings of what stages work with.

    Attributes:
        plan: the decisions.
        opening: what is done over all devices.
        works: the work of every chunk.
    """

    plan: Plan
    opening: Opening
    works: tuple[Work, ...]

    def _kept(self, chunk: int) -> tuple[int, ...]:
        """Values made from parameters that a chunk reads beside its layers."""
        work = self.works[chunk]
        return tuple(sorted({*work.outside, *work.shared, *work.frozen}))

    def _held(self, chunk: int, opened: Opened) -> Held:
        """What a chunk works with, abstract."""
        places = self.opening.places
        turn, stage = divmod(chunk, len(places.stages))
        return Held(
            stacks=[places.like(parts[turn], stage) for parts in opened.stacks],
            kept={number: places.like(opened.kept[number], stage) for number in self._kept(chunk)},
            states=[places.like(leaf, stage) for leaf in opened.states],
            parts=[places.like(leaf, stage) for leaf in opened.parts],
            ready=[],
        )

    def _sums(self, chunk: int) -> dict[str, Any]:
        """The sums of a chunk, abstract."""
        work = self.works[chunk]
        outside = {
            number: self._sum(number, chunk) for number in work.outside if self._floating(number)
        }
        return {
            "early": Early(outside=outside, totals=self._totals(chunk) if work.last else []),
            "late": Late(
                weights=[self._gradients(chunk)[k] for k in work.chunk.own],
                shared=[self._sum(number, chunk) for number in work.shared],
                sums=self._partial(chunk),
            ),
        }

    def _gradients(self, chunk: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Gradients of stacked parameters, abstract."""
        return tuple(self._sum(number, chunk, layers=True) for number in self.opening.stacks)

    def _partial(self, chunk: int) -> Arrays:
        """Partial sums of every device for what is gathered beforehand, abstract."""
        chunk_layers = self.works[chunk].chunk
        uses = chunk_layers.known.uses.values() if chunk_layers.known else ()
        return [
            self._like(
                (chunk_layers.layers, *use.sums.shape),
                self._in(use.sums.dtype),
                PartitionSpec(None, *use.cuts),
                chunk,
            )
            for use in uses
        ]

    def _totals(self, chunk: int) -> Arrays:
        avals = [self.works[0].cut.program.avals[number] for number in self.works[0].cut.results]
        return [
            self._like(
                (1, *aval.shape),
                jnp.promote_types(aval.dtype, jnp.float32),
                PartitionSpec(self.opening.places.axis),
                chunk,
            )
            for aval in avals
        ]

    def _sum(self, number: int, chunk: int, *, layers: bool = False) -> jax.ShapeDtypeStruct:
        """Where a gradient is summed."""
        aval = self.works[0].cut.program.avals[number]
        shape = (self.opening.dealing.room, *aval.shape[1:]) if layers else (1, *aval.shape)
        return self._like(
            shape, self._in(aval.dtype), self.opening.gradient(number, layers=layers).spec, chunk
        )

    def _like(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, chunk: int
    ) -> jax.ShapeDtypeStruct:
        places = self.opening.places
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(places.stages[chunk % len(places.stages)], spec)
        )

    def _in(self, dtype: Any) -> Any:
        """The dtype in which gradients of a dtype are summed."""
        return self.opening.pipeline.placing.reductions.accumulator(dtype)

    def _floating(self, number: int) -> bool:
        return is_floating(self.works[0].cut.program.avals[number])
