"""The meeting of islands as a compiled program over the devices of all.

It is manual over the island axis alone: what crosses is one all-reduce of each shard of the outer
gradient. Inside of an island outer parameters are sharded as optimizer state is, and what comes of
them is gathered where parameters rest less sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.axes import ISLAND
from shardlib.exchanges.values import DiLoCo
from shardlib.lowering.islands.stacked import stacked_shape, stacked_sharding
from shardlib.lowering.islands.state import OuterState

#: Of one parameter: (theta of all islands, outer parameter, momentum) -> the same afterwards.
Triple = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """What islands do when they meet.

    Attributes:
        exchange: how they meet.
        mesh: of all islands.
        trained: trained parameters of one island, abstract, with the shardings that they rest in.
        outer: shardings of their optimizer state on one island.
        digest: of the plan.
    """

    exchange: DiLoCo
    mesh: Mesh | AbstractMesh
    trained: Sequence[jax.ShapeDtypeStruct]
    outer: Sequence[NamedSharding]
    digest: str

    @property
    def outer_shardings(self) -> list[NamedSharding]:
        """How outer parameters and momentum are sharded: alike on all islands."""
        return [NamedSharding(self.mesh, one.spec) for one in self.outer]

    def arguments(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Abstract arguments: parameters of all islands, outer parameters, momentum."""
        outer = [
            jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)
            for leaf, sharding in zip(self.trained, self.outer_shardings, strict=True)
        ]
        thetas = [
            jax.ShapeDtypeStruct(
                stacked_shape(leaf.shape, self.exchange.islands), leaf.dtype, sharding=sharding
            )
            for leaf, sharding in zip(self.trained, self._stacked, strict=True)
        ]
        return thetas, outer, outer

    def lower(self) -> jax.stages.Lowered:
        """The meeting lowered for its mesh, which need not be here."""
        arguments = self.arguments()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
        return jax.jit(
            self.function, donate_argnums=(0, 1, 2), in_shardings=shardings, out_shardings=shardings
        ).lower(*arguments)

    def function(
        self, thetas: list[jax.Array], outer: list[jax.Array], momentum: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """(parameters of all islands, outer parameters, momentum) -> the same after the meeting."""
        done = [
            self._met(place, *one)
            for place, one in enumerate(zip(thetas, outer, momentum, strict=True))
        ]
        return [one[0] for one in done], [one[1] for one in done], [one[2] for one in done]

    def meet(self, thetas: list[jax.Array], outer: OuterState) -> tuple[list[jax.Array], Any]:
        """Does a meeting; donates all that it is given.

        Args:
            thetas: trained parameters of all islands, stacked.
            outer: what is outer.

        Returns:
            The parameters that all islands go on from, stacked, and (outer parameters, momentum).
        """
        thetas, params, momentum = self._compiled(thetas, outer.params, outer.momentum)
        return thetas, (params, momentum)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _stacked(self) -> list[NamedSharding]:
        return [_stacked_of(leaf, self.mesh) for leaf in self.trained]

    def _met(
        self, place: int, theta: jax.Array, outer: jax.Array, momentum: jax.Array
    ) -> Triple:
        leaf, state = self.trained[place], self.outer[place].spec
        rest = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
        rate, decay = self.exchange.rate, self.exchange.momentum

        def island(theta: jax.Array, outer: jax.Array, momentum: jax.Array) -> Triple:
            mine = self._held(theta.reshape(leaf.shape).astype(jnp.float32), state)
            found = jax.lax.pmean(outer - mine, ISLAND.name)
            momentum = found + decay * momentum
            outer = self._held(outer - rate * (found + decay * momentum), state)
            back = self._held(outer.astype(leaf.dtype), rest)
            return back.reshape(theta.shape), outer, self._held(momentum, state)

        own, all_alike = PartitionSpec(ISLAND.name), PartitionSpec()
        return jax.shard_map(
            island,
            mesh=self.mesh,
            in_specs=(own, all_alike, all_alike),
            out_specs=(own, all_alike, all_alike),
            axis_names={ISLAND.name},
            check_vma=False,
        )(theta, outer, momentum)

    def _held(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A value of an island held to a layout over the axes inside of it."""
        if self.mesh.size == self.exchange.islands:
            return value
        return jax.lax.with_sharding_constraint(value, spec)


def _stacked_of(leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)
    return stacked_sharding(leaf.sharding, mesh)
