"""What comes before the first microbatch, and after the last?

Two programs over all devices. The opening makes what the loss makes from parameters alone, deals
stacks of layers out to the stages, cuts the batch into microbatches, and says what the model state
is before each of them. The update puts the sums of the stages together, leads them back through
what was made from the parameters, and does what a step without stages does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Metrics, Value
from shardlib.lowering.accumulation.microbatches import Microbatches
from shardlib.lowering.mesh.shardings import ParameterShardings, batch_path
from shardlib.lowering.pipeline.lockstep.pipeline import Pipeline
from shardlib.lowering.pipeline.per_stage.dealing import Dealing
from shardlib.lowering.pipeline.per_stage.shards import Places
from shardlib.lowering.pipeline.shared.layer_loop import PARAMETERS
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Values
from shardlib.lowering.reading.use import as_dtype
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.tracing.rewriting.interpreter import evaluate_equations


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Opened:
    """What all microbatches work with, over all devices.

    Attributes:
        stacks: of each stacked parameter, trained ones first, for every chunk of a stage [stages *
            room, ...], sharded over the stages.
        kept: what else the loss makes of parameters, whole on every stage.
        states: model state before each microbatch, [microbatches, ...].
        after: model state after the last.
        parts: arrays of the batch, [microbatches, ...]; those without a batch dim as they are.
    """

    stacks: list[Arrays]
    kept: Values
    states: Arrays
    after: Arrays
    parts: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Summed:
    """What the stages have summed, over all devices and sharded over the stages.

    Attributes:
        stacks: gradients like `Opened.stacks`.
        shared: gradients of parameters that all layers use, for every chunk of a stage [stages,
            ...].
        outside: gradients of what is read before and after the layers, [stages, ...].
        totals: loss and metrics, [stages, ...].
    """

    stacks: list[Arrays]
    shared: list[Arrays]
    outside: Values
    totals: Arrays


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What is done over all devices.

    Attributes:
        pipeline: the loss, cut.
        places: the devices of the stages.
        dealing: which layers go where.
        params: shardings of the parameters.
        batch: shardings of the batch.
        dims: batch dim of each array of the batch, by path.
        prologue: (model state, batch) -> batch with what is handed to every microbatch beside its
            rows.
    """

    pipeline: Pipeline
    places: Places
    dealing: Dealing
    params: ParameterShardings
    batch: Tree
    dims: BatchDims
    prologue: Callable[[Tree, Tree], Tree]

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return self.pipeline.microbatches

    @cached_property
    def stacks(self) -> tuple[int, ...]:
        """Values made from trained parameters that have a slice for every layer."""
        cut = self.pipeline.cut
        return tuple(cut.scanned[k] for k in cut.roles.weights)

    @cached_property
    def dealt(self) -> tuple[int, ...]:
        """The same, and then those made from frozen parameters."""
        cut = self.pipeline.cut
        return (*self.stacks, *(cut.scanned[k] for k in cut.frozen_tables))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Other values made from parameters that the rest of the loss reads."""
        cut = self.pipeline.cut
        reads = cut.read_outside | {
            cut.constants[k] for k in (*cut.roles.shared, *cut.roles.constant)
        }
        return tuple(number for number in cut.kept if number in reads and cut.labels[number])

    @property
    def in_parts(self) -> tuple[bool, ...]:
        """For every array of the batch, whether it has a part for every microbatch."""
        return tuple(
            self.dims[batch_path(path)] is not None
            for path, _ in jax.tree_util.tree_leaves_with_path(self.batch)
        )

    def opened(self, params: Tree, state: Tree, batch: Tree) -> Opened:
        """What all microbatches work with."""
        values = self.made(jax.tree.leaves(params))
        states, after = self.pipeline.states(state)
        stacked, join = Microbatches(
            shardings=self.batch, dims=self.dims, count=self.microbatches
        ).split(self.prologue(state, batch))
        return Opened(
            stacks=[self._dealt(number, values[number]) for number in self.dealt],
            kept={number: self._whole(number, values[number]) for number in self.kept},
            states=states,
            after=after,
            parts=jax.tree.leaves(join(stacked)),
        )

    def gradients(
        self, params: Tree, state: Tree, pieces: tuple[Arrays, Summed]
    ) -> tuple[tuple[Value, tuple[Metrics, Tree]], Tree]:
        """((loss, (metrics, state)), gradients), averaged over the microbatches, for what the
        stages have summed.
        """
        after, summed = pieces
        leaves, structure = jax.tree.flatten(params)

        def moving(leaves: Arrays) -> Values:
            return {
                number: leaf
                for number, leaf in self.made(leaves).items()
                if is_floating(leaf) and PARAMETERS in self.pipeline.cut.labels[number]
            }

        values, pull = jax.vjp(moving, leaves)
        sums = self._sums(summed)
        cotangents = {
            number: (sums[number] / self.microbatches).astype(leaf.dtype)
            for number, leaf in values.items()
        }
        totals = [total.sum(0) / self.microbatches for total in summed.totals]
        loss, (metrics, _) = jax.tree.unflatten(self.pipeline.traced.out_tree, [*totals, *after])
        return (
            loss,
            (metrics, jax.tree.unflatten(jax.tree.structure(state), after)),
        ), structure.unflatten(pull(cotangents)[0])

    def made(self, leaves: Arrays) -> Values:
        """What the loss makes from parameters alone."""
        cut = self.pipeline.cut
        stored = dict(zip(cut.program.inputs, leaves, strict=False))
        env: Values = {
            **cut.program.constants,
            **{
                number: as_dtype(leaf, cut.program.avals[number].dtype)
                for number, leaf in stored.items()
            },
        }
        evaluate_equations(cut.once, env, self.pipeline.placing.walk(loose=True))
        return {
            number: stored.get(number, env[number])
            for number in dict.fromkeys((*self.dealt, *self.kept))
        }

    def gradient(self, number: int, *, layers: bool) -> NamedSharding:
        """How the stages sum up the gradient of a value, [layers, ...] of a stack of layers and
        [stages, ...] of others.
        """
        owner = self.pipeline.cut.owners.get(number)
        cuts = () if owner is None else jax.tree.leaves(self.params.gradient)[owner].spec
        return self.places.cut(self._tail(cuts[1:] if layers else cuts))

    def _sums(self, summed: Summed) -> Values:
        """Sums of gradients by value."""
        totals: Values = dict(
            zip(self.stacks, map(self.dealing.gathered, summed.stacks), strict=True)
        )
        shared = zip(
            (self.pipeline.cut.constants[k] for k in self.pipeline.cut.roles.shared),
            ([leaf.sum(0) for leaf in chunks] for chunks in summed.shared),
            strict=True,
        )
        for number, more in (
            *((number, sum(leaves[1:], leaves[0])) for number, leaves in shared),
            *((number, leaf.sum(0)) for number, leaf in summed.outside.items()),
        ):
            totals[number] = totals[number] + more if number in totals else more
        return totals

    def _rest(self, number: int) -> NamedSharding | None:
        """How the parameter rests that a value is, or is a cast of."""
        owner = self.pipeline.cut.owners.get(number)
        return None if owner is None else jax.tree.leaves(self.params.rest)[owner]

    def _dealt(self, number: int, stack: Any) -> Arrays:
        """A stack of layers, sharded over the stages; itself where it is stored so."""
        stored = self._rest(number)
        if (
            self.dealing.plain
            and number in self.pipeline.cut.program.inputs
            and stored is not None
            and self.places.cuts(stored)
        ):
            return [stack]
        sharding = self.places.cut(self._tail(() if stored is None else stored.spec[1:]))
        return [
            jax.lax.with_sharding_constraint(part, sharding) for part in self.dealing.dealt(stack)
        ]

    def _whole(self, number: int, leaf: Any) -> Any:
        """A value that the stages do not cut; itself where it is stored so."""
        stored = self._rest(number)
        spec = PartitionSpec(*self._tail(() if stored is None else stored.spec))
        if (
            number in self.pipeline.cut.program.inputs
            and stored is not None
            and spec == stored.spec
        ):
            return leaf
        return jax.lax.with_sharding_constraint(
            jnp.asarray(leaf), NamedSharding(self.places.mesh, spec)
        )

    def _tail(self, cuts: Iterable[Any]) -> tuple[Any, ...]:
        """Cuts without those over the stages."""

        def left(cut: Any) -> Any:
            axes = tuple(
                axis
                for axis in (cut if isinstance(cut, tuple) else (cut,))
                if axis is not None and axis not in self.places.axis
            )
            return None if not axes else axes[0] if len(axes) == 1 else axes

        return tuple(map(left, cuts))
