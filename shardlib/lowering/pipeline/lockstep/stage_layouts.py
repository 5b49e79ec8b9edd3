"""Arrays between the stages of a pipeline: how they are sharded outside of the layers, and inside.

Arrays that come from before the layers, or go to what comes after them, are sharded over the stages
along one of their own dims there, so that the work is spread over all stages; they are gathered and
handed out outside of the manual region, since inside of it XLA's partitioner keeps the layout over
the automatic axes through a collective-permute, and gathers everything for an all-gather or
all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.jax_types import Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.schedules.timetable import Timetable

#: Names that messages between stages have in a compiled program, by direction.
HOPS = {"forward": "shardlib-hop-forward", "backward": "shardlib-hop-backward"}


#: Of one stage: its own part of an array with a leading dim of stages.
OWN = "own"


@dataclass(frozen=True, kw_only=True)
class StageLayouts:
    """What goes between stages, and how it is laid out.

    Attributes:
        table: the schedule.
        mesh: the mesh of the program.
        axis: names of the stage axis in it.
        activations: shape and dtype of all that hops from stage to stage: the carry, what travels
            with it, and buffers of the layers' own results.
        entering: how many of these come from before the layers; the buffers start as zeros.
        leaving: positions of those that go to what comes after the layers.
        spread: for each, the dim that is sharded over the stages outside of the pipeline; None
            where it is whole.
        layouts: for each, the layout that the plan gives it over the other axes; None where that is
            left to the compiler.
        outside: for each, the layout that it has outside of the pipeline, where that is known as a
            whole.
    """

    table: Timetable
    mesh: Mesh | AbstractMesh
    axis: tuple[str, ...]
    activations: tuple[jax.ShapeDtypeStruct, ...]
    entering: int
    leaving: tuple[int, ...]
    spread: tuple[int | None, ...]
    layouts: tuple[Layout | None, ...]
    outside: tuple[Layout | None, ...]

    @property
    def moving(self) -> tuple[int, ...]:
        """Positions of what gradients flow through."""
        return tuple(k for k, leaf in enumerate(self.activations) if is_floating(leaf))

    def over_stages(self, array: Value) -> Value:
        """An array of every stage, [stages, ...], each at its stage."""
        free = PartitionSpec.UNCONSTRAINED
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(self.axis, *[free] * (array.ndim - 1)))
        )

    def spread_out(self, array: Value, position: int) -> Value:
        """A stage activation as it is sharded outside of the pipeline.

        Args:
            array: the activation.
            position: its number among the activations.
        """
        dim, layout = self.spread[position], self.outside[position]
        if layout is not None:
            return jax.lax.with_sharding_constraint(
                array,
                NamedSharding(
                    self.mesh,
                    PartitionSpec(*(parts_of(self.mesh, layout[k]) for k in range(array.ndim))),
                ),
            )
        if self.layouts[position] is None and dim is None:
            return array
        cuts = self._cuts(position, array.ndim)
        if dim is not None:
            cuts[dim] = self.axis
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*cuts))
        )

    def handed_out(self, arrays: Value, position: int) -> Value:
        """What one stage has of [stages, ...], the others having zeros, as it is sharded outside of
        the pipeline.

        Args:
            arrays: [stages, ...].
            position: its number among the activations.
        """
        return self.spread_out(
            jax.lax.reduce(arrays, np.zeros((), arrays.dtype), jax.lax.add, (0,)), position
        )

    def whole(self, array: Value, position: int) -> Value:
        """The same as every stage needs it: no longer sharded over the stages.

        Args:
            array: as `spread_out` gives it.
            position: its number among the activations.
        """
        dim = self.spread[position]
        if dim is None:
            return array
        cuts = self._cuts(position, array.ndim)
        if self.outside[position] is None:
            cuts[dim] = None  # there, a dim that the stages cut is one that the plan leaves whole
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*cuts))
        )

    def _cuts(self, position: int, rank: int) -> list[Any]:
        """What the plan shards an array of `activations` over, by dim; nothing is said where it has
        no layout for it.
        """
        layout = self.layouts[position]
        return [
            PartitionSpec.UNCONSTRAINED if layout is None else parts_of(self.mesh, layout[k])
            for k in range(rank)
        ]

    def _inside(self, array: Value, position: int) -> Value:
        """The same inside of a stage."""
        layout, mesh = self.layouts[position], jax.sharding.get_abstract_mesh()
        if layout is None:
            return array
        return jax.lax.with_sharding_constraint(
            array,
            NamedSharding(
                mesh, PartitionSpec(*(parts_of(mesh, layout[k]) for k in range(array.ndim)))
            ),
        )

    def _numbers(self) -> Value:
        """The number of every stage, [stages]: an operand of what a stage does.

        `axis_index` would be a manual region of its own without operands, since other axes are
        automatic around it; XLA moves its PartitionId out of there, and then refuses it (JAX 0.10.2
        with TPUs).
        """
        return self.over_stages(jnp.arange(self.table.stages, dtype=jnp.int32))

    def _like(self) -> Arrays:
        """Arrays like those that hop."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations]

    def _hop(self, arrays: Arrays, direction: int) -> Arrays:
        """Sends arrays to the next stage (1), or the one before (-1)."""
        count = self.table.stages
        with jax.named_scope(HOPS["forward" if direction > 0 else "backward"]):
            return [
                jax.lax.ppermute(
                    leaf, self.axis, [(i, (i + direction) % count) for i in range(count)]
                )[None]
                for leaf in arrays
            ]

    def _manual(
        self, function: Callable[..., Any], arguments: Sequence[Any], results: Any
    ) -> Callable[..., Any]:
        def spec(word: Any) -> Any:
            return PartitionSpec(self.axis) if word is OWN else word

        specs = (
            tuple(spec(word) for word in arguments),
            (tuple(map(spec, results)) if isinstance(results, tuple) else spec(results)),
        )
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs[0],
            out_specs=specs[1],
            axis_names=set(self.axis),
            check_vma=False,
        )
