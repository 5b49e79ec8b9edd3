"""Where does a step sum up gradients over its microbatches, and what do the sums become when the
last microbatch has gone back?

Sums are made in float32 at least, or in the dtype that the plan says, each where its microbatches
leave it: gradients of layers at their stages, one a stage of what all layers use, those of
embedding and head as the optimizer reads them. What is reduced once a step is there as partial sums
of every device (`gathered_weights.py`, `ends.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Leaf, Value
from shardlib.lowering.pipeline.lockstep.stage import Stages
from shardlib.lowering.pipeline.lockstep.stage_values import Held
from shardlib.lowering.pipeline.shared.chunk import Gradients
from shardlib.lowering.pipeline.shared.ends import Ends
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut, Values
from shardlib.lowering.weights.reduction_plan import GradientReductions

#: What ticks hand on, by name.
Carry = dict[str, Any]
#: What of it a step sums up over its microbatches: gradients of what stages hold, those of chunks
#: that are done, those of what is read outside of the layers, partial sums of such, loss and
#: metrics.
SUMMED: tuple[str, ...] = ("sums", "done", "outside", "ends", "totals")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Made:
    """What the loss makes once from trained parameters, or the gradients of it.

    Attributes:
        outside: what is read outside of the layers, by number of the value.
        shared: what all layers use.
        stacks: what has a slice for every layer, [stages, chunks, layers, ...].
    """

    outside: Values
    shared: Arrays
    stacks: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the loss makes once, and no gradient flows through.

    Attributes:
        constant: arrays that all layers use.
        ready: operands outside of the layers that are gathered beforehand, by path.
        tables: what has a slice for every layer, [stages, chunks, layers, ...].
        values: what is read outside of the layers, by number of the value.
    """

    constant: Arrays
    ready: dict[str, Any]
    tables: Arrays
    values: Values


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums of a step.

    Attributes:
        cut: the loss around its loop over layers.
        stages: the stages.
        ends: operations outside of the layers whose gradients are reduced after all ticks.
        gradient: how gradients of parameters are cut, by position of the parameter.
        reductions: how gradients are reduced.
    """

    cut: Cut
    stages: Stages
    ends: Ends
    gradient: Sequence[NamedSharding]
    reductions: GradientReductions

    def zeros(self, leaf: Leaf, lead: tuple[int, ...] = ()) -> Value:
        """Where gradients of an array are summed, [*lead, ...]."""
        return jnp.zeros((*lead, *leaf.shape), self.reductions.accumulator(leaf.dtype))

    def empty(self, derived: Made) -> Carry:
        """Zeros for all sums, by the names of `SUMMED`, for what the loss makes from parameters
        alone.
        """
        stages, count, gathered = self.stages, self.stages.table.stages, self.stages.chunk.known
        layers = Gradients(
            weights=[stages.over_stages(self.zeros(derived.stacks[k])) for k in stages.chunk.own],
            sums=stages.no_sums(),
            shared=[stages.over_stages(self.zeros(leaf, (count,))) for leaf in derived.shared],
        )
        done = (
            [
                stages.over_stages(
                    self.zeros(derived.stacks[self.cut.roles.weights.index(position)])
                )
                for position in gathered.sources
            ]
            if gathered and stages.in_rounds
            else []
        )
        ends = [leaf.astype(self.reductions.accumulator(leaf.dtype)) for leaf in self.ends.zeros()]
        return {
            "sums": layers,
            "done": done,
            "outside": self.as_gradients(jax.tree.map(self.zeros, self.unreduced(derived.outside))),
            "ends": ends,
            "totals": self.no_totals(),
        }

    def no_totals(self) -> Arrays:
        """Zeros for loss and metrics."""
        avals = [self.cut.program.avals[number] for number in self.cut.results]
        return [jnp.zeros(aval.shape, jnp.promote_types(aval.dtype, jnp.float32)) for aval in avals]

    def unreduced(self, outside: Values) -> Values:
        """Of what is read outside of the layers that whose gradient is made in every tick."""
        return {
            number: leaf for number, leaf in outside.items() if number not in self.ends.complete
        }

    def as_gradients(self, outside: Values) -> Values:
        """Gradients of what is made once from parameters as the optimizer reads them: of a
        parameter, and of casts of it.
        """
        owners = self.cut.owners
        return {
            number: (
                jax.lax.with_sharding_constraint(leaf, self.gradient[owners[number]])
                if number in owners
                else leaf
            )
            for number, leaf in outside.items()
        }

    def gradients(self, resident: Held, sums: Carry) -> Made:
        """Gradients of what the loss makes from parameters alone, for the sums over all
        microbatches.
        """
        return Made(
            stacks=self._stacks(resident, sums),
            shared=[total.sum(0) for total in sums["sums"].shared],
            outside=self._outside(sums),
        )

    def _stacks(self, resident: Held, sums: Carry) -> Arrays:
        """Gradients of stacked parameters, [stages, chunks, layers, ...]."""
        gathered, positions, summed = self.stages.chunk.known, self.cut.roles.weights, sums["sums"]
        totals = {
            positions[k]: total
            for k, total in zip(self.stages.chunk.own, summed.weights, strict=True)
        }
        done = sums["done"] if self.stages.in_rounds else self.stages.reduce(resident, summed.sums)
        for position, gradient in zip(gathered.sources if gathered else (), done, strict=True):
            totals[position] = totals[position] + gradient if position in totals else gradient
        return [totals[position] for position in positions]

    def _outside(self, sums: Carry) -> Values:
        """Gradients of what is read outside of the layers."""
        totals = dict(sums["outside"])
        for number, gradient in self.ends.reduce(sums["ends"]).items():
            totals[number] = totals[number] + gradient if number in totals else gradient
        return totals


def plus(sums: Tree, more: Tree) -> Tree:
    """Sums with more added to them, in the dtypes of the sums."""
    return jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, more)
