"""Loss and gradients of a pipeline, as one program.

Once a step, what the loss makes from parameters alone is made, and stacks of layers are dealt out
to the stages. Then come the ticks (`ticks.py`). At the end the summed gradients go back through
what was made once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Metrics, Value
from shardlib.lowering.pipeline.lockstep.gradient_sums import Fixed, Made
from shardlib.lowering.pipeline.lockstep.stage_values import Held
from shardlib.lowering.pipeline.lockstep.staged_loss import StagedLoss
from shardlib.lowering.pipeline.lockstep.ticks import Ticks
from shardlib.lowering.pipeline.shared.layer_loop import PARAMETERS
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Values
from shardlib.tracing.rewriting.interpreter import evaluate_equations


@dataclass(frozen=True, kw_only=True)
class Pipeline(StagedLoss):
    """A loss whose layers are spread over stages."""

    def gradients(
        self, params: Tree, state: Tree, parts: Arrays, join: Callable[[Arrays], Tree]
    ) -> tuple[tuple[Value, tuple[Metrics, Tree]], Tree]:
        """((loss, (metrics, state)), gradients), averaged over the microbatches.

        Args:
            params, state: stored parameters, and model state.
            parts: arrays of the batch, [microbatches, ...].
            join: slices of these -> the batch of one microbatch.
        """
        leaves, structure = jax.tree.flatten(params)
        (derived, fixed), pull = self._once(leaves)
        states, after = self.states(state)
        resident = self._held(derived, fixed)
        sums = self._in_groups(
            self.sums.empty(derived),
            states,
            parts,
            lambda sums, states, parts: Ticks(
                self, resident, derived, fixed, states, parts, join
            ).run(sums),
        )
        cotangents = jax.tree.map(
            lambda total, leaf: (total / self.microbatches).astype(leaf.dtype),
            self.sums.gradients(resident, sums),
            derived,
        )
        outputs = [total / self.microbatches for total in sums["totals"]]
        loss, (metrics, _) = jax.tree.unflatten(self.traced.out_tree, [*outputs, *after])
        return (
            loss,
            (metrics, jax.tree.unflatten(jax.tree.structure(state), after)),
        ), structure.unflatten(pull(cotangents))

    def loss(
        self, params: Tree, state: Tree, parts: Arrays, join: Callable[[Arrays], Tree]
    ) -> tuple[Value, tuple[Metrics, Tree]]:
        """(loss, (metrics, state)), averaged over the microbatches: forward ticks alone; arguments
        as those of `gradients`.
        """
        (derived, fixed), _ = self._once(jax.tree.leaves(params))
        states, after = self.states(state)
        resident = self._held(derived, fixed)
        totals = self._in_groups(
            self.sums.no_totals(),
            states,
            parts,
            lambda totals, states, parts: Ticks(
                self, resident, derived, fixed, states, parts, join
            ).look(totals),
        )
        avals = self.traced.closed_jaxpr.out_avals
        outputs = [
            _in_dtype(total / self.microbatches, aval.dtype)
            for total, aval in zip(totals, avals, strict=False)
        ]
        loss, (metrics, _) = jax.tree.unflatten(self.traced.out_tree, [*outputs, *after])
        return loss, (metrics, jax.tree.unflatten(jax.tree.structure(state), after))

    def _held(self, derived: Made, fixed: Fixed) -> Held:
        """What stages hold through all ticks, but for what belongs to microbatches."""
        resident = Held(
            weights=derived.stacks,
            tables=fixed.tables,
            drawn=[],
            shared=derived.shared,
            constant=fixed.constant,
            ready=[],
        )
        return (
            resident
            if self.stages.in_rounds
            else replace(resident, ready=self.stages.gather(resident))
        )

    def _in_groups(
        self, sums: Any, states: Arrays, parts: Arrays, run: Callable[[Any, Arrays, Arrays], Any]
    ) -> Any:
        """Sums over all microbatches; `run` adds those of one group, given model state and batch of
        its microbatches.
        """
        if self.groups == 1:
            return run(sums, states, parts)
        grouped = [
            [leaf.reshape(self.groups, -1, *leaf.shape[1:]) for leaf in leaves]
            for leaves in (states, parts)
        ]
        return jax.lax.scan(lambda sums, group: (run(sums, *group), None), sums, grouped)[0]

    def _once(self, leaves: Arrays) -> tuple[Any, Callable[[Any], Arrays]]:
        """((what gradients flow through, what they do not), gradients of the first -> gradients of
        the parameters).
        """
        cut = self.cut

        def run(leaves: Arrays) -> tuple[Made, Fixed]:
            env: Values = {
                **cut.program.constants,
                **dict(zip(cut.program.inputs, self.placing.start(leaves), strict=False)),
            }
            evaluate_equations(cut.once, env, self.outside())
            moving = {
                number: env[number]
                for number in cut.kept
                if PARAMETERS in cut.labels[number] and is_floating(env[number])
            }
            fixed = {number: env[number] for number in cut.kept if number not in moving}
            stacks = [self.dealt(moving[cut.scanned[k]]) for k in cut.roles.weights]
            outside = {number: moving[number] for number in cut.read_outside if number in moving}
            shared = [moving[cut.constants[k]] for k in cut.roles.shared]
            tables = [self.dealt(jnp.asarray(env[cut.scanned[k]])) for k in cut.roles.tables]
            constant = [jnp.asarray(env[cut.constants[k]]) for k in cut.roles.constant]
            derived = Made(stacks=stacks, shared=shared, outside=outside)
            return derived, Fixed(values=fixed, tables=tables, constant=constant, ready={})

        derived, pull, fixed = jax.vjp(run, leaves, has_aux=True)
        return (
            derived,
            replace(fixed, ready=self.ends.ready(derived.outside)),
        ), lambda cotangents: pull(cotangents)[0]


def _in_dtype(average: jax.Array, dtype: Any) -> jax.Array:
    """An average in the dtype of what was averaged; counts and truth values of a whole batch are
    whole numbers.
    """
    return (average if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(average)).astype(dtype)
