"""A loss whose layers are spread over stages, and what a step makes of it once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.pipeline.lockstep.gradient_sums import Sums
from shardlib.lowering.pipeline.lockstep.stage import Stages
from shardlib.lowering.pipeline.shared.ends import Ends
from shardlib.lowering.pipeline.shared.layer_loop import STATE
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut
from shardlib.lowering.pipeline.shared.stage_remat import StageRemat
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk


@dataclass(frozen=True, kw_only=True)
class StagedLoss:
    """A loss whose layers are spread over stages.

    Attributes:
        cut: the loss around its loop over layers.
        stages: the stages.
        placing: how values are laid out.
        around: how they are laid out outside of the layers, where the stages may cut them too.
        exact: whether all layouts outside of the layers are known; else they are left to the
            compiler where the plan does not cut, and so are gradients.
        ends: operations outside of the layers whose gradients are reduced after all ticks.
        traced: the loss.
        remat: what layers save for their backward passes.
        groups: of microbatches, that go through the stages one group after the other; the schedule
            is that of a group.
        repeated: see `shardlib.lowering.loss.contribution.share.Contribution`.
    """

    cut: Cut
    stages: Stages
    placing: Placing
    around: Placing
    exact: bool
    ends: Ends
    traced: LossJaxpr
    remat: StageRemat
    groups: int = 1
    repeated: frozenset[int] = frozenset()

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.groups * self.stages.table.microbatches

    @property
    def loss_position(self) -> int:
        """Position of the loss among the results."""
        return jax.tree.unflatten(self.traced.out_tree, range(self.traced.out_tree.num_leaves))[0]

    @cached_property
    def sums(self) -> Sums:
        """What it sums up over microbatches."""
        return Sums(
            cut=self.cut,
            stages=self.stages,
            ends=self.ends,
            gradient=self.placing.gradient,
            reductions=self.placing.reductions,
        )

    def outside(self) -> Walk:
        """How values are placed outside of the layers."""
        return replace(self.around.walk(loose=not self.exact), apart=self.remat.outside)

    def dealt(self, stack: Value) -> Value:
        """A stack of layers [layers, ...] as the stages hold it, [stages, chunks, layers of a
        chunk, ...]; the last layer stands for those that are missing.
        """
        table, each = self.stages.table, self.stages.chunk.layers
        shape = (table.virtual, table.stages, each)
        missing = table.virtual * table.stages * each - stack.shape[0]
        if missing:
            stack = jnp.concatenate(
                [stack, jnp.broadcast_to(stack[-1:], (missing, *stack.shape[1:]))]
            )
        dealt = stack.reshape(*shape, *stack.shape[1:])
        dealt = (
            dealt.reshape(shape[1], 1, each, *stack.shape[1:])
            if table.virtual == 1
            else dealt.swapaxes(0, 1)
        )
        return self.stages.over_stages(dealt)

    def states(self, state: Tree) -> tuple[Arrays, Arrays]:
        """Model state before each microbatch, [microbatches, ...], and after the last."""
        leaves, cut = jax.tree.leaves(state), self.cut
        if not leaves:
            return [], []
        avals = [cut.program.avals[number] for number in cut.program.inputs]
        first = next(
            i
            for i, number in enumerate(cut.program.inputs)
            if cut.labels[number] == frozenset({STATE})
        )

        def after(leaves: Arrays) -> Arrays:
            # Nothing of the new state is made from the other inputs, so their numbers do not
            # matter, and what reads them is not computed.
            inputs = [
                (
                    leaves[i - first]
                    if first <= i < first + len(leaves)
                    else jnp.zeros(aval.shape, aval.dtype)
                )
                for i, aval in enumerate(avals)
            ]
            equations, _ = needed(cut.program.equations, cut.state)
            env = {**cut.program.constants, **dict(zip(cut.program.inputs, inputs, strict=True))}
            evaluate_equations(equations, env, self.outside())
            return [env[number] for number in cut.state]

        def turn(states: Arrays, _: None) -> tuple[Arrays, Arrays]:
            entering = [
                leaves[index] if index in self.repeated else leaf
                for index, leaf in enumerate(states)
            ]
            return after(entering), entering

        last, before = jax.lax.scan(turn, leaves, length=self.microbatches)
        return before, last
