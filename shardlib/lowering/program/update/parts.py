"""What a step is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optax

from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Metrics, Value
from shardlib.lowering.mesh.precision import Precision
from shardlib.lowering.mesh.shardings import ParameterShardings
from shardlib.lowering.program.guards import Guards
from shardlib.schedules.timetable import Timetable

#: What devices keep of partial sums of gradients from step to step, by path of an operation.
Kept = dict[str, Any] | None
#: What a loss gives: itself, and (metrics, model state after the step).
Results = tuple[Value, tuple[Metrics, Tree]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The loss over a whole batch, with its layouts in place, as functions of (params, state,
    batch, kept); parameters come and stay as they are stored.

    Attributes:
        gradients: -> ((loss, (metrics, state)), gradients of the trained parameters, kept).
        table: the schedule of a pipeline; None without stages.
        kept: abstract, with shardings; None where devices keep nothing.
    """

    gradients: Callable[[Tree, Tree, Tree, Kept], tuple[Results, Tree, Kept]]
    table: Timetable | None = None
    kept: Kept = None

    @staticmethod
    def of(
        function: Callable[[Tree, Tree, Tree], tuple[Results, Tree]], table: Timetable | None = None
    ) -> Run:
        """A run that keeps nothing; `function` gives results and gradients.

        Args:
            function: (params, state, batch) -> (results, gradients).
            table: which stage does what in which tick; None without stages.
        """

        def gradients(params: Tree, state: Tree, batch: Tree, kept: Kept) -> Any:
            return *function(params, state, batch), None

        return Run(gradients=gradients, table=table)

    def of_parts(self, prologue: Callable[[Tree, Tree], Tree]) -> Run:
        """The same of a batch that the prologue has not been through."""
        return replace(
            self,
            gradients=lambda params, state, batch, kept: self.gradients(
                params, state, prologue(state, batch), kept
            ),
        )

    def finished(self, finish: Callable[[Results, Tree], tuple[Results, Tree]]) -> Run:
        """The same with results that are finished after the last microbatch."""

        def gradients(*arguments: Any) -> Any:
            results, found, kept = self.gradients(*arguments)
            return *finish(results, found), kept

        return replace(self, gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Everything that a step is made of.

    Attributes:
        run: the loss and its gradient.
        optimizer: the user's optimizer.
        partition: which parameters are trained.
        params: shardings of the trained parameters.
        gather: lays updated parameters out as they are stored, over the old ones.
        precision: the dtypes of the plan.
        updated: abstract parameters in the dtypes of the update.
        guards: of the step; None for none.
        opt_state: shardings of the optimizer's state, with the memory that it rests in.
    """

    run: Run
    optimizer: optax.GradientTransformation
    partition: Partition
    params: ParameterShardings
    gather: Callable[[Tree, Tree], Tree]
    precision: Precision
    updated: Tree
    guards: Guards | None = None
    opt_state: Tree = None
