"""The meeting of islands as a compiled program over the devices of all.

What crosses is one all-reduce of each shard of the outer gradient. Inside of an island outer
parameters are sharded as optimizer state is; what comes of them is gathered where parameters rest
less sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.axes import ISLAND
from shardlib.exchanges.values import DiLoCo
from shardlib.lowering.islands.stacked import stacked_shape, stacked_sharding
from shardlib.lowering.islands.state import OuterState
from shardlib.lowering.mesh.pinning import held

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

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree]]:
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

    def meet(
        self, thetas: list[jax.Array], outer: OuterState
    ) -> tuple[list[jax.Array], OuterState]:
        """Does a meeting; donates all that it is given.

        Args:
            thetas: trained parameters of all islands, stacked.
            outer: what is outer.

        Returns:
            The parameters that all islands go on from, stacked, and what is outer.
        """
        thetas, params, momentum = self._compiled(thetas, outer.params, outer.momentum)
        return thetas, replace(outer, params=params, momentum=momentum)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _stacked(self) -> list[NamedSharding]:
        return [_stacked_of(leaf, self.mesh) for leaf in self.trained]

    def _met(self, place: int, theta: jax.Array, outer: jax.Array, momentum: jax.Array) -> Triple:
        """The meeting about one parameter."""
        state, rest = stacked_sharding(self.outer[place], self.mesh), self._stacked[place]
        own, alike = state.spec, self.outer[place].spec
        theta, outer, momentum = jax.shard_map(
            self._updated,
            mesh=self.mesh,
            in_specs=(own, alike, alike),
            out_specs=(own, alike, alike),
            check_vma=False,
        )(held(theta, state), outer, momentum)
        return held(theta, rest), outer, momentum

    def _updated(self, theta: jax.Array, outer: jax.Array, momentum: jax.Array) -> Triple:
        """The update of what one device holds of a parameter.

        What crosses is flat: a TPU pads the last two dims of an array to whole tiles, and sends
        them so.
        """
        mine = theta.reshape(outer.shape).astype(jnp.float32)
        crossing = jax.lax.pmean((outer - mine).reshape(-1), ISLAND.name)
        gradient, decay = crossing.reshape(outer.shape), self.exchange.momentum
        momentum = gradient + decay * momentum
        outer = outer - self.exchange.rate * (gradient + decay * momentum)
        return outer.astype(theta.dtype).reshape(theta.shape), outer, momentum


def _stacked_of(leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)
    return stacked_sharding(leaf.sharding, mesh)
