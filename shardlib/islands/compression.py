"""Gradients that cross between islands in every step, compressed.

An island's step in two halves, its gradients and its update; between them a program over the
devices of all islands that compresses, exchanges, and keeps what was not sent:
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import StateError
from shardlib.islands.exchanges import Compressed, Compressor, PowerSGD, Quantised, TopK
from shardlib.islands.meeting import (
    Arrays,
    BetweenSteps,
    joined,
    local,
    packed,
    stacked,
    stacked_shape,
    stacked_sharding,
    unpacked,
)
from shardlib.islands.meeting import split as meeting_split
from shardlib.islands.planning import PASSES, split
from shardlib.islands.planning import low_rank as islands_low_rank
from shardlib.islands.planning import stacked as is_stacked
from shardlib.islands.program import (
    GradientProgram,
    IslandBatches,
    IslandMetrics,
    IslandsProgram,
    IslandsState,
    ResidualState,
    UpdateProgram,
    require_islands,
    zeros,
)
from shardlib.jax_types import Value
from shardlib.layout import ISLAND
from shardlib.lowering.mesh import constrain
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState, require_not_donated

# --------------------------------------------------------------------------------------------------
# Parameters that are matrices, and the shard of each that one device holds.

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of a parameter as a device holds it.

    Attributes:
        shape: of the whole.
        stacked: whether the first dim is one of layers, each a matrix of its own.
        state: sharding of the parameter's optimizer state, which it has while it is exchanged.
        matrix: whether it is sent as a matrix of low rank.
    """

    shape: tuple[int, ...]
    stacked: bool
    state: NamedSharding
    matrix: bool

    @staticmethod
    def of(shape: tuple[int, ...], stacked: bool, state: NamedSharding, by: Compressor) -> Gradient:
        """The gradient of a parameter."""
        matrix = isinstance(by, PowerSGD) and islands_low_rank(shape, stacked, by.rank)
        return Gradient(shape=shape, stacked=stacked, state=state, matrix=matrix)

    @property
    def local(self) -> tuple[int, ...]:
        """Returns what a device holds."""
        return self.state.shard_shape(self.shape)

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The mesh axes of every dim."""
        spec = (*self.state.spec, *(None,) * (len(self.shape) - len(self.state.spec)))
        return tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec)

    @property
    def every(self) -> Axes:
        """The mesh axes that shard it."""
        return sum(self.axes, ())

    @property
    def rows(self) -> Axes:
        """The mesh axes that shard the rows of a matrix."""
        return sum(self.axes[int(self.stacked) : self._split], ())

    @property
    def columns(self) -> Axes:
        """The mesh axes that shard the columns of a matrix."""
        return sum(self.axes[self._split :], ())

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(layers, rows, columns) of what a device holds."""
        first, split = int(self.stacked), self._split
        layers, rows, columns = self.local[:first], self.local[first:split], self.local[split:]
        return math.prod(layers), math.prod(rows), math.prod(columns)

    def factor(self, rank: int) -> tuple[tuple[int, ...], tuple[Axes, ...]]:
        """Shape and mesh axes of Q: layers where there are some, the columns' dims, the rank."""
        first, split = int(self.stacked), self._split
        return (
            (*self.shape[:first], *self.shape[split:], rank),
            (*self.axes[:first], *self.axes[split:], ()),
        )

    @property
    def _split(self) -> int:
        """Returns where dims of columns begin."""
        return split(self.shape, self.stacked)


# --------------------------------------------------------------------------------------------------
# Gradients in few bits a number, in a region that is manual over all mesh axes.


def quantised(
    by: Quantised, islands: int, sums: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Returns what is sent of gradients. Who sums a part of them rounds the mean as well, and keeps
    what that leaves out.
    """
    rows = joined(sums, by.dtype, islands, by.block)
    bits = packed(rows, by.dtype, by.block)
    left = rows - unpacked(bits, by.dtype, by.block)
    received = jax.lax.all_to_all(bits, ISLAND.name, 0, 0, tiled=True)
    mean = jnp.mean(unpacked(received, by.dtype, by.block), axis=0, keepdims=True)
    sent = packed(mean, by.dtype, by.block)
    over = islands * (mean - unpacked(sent, by.dtype, by.block))
    left = left.at[jax.lax.axis_index(ISLAND.name)].add(over[0])
    gathered = jax.lax.all_gather(sent, ISLAND.name, axis=0, tiled=True)
    means = unpacked(gathered, by.dtype, by.block)
    return meeting_split(means, sums, by.dtype, by.block), meeting_split(
        left, sums, by.dtype, by.block
    )


def signs(
    gradients: Sequence[Gradient], islands: int, sums: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Returns what is sent of gradients: their signs, times the mean of their absolute numbers."""
    scales = [_scale(*pair) for pair in zip(gradients, sums, strict=True)]
    sent_by_this = [
        _signs(total_of_parameter, scale)
        for total_of_parameter, scale in zip(sums, scales, strict=True)
    ]
    bits = [_bits(total_of_parameter) for total_of_parameter in sums]
    numbers = jax.lax.bitcast_convert_type(jnp.stack(scales), jnp.uint8).reshape(-1)
    gathered = jax.lax.all_gather(jnp.concatenate([*bits, numbers]), ISLAND.name)
    ends = jax.lax.bitcast_convert_type(
        gathered[:, -4 * len(sums) :].reshape(islands, len(sums), 4), jnp.float32
    )
    means, start = list[Value](), 0
    for number, (shape_source, packed_signs) in enumerate(zip(sums, bits, strict=True)):
        part = gathered[:, start : start + packed_signs.shape[0]]
        start += packed_signs.shape[0]
        spread = (part[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        flat = spread.reshape(islands, -1)[:, : math.prod(shape_source.shape)].astype(jnp.float32)
        total = jnp.sum((2 * flat - 1) * ends[:, number, None], axis=0)
        means.append((total / islands).reshape(shape_source.shape))
    return means, [
        total_of_parameter - sent
        for total_of_parameter, sent in zip(sums, sent_by_this, strict=True)
    ]


def _scale(gradient: Gradient, total: Value) -> Value:
    """The mean of the absolute numbers of a whole parameter."""
    magnitude = jnp.sum(jnp.abs(total))
    if gradient.every:
        magnitude = jax.lax.psum(magnitude, gradient.every)
    return magnitude / max(1, math.prod(gradient.shape))


def _signs(total: Value, scale: Value) -> Value:
    return jnp.where(total >= 0, scale, -scale)


def _bits(total: Value) -> Value:
    """Eight signs a byte."""
    flat = (total.reshape(-1) >= 0).astype(jnp.uint8)
    wide = jnp.pad(flat, (0, -flat.shape[0] % 8)).reshape(-1, 8)
    return jnp.sum(wide << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


# --------------------------------------------------------------------------------------------------
# Gradients as matrices of low rank (PowerSGD, arXiv:1905.13727), in a region that is manual over
# all mesh axes: rows and columns may be sharded, so products are summed inside of an island before
# they cross.

#: Relative size of what keeps the products of nearly dependent columns positive, and absolute.
SHIFT, LEAST = 1e-6, 1e-30


def low_rank(
    gradients: Sequence[Gradient], sums: Sequence[Value], factors: Sequence[Value]
) -> tuple[list[Value], list[Value], list[Value]]:
    """Returns what is sent of gradients."""
    parts = [_sent(*arguments) for arguments in zip(gradients, sums, factors, strict=True)]
    means, residuals, after = (list(column) for column in zip(*parts, strict=True))
    return means, residuals, after


def _sent(gradient: Gradient, total: Value, factor: Value) -> tuple[Value, Value, Value]:
    if not gradient.matrix:
        return _mean(total), jnp.zeros_like(total), factor
    layers, rows, columns = gradient.matrices
    matrix = total.reshape(layers, rows, columns)
    right = factor.reshape(layers, columns, -1)
    left = _mean(_summed(matrix @ right, gradient.columns))
    left = _orthonormal(left, gradient.rows)
    right = _mean(_summed(matrix.transpose(0, 2, 1) @ left, gradient.rows))
    sent = (left @ right.transpose(0, 2, 1)).reshape(total.shape)
    return sent, total - sent, right.reshape(factor.shape)


def _orthonormal(left: Value, rows: Axes) -> Value:
    """Orthonormal columns with the same span, by Cholesky factors of their products: the first time
    shifted, then as often as makes them orthonormal to rounding (Fukaya et al., "Shifted Cholesky
    QR", arXiv:1809.11085). A QR of a sharded matrix would be gathered.
    """
    rank = left.shape[-1]
    norms = jnp.sqrt(_summed(jnp.sum(left * left, axis=1, keepdims=True), rows))
    left = left / jnp.where(norms > 0, norms, 1)
    for number in range(PASSES):
        products = _summed(left.transpose(0, 2, 1) @ left, rows)
        shift = (SHIFT if number == 0 else 0.0) * rank + LEAST
        lower = jnp.linalg.cholesky(products + shift * jnp.eye(rank))
        left = jax.lax.linalg.triangular_solve(
            lower, left, left_side=False, lower=True, transpose_a=True
        )
    return left


def _summed(array: Value, axes: Axes) -> Value:
    return jax.lax.psum(array, axes) if axes else array


def _mean(array: Value) -> Value:
    return jax.lax.pmean(array.reshape(-1), ISLAND.name).reshape(array.shape)


# --------------------------------------------------------------------------------------------------
# The largest numbers of gradients alone (arXiv:1712.01887), in a region that is manual over all
# mesh axes: each device sends those of its shard, and where they are.


def largest(
    by: TopK,
    stage: int,
    islands: int,
    gradients: Sequence[Value],
    residuals: Sequence[Value],
    momenta: Sequence[Value],
) -> tuple[list[Value], list[Value], list[Value]]:
    """Returns what is sent of gradients."""
    us = [by.momentum * u + g for g, u in zip(gradients, momenta, strict=True)]
    vs = [v + u for v, u in zip(residuals, us, strict=True)]
    places = [_places(v, by.sent(math.prod(v.shape), stage)) for v in vs]
    numbers = [v.reshape(-1)[place] for v, place in zip(vs, places, strict=True)]
    bits = [jax.lax.bitcast_convert_type(number, jnp.int32) for number in numbers]
    sent = jnp.concatenate([*bits, *places])
    gathered = jax.lax.all_gather(sent, ISLAND.name)
    means, start, half = list[Value](), 0, sent.shape[0] // 2
    for v, place in zip(vs, places, strict=True):
        size = place.shape[0]
        values = jax.lax.bitcast_convert_type(gathered[:, start : start + size], jnp.float32)
        indices = gathered[:, half + start : half + start + size]
        zeros = jnp.zeros(math.prod(v.shape), jnp.float32)
        total = zeros.at[indices.reshape(-1)].add(values.reshape(-1))
        means.append((total / islands).reshape(v.shape))
        start += size
    return means, _cleared(vs, places), _cleared(us, places)


def _places(array: Value, count: int) -> Value:
    """Returns where the largest numbers are; always as many."""
    flat = jnp.abs(array.reshape(-1))
    if count == flat.shape[0]:
        return jnp.arange(count, dtype=jnp.int32)
    return jax.lax.top_k(flat, count)[1].astype(jnp.int32)


def _cleared(arrays: Sequence[Value], places: Sequence[Value]) -> list[Value]:
    return [
        array.reshape(-1).at[place].set(0.0).reshape(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]


# --------------------------------------------------------------------------------------------------
# The exchange of compressed gradients as a compiled program over the devices of all islands.

#: Seed of the first Q.
SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientExchange(BetweenSteps):
    """The exchange of the gradients of islands, between the halves of a step.

    Attributes:
        exchange: how they are compressed.
        number: which of the exchanges, see `Compressed.due`.
        gradients: of the trained parameters.
        given: how an island's program gives them, shardings on one island.
    """

    donated = (1, 2, 3)

    exchange: Compressed
    number: int
    gradients: Sequence[Gradient]
    given: Sequence[NamedSharding]

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree], list[Tree]]:
        """Abstract arguments: gradients, residuals and momenta of all islands, and Q."""
        by, islands = self.exchange.by, self.exchange.islands

        def stacks(shardings: Sequence[NamedSharding]) -> list[Tree]:
            return [
                jax.ShapeDtypeStruct(
                    stacked_shape(gradient.shape, islands), jnp.float32, sharding=sharding
                )
                for gradient, sharding in zip(self.gradients, shardings, strict=True)
            ]

        return (
            stacks([stacked_sharding(sharding, self.mesh) for sharding in self.given]),
            stacks(self._stacks),
            stacks(self._stacks) if isinstance(by, TopK) else [],
            [
                jax.ShapeDtypeStruct(self._factor(gradient)[0], jnp.float32, sharding=sharding)
                for gradient, sharding in zip(self.gradients, self._factors, strict=True)
            ]
            if isinstance(by, PowerSGD)
            else [],
        )

    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results: what all islands update by, and what takes the place of the other
        arguments.
        """
        means = [
            jax.ShapeDtypeStruct(gradient.shape, jnp.float32, sharding=sharding)
            for gradient, sharding in zip(self.gradients, self.means, strict=True)
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
            [zeros(leaf) for leaf in residual],
            [zeros(leaf) for leaf in momentum],
            [drawn(number, leaf) for number, leaf in enumerate(factors)],
        )

    def function(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """(gradients, residuals and momenta of all islands, Q) -> what all update by, and the same
        afterwards.
        """
        gradients, residuals, momenta, factors = arguments
        specs = [sharding.spec for sharding in self._stacks]
        summed = specs if isinstance(self.exchange.by, TopK) else []
        factored = [sharding.spec for sharding in self._factors] if factors else []
        stacks = [
            constrain(gradient, to) for gradient, to in zip(gradients, self._stacks, strict=True)
        ]
        return jax.shard_map(
            self._exchanged,
            mesh=self.mesh,
            in_specs=(specs, specs, summed, factored),
            out_specs=([sharding.spec for sharding in self.means], specs, summed, factored),
            check_vma=False,
        )(stacks, residuals, momenta, factors)

    @property
    def means(self) -> list[NamedSharding]:
        """Returns how what all islands update by is sharded: alike on all."""
        return [NamedSharding(self.mesh, gradient.state.spec) for gradient in self.gradients]

    @cached_property
    def _stacks(self) -> list[NamedSharding]:
        return [stacked_sharding(gradient.state, self.mesh) for gradient in self.gradients]

    @cached_property
    def _factors(self) -> list[NamedSharding]:
        return [
            NamedSharding(self.mesh, PartitionSpec(*self._factor(gradient)[1]))
            for gradient in self.gradients
        ]

    def _factor(self, gradient: Gradient) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
        by = self.exchange.by
        return (
            gradient.factor(by.rank) if gradient.matrix and isinstance(by, PowerSGD) else ((), ())
        )

    def _exchanged(
        self, gradients: Arrays, residuals: Arrays, momenta: Arrays, factors: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The exchange on one device."""
        by, islands = self.exchange.by, self.exchange.islands
        shapes = [gradient.local for gradient in self.gradients]

        def plain(arrays: Arrays) -> Arrays:
            return [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]

        def along(arrays: Arrays) -> Arrays:
            return [a.reshape(old.shape) for a, old in zip(arrays, gradients, strict=True)]

        local, before = plain(gradients), plain(residuals)
        if isinstance(by, TopK):
            means, left, sums = largest(by, self.number, islands, local, before, plain(momenta))
            return means, along(left), along(sums), factors
        total = [g + e for g, e in zip(local, before, strict=True)]
        if isinstance(by, PowerSGD):
            means, left, factors = low_rank(self.gradients, total, factors)
        elif isinstance(by, Quantised):
            means, left = quantised(by, islands, total)
        else:
            means, left = signs(self.gradients, islands, total)
        return means, along(left), momenta, factors


def exchanges_of(
    exchange: Compressed, program: Program, mesh: Mesh | AbstractMesh
) -> tuple[GradientExchange, ...]:
    """The exchanges of gradients that differ."""
    trained = program.model.partition.trained(program.state.params)
    planned = {
        parameter.path: parameter for parameter in program.plan.parameters if parameter.trained
    }
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(trained)
    states, gradient_shardings = (
        jax.tree.leaves(tree)
        for tree in (program.parts.param_shardings.state, program.parts.param_shardings.gradient)
    )
    gradients = [
        Gradient.of(tuple(leaf.shape), is_stacked(planned[path_text(path)]), state, exchange.by)
        for (path, leaf), state in zip(leaves, states, strict=True)
    ]
    return tuple(
        GradientExchange(
            exchange=exchange,
            number=number,
            mesh=mesh,
            gradients=gradients,
            given=gradient_shardings,
        )
        for number in range(exchange.meetings)
    )


# --------------------------------------------------------------------------------------------------
# The program of islands that exchange compressed gradients.


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedProgram(IslandsProgram):
    """The programs of islands that exchange compressed gradients in every step; parameters are
    alike on all islands.
    """

    exchange: Compressed

    def step(self, state: IslandsState, batch: Tree) -> tuple[IslandsState, IslandMetrics]:
        """Runs one step; see `IslandsProgram.step`."""
        require_islands(state, len(self.programs))
        residuals = _residual(state)
        require_not_donated("step", (state.islands[0].params, residuals.residual))
        rows = batch if isinstance(batch, IslandBatches) else self.put(batch)
        step = int(state.exchange.step) + 1
        halves = [
            half.call(island.params, island.model_state, own_rows)
            for (half, _), island, own_rows in zip(
                self._halves, state.islands, rows.islands, strict=True
            )
        ]
        gradients = zip(*(jax.tree.leaves(grads) for _, grads, _ in halves), strict=True)
        means, residual, momentum, factors = self.exchanges[self.exchange.due(step)](
            [stacked(arrays, self.mesh) for arrays in gradients],
            residuals.residual,
            residuals.momentum,
            residuals.factors,
        )
        islands: list[TrainState] = []
        for (_, half), island, (metrics, grads, model_state) in zip(
            self._halves, state.islands, halves, strict=True
        ):
            specs = jax.tree.leaves(half.program.parts.param_shardings.state)
            updates = [local(mean, spec) for mean, spec in zip(means, specs, strict=True)]
            grads = jax.tree.structure(grads).unflatten(updates)
            islands.append(half.call(island, grads, model_state, metrics["loss"]))
        residuals = ResidualState(
            step=np.int32(step), residual=residual, momentum=momentum, factors=factors
        )
        after = replace(state, islands=tuple(islands), exchange=residuals)
        return after, IslandMetrics(tuple(metrics for metrics, _, _ in halves))

    def meet(self, state: IslandsState, meeting: int = 0) -> IslandsState:
        """Refused: gradients cross within a step."""
        raise StateError(
            f"islands under {self.exchange} do not meet: gradients cross in every step"
        )

    def outer(self, state: IslandsState) -> TrainState:
        """The state of the first island; parameters are alike on all."""
        require_islands(state, len(self.programs))
        require_not_donated("outer", (state.islands[0].inference,))
        return state.islands[0]

    def prepare(self) -> None:
        """Compiles all that steps run, if that has not been done."""
        _ = self._halves
        for exchange in self.exchanges:
            exchange.prepare()

    def first_residuals(self) -> ResidualState:
        """Residuals before the first step."""
        residual, momentum, factors = self.exchanges[0].first()
        return ResidualState(
            step=np.int32(0), residual=residual, momentum=momentum, factors=factors
        )

    @cached_property
    def exchanges(self) -> tuple[GradientExchange, ...]:
        """The exchanges that differ."""
        return exchanges_of(self.exchange, self.programs[0], self.mesh)

    @cached_property
    def _halves(self) -> list[tuple[GradientProgram, UpdateProgram]]:
        return [
            (GradientProgram.of(program), UpdateProgram.of(program)) for program in self.programs
        ]

    def _kept(self) -> ResidualState:
        _, residual, momentum, factors = self.exchanges[0].arguments()
        replicated = NamedSharding(self.mesh, PartitionSpec())
        step = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
        return ResidualState(step=step, residual=residual, momentum=momentum, factors=factors)

    def _first(self, states: tuple[TrainState, ...]) -> ResidualState:
        return self.first_residuals()


def _residual(state: IslandsState) -> ResidualState:
    exchange = state.exchange
    if not isinstance(exchange, ResidualState):
        raise StateError(
            "the state has no residuals of compressed gradients\nTry: program.init(), or a"
            " checkpoint of this exchange"
        )
    return exchange
