"""The exchange of compressed gradients as a compiled program over the devices of all islands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.compressors import PowerSGD, Quantised, TopK
from shardlib.lowering.islands.compression.few_bits import quantised, signs
from shardlib.lowering.islands.compression.low_rank import low_rank
from shardlib.lowering.islands.compression.matrices import Gradient
from shardlib.lowering.islands.compression.sparse import largest
from shardlib.lowering.islands.stacked import stacked_shape, stacked_sharding
from shardlib.lowering.islands.start import zeros
from shardlib.lowering.mesh.pinning import held

#: An array for each trained parameter.
Arrays = list[jax.Array]
#: Seed of the first Q.
SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientExchange:
    """What happens to the gradients of islands between the halves of a step.

    Attributes:
        exchange: how they are compressed.
        number: which of the exchanges, see `Compressed.due`.
        mesh: of all islands.
        gradients: of the trained parameters.
        given: how an island's program gives them, shardings on one island.
    """

    exchange: Compressed
    number: int
    mesh: Mesh | AbstractMesh
    gradients: Sequence[Gradient]
    given: Sequence[NamedSharding]

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree], list[Tree]]:
        """Abstract arguments: gradients, residuals and momenta of all islands, and Q."""
        by, islands = self.exchange.by, self.exchange.islands

        def stacks(shardings: Sequence[NamedSharding]) -> list[Tree]:
            return [
                jax.ShapeDtypeStruct(
                    stacked_shape(one.shape, islands), jnp.float32, sharding=sharding
                )
                for one, sharding in zip(self.gradients, shardings, strict=True)
            ]

        return (
            stacks([stacked_sharding(one, self.mesh) for one in self.given]),
            stacks(self._stacks),
            stacks(self._stacks) if isinstance(by, TopK) else [],
            [
                jax.ShapeDtypeStruct(self._factor(one)[0], jnp.float32, sharding=sharding)
                for one, sharding in zip(self.gradients, self._factors, strict=True)
            ]
            if isinstance(by, PowerSGD)
            else [],
        )

    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results: what all islands update by, and what takes the place of the other
        arguments.
        """
        means = [
            jax.ShapeDtypeStruct(one.shape, jnp.float32, sharding=sharding)
            for one, sharding in zip(self.gradients, self.means, strict=True)
        ]
        return (means, *self.arguments()[1:])

    def first(self) -> tuple[Arrays, Arrays, Arrays]:
        """Residuals, momenta and Q before the first step: zeros, and random numbers that are the
        same for every mesh.
        """
        _, residual, momentum, factors = self.arguments()

        def drawn(number: int, leaf: Tree) -> jax.Array:
            def draw() -> jax.Array:
                key = jax.random.fold_in(jax.random.key(SEED), number)
                return jax.random.normal(key, leaf.shape, leaf.dtype)

            return jax.jit(draw, out_shardings=leaf.sharding)()

        return (
            [zeros(one) for one in residual],
            [zeros(one) for one in momentum],
            [drawn(number, one) for number, one in enumerate(factors)],
        )

    def lower(self) -> jax.stages.Lowered:
        """The exchange lowered for its mesh, which need not be here."""
        arguments = self.arguments()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
        return jax.jit(
            self.function,
            donate_argnums=(1, 2, 3),
            in_shardings=shardings,
            out_shardings=(self.means, *shardings[1:]),
        ).lower(*arguments)

    def function(
        self, gradients: Arrays, residuals: Arrays, momenta: Arrays, factors: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """(gradients, residuals and momenta of all islands, Q) -> what all update by, and the same
        afterwards.
        """
        own = [one.spec for one in self._stacks]
        summed = own if isinstance(self.exchange.by, TopK) else []
        factored = [one.spec for one in self._factors] if factors else []
        mine = [held(one, to) for one, to in zip(gradients, self._stacks, strict=True)]
        return jax.shard_map(
            self._exchanged,
            mesh=self.mesh,
            in_specs=(own, own, summed, factored),
            out_specs=([one.spec for one in self.means], own, summed, factored),
            check_vma=False,
        )(mine, residuals, momenta, factors)

    def __call__(
        self, gradients: Arrays, residuals: Arrays, momenta: Arrays, factors: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Does the exchange; donates what is kept, see `function`."""
        return self._compiled(gradients, residuals, momenta, factors)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @property
    def means(self) -> list[NamedSharding]:
        """How what all islands update by is sharded: alike on all."""
        return [NamedSharding(self.mesh, one.state.spec) for one in self.gradients]

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _stacks(self) -> list[NamedSharding]:
        return [stacked_sharding(one.state, self.mesh) for one in self.gradients]

    @cached_property
    def _factors(self) -> list[NamedSharding]:
        return [
            NamedSharding(self.mesh, PartitionSpec(*self._factor(one)[1])) for one in self.gradients
        ]

    def _factor(self, one: Gradient) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
        by = self.exchange.by
        return one.factor(by.rank) if one.matrix and isinstance(by, PowerSGD) else ((), ())

    def _exchanged(
        self, gradients: Arrays, residuals: Arrays, momenta: Arrays, factors: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The exchange on one device."""
        by, islands = self.exchange.by, self.exchange.islands
        shapes = [one.local for one in self.gradients]

        def plain(arrays: Arrays) -> Arrays:
            return [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]

        def along(arrays: Arrays) -> Arrays:
            return [a.reshape(old.shape) for a, old in zip(arrays, gradients, strict=True)]

        mine, before = plain(gradients), plain(residuals)
        if isinstance(by, TopK):
            means, left, sums = largest(by, self.number, islands, mine, before, plain(momenta))
            return means, along(left), along(sums), factors
        total = [g + e for g, e in zip(mine, before, strict=True)]
        if isinstance(by, PowerSGD):
            means, left, factors = low_rank(self.gradients, total, factors)
        elif isinstance(by, Quantised):
            means, left = quantised(by, islands, total)
        else:
            means, left = signs(self.gradients, islands, total)
        return means, along(left), momenta, factors
