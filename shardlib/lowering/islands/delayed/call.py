"""A program of one island that is no step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.exchanges.diloco import DiLoCo
from shardlib.lowering.islands.meeting.layers import Rows
from shardlib.lowering.islands.meeting.meeting import Shared

Arrays = list[jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class IslandCall(ABC):
    """A program over the devices of one island, about some parameters.

    Attributes:
        exchange: how islands meet.
        mesh: of the island.
        about: the parameters of a fragment.
    """

    #: How many of the first arguments are donated.
    donated: ClassVar[int] = 0

    exchange: DiLoCo
    mesh: Mesh | AbstractMesh
    about: Sequence[Shared]

    @abstractmethod
    def arguments(self) -> tuple[list[Tree], ...]:
        """Abstract arguments, each leaf with its sharding."""

    @abstractmethod
    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results; of those that are donated what takes their place."""

    @abstractmethod
    def function(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """The program, traceable."""

    def lower(self) -> jax.stages.Lowered:
        """The program lowered for its mesh, which need not be here."""
        arguments, results = self.arguments(), self.results()
        return jax.jit(
            self.function,
            donate_argnums=tuple(range(self.donated)),
            in_shardings=jax.tree.map(lambda leaf: leaf.sharding, arguments),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, results),
        ).lower(*arguments)

    def __call__(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """Runs it; see `function`."""
        return self._compiled(*arguments)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @property
    def rows(self) -> list[Rows]:
        """Of each parameter, on every device."""
        return [one.rows for one in self.about]

    @cached_property
    def states(self) -> list[NamedSharding]:
        """Of the parameters, sharded as optimizer state is."""
        return [NamedSharding(self.mesh, one.state.spec) for one in self.about]

    @cached_property
    def rests(self) -> list[NamedSharding]:
        """Of the parameters, as they rest."""
        return [_on(self.mesh, one.leaf.sharding) for one in self.about]

    def thetas(self) -> list[Tree]:
        """Abstract parameters."""
        return [
            jax.ShapeDtypeStruct(one.leaf.shape, one.leaf.dtype, sharding=sharding)
            for one, sharding in zip(self.about, self.rests, strict=True)
        ]

    def wide(self) -> list[Tree]:
        """Abstract float32 arrays, sharded as optimizer state is."""
        return [
            jax.ShapeDtypeStruct(one.leaf.shape, jnp.float32, sharding=sharding)
            for one, sharding in zip(self.about, self.states, strict=True)
        ]


def _on(mesh: Mesh | AbstractMesh, sharding: jax.sharding.Sharding | None) -> NamedSharding:
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(mesh, sharding.spec)
