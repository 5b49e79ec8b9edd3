"""The meeting of islands as a compiled program over the devices of all.

in use       parameters as they rest, those of all islands stacked
rows         of a stack the layers of the fragment, each device its own
sharded      as optimizer state is: an island's devices exchange a shard each
update       what crosses, and what is made of it (`updates.py`)
back         gathered where parameters rest less sharded; the layers put into their stack
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.exchanges.values import Meets
from shardlib.lowering.islands.meeting import layers
from shardlib.lowering.islands.meeting.layers import Rows
from shardlib.lowering.islands.meeting.updates import Shards, update_of
from shardlib.lowering.islands.stacked import stacked_shape, stacked_sharding
from shardlib.lowering.mesh.pinning import held


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter that islands meet about.

    Attributes:
        place: among the trained parameters.
        leaf: of one island, abstract, with the sharding that it rests in.
        state: sharding of its optimizer state on one island.
        rows: of it, on each device.
    """

    place: int
    leaf: jax.ShapeDtypeStruct
    state: NamedSharding
    rows: Rows = None

    def of(self, rows: Rows) -> Shared:
        """The same about some rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """What islands do when they meet.

    Attributes:
        exchange: how they meet.
        number: which of its meetings.
        mesh: of all islands.
        about: the parameters.
    """

    exchange: Meets
    number: int
    mesh: Mesh | AbstractMesh
    about: Sequence[Shared]

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree]]:
        """Abstract arguments: parameters of all islands, outer parameters, momentum; nothing is
        outer where the exchange keeps nothing.
        """
        outer = [
            jax.ShapeDtypeStruct(one.leaf.shape, jnp.float32, sharding=sharding)
            for one, sharding in zip(self.about, self._outer, strict=True)
            if self.exchange.keeps
        ]
        thetas = [
            jax.ShapeDtypeStruct(
                stacked_shape(one.leaf.shape, self.exchange.islands),
                one.leaf.dtype,
                sharding=sharding,
            )
            for one, sharding in zip(self.about, self._rest, strict=True)
        ]
        return thetas, outer, outer

    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results: what takes the place of the arguments."""
        return self.arguments()

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
        sharded = [NamedSharding(self.mesh, s.spec) for s in self._sharded]
        rows = [one.rows for one in self.about]
        thetas_taken = layers.taken(self.mesh, thetas, self._rest, rows)
        mine = [held(one, s) for one, s in zip(thetas_taken, sharded, strict=True)]
        alike = [one.spec for one in self._outer] if self.exchange.keeps else []
        specs = ([one.spec for one in sharded], alike, alike)
        after, outer, momentum = jax.shard_map(
            self._updated, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False
        )(mine, outer, momentum)
        back = [held(one, rest) for one, rest in zip(after, self._rest, strict=True)]
        return layers.put(self.mesh, thetas, back, self._rest, rows), outer, momentum

    def __call__(
        self, thetas: list[jax.Array], outer: list[jax.Array], momentum: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Does the meeting; donates all that it is given, see `function`."""
        return self._compiled(thetas, outer, momentum)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _rest(self) -> list[NamedSharding]:
        """Of the stacked parameters, as they rest."""
        return [_stacked_of(one.leaf, self.mesh) for one in self.about]

    @cached_property
    def _sharded(self) -> list[NamedSharding]:
        """Of the stacked parameters, sharded as optimizer state is."""
        return [stacked_sharding(one.state, self.mesh) for one in self.about]

    @cached_property
    def _outer(self) -> list[NamedSharding]:
        """Of what is outer: alike on all islands."""
        return [NamedSharding(self.mesh, one.state.spec) for one in self.about]

    def _updated(
        self, thetas: Shards, outer: Shards, momentum: Shards
    ) -> tuple[Shards, Shards, Shards]:
        """The meeting on one device."""
        rows = [one.rows for one in self.about]
        kept = rows if self.exchange.keeps else []
        mine = [
            theta.astype(jnp.float32).reshape(theta.shape if one.leaf.ndim else ())
            for one, theta in zip(self.about, thetas, strict=True)
        ]
        after, *news = update_of(self.exchange, self.number)(
            mine, layers.rows_of(kept, outer), layers.rows_of(kept, momentum)
        )
        back = [
            new.astype(theta.dtype).reshape(theta.shape)
            for new, theta in zip(after, thetas, strict=True)
        ]
        return (
            back,
            layers.with_rows(kept, outer, news[0]),
            layers.with_rows(kept, momentum, news[1]),
        )


def _stacked_of(leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)
    return stacked_sharding(leaf.sharding, mesh)
