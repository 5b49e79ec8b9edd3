"""What does one training step do, as a function that `jax.jit` compiles?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from shardlib.annotation.model import Model
from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Function, Index, Metrics, Value
from shardlib.lowering.accumulation.deferred_reduction import accumulated_once, once
from shardlib.lowering.accumulation.microbatches import Microbatches, accumulated
from shardlib.lowering.host_memory.disk.parts import GRADIENT
from shardlib.lowering.host_memory.offload import fetched, to_host
from shardlib.lowering.loss.forward import placed_loss
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.mesh.pinning import constrain, moved
from shardlib.lowering.mesh.precision import Precision, like
from shardlib.lowering.mesh.shardings import ParameterShardings
from shardlib.lowering.pipeline.lockstep.pipeline import Pipeline
from shardlib.lowering.program.guards import Guards, checked
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.lowering.runtime.state import TrainState
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

    def of_parts(self, prologue: Callable[[Tree], Tree]) -> Run:
        """The same of a batch that the prologue has not been through."""
        return replace(
            self,
            gradients=lambda params, state, batch, kept: self.gradients(
                params, state, prologue(batch), kept
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


def unpiped(
    traced: LossJaxpr,
    placing: Placing,
    microbatches: Microbatches,
    gradient: Tree,
    partition: Partition,
) -> Run:
    """The batch at once, or one microbatch after another.

    Args:
        traced: the loss of one microbatch.
        placing: how its values are laid out.
        microbatches: how the batch is divided.
        gradient: shardings of gradients as the optimizer reads them.
        partition: which parameters are trained; the others are closed over.
    """
    loss, late = placed_loss(traced, placing), once(traced, placing)

    def gradients(params: Tree, state: Tree, batch: Tree, kept: Kept) -> Any:
        def joined(trained: Tree) -> Tree:
            return partition.joined(trained, params)

        def of_trained(trained: Tree, state: Tree, batch: Tree) -> Any:
            return loss(joined(trained), state, batch)

        if late is not None:
            found = replace(late, joined=joined, complete=partition.numbered(late.complete))
            return accumulated_once(found, batch, microbatches, gradient)(
                partition.trained(params), state, kept
            )
        run = accumulated(
            of_trained,
            batch,
            microbatches,
            lambda tree: constrain(tree, gradient),
            placing.reductions,
        )
        return *run(partition.trained(params), state), None

    keeps = late is not None and placing.reductions.exchange.keeps
    return Run(gradients=gradients, kept=late.abstract if late is not None and keeps else None)


def pipelined(pipeline: Pipeline, shardings: Tree, dims: BatchDims) -> Run:
    """The microbatches through the stages of a pipeline.

    Args:
        pipeline: the loss, cut into stages.
        shardings: of each array of the batch.
        dims: batch dim of each array of the batch, by path.
    """
    parts = Microbatches(shardings=shardings, dims=dims, count=pipeline.microbatches)
    return Run.of(
        lambda params, state, batch: pipeline.gradients(params, state, *parts.split(batch)),
        pipeline.stages.table,
    )


def of_trained(run: Run, partition: Partition) -> Run:
    """A run that gives the gradients of trained parameters, for one that has some for all.

    Args:
        run: gives gradients of all parameters.
        partition: which of them are trained.
    """

    def gradients(*arguments: Any) -> Any:
        results, found, kept = run.gradients(*arguments)
        return results, partition.trained(found), kept

    return replace(run, gradients=gradients)


def init_function(
    model: Model,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    guards: Guards | None = None,
    kept: Kept = None,
) -> Callable[[Index], TrainState]:
    """seed -> the state before the first step; `kept` is abstract, see `Run`.

    Args:
        model: the model.
        optimizer: an optax transformation.
        precision: dtypes of stored arrays.
        guards: None for none.
        kept: abstract, see `Run`.

    Returns:
        Function of an int32 scalar.
    """

    def init(seed: Index) -> TrainState:
        params, state = model.init(seed)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=model.partition.mapped(precision.resting, params),
            model_state=state,
            opt_state=optimizer.init(model.partition.trained(params)),
            guard=None if guards is None else guards.first(),
            exchange=nothing_kept(kept),
        )

    return init


def nothing_kept(kept: Kept) -> Kept:
    """What devices keep before the first step: zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kept)


def step_function(
    parts: StepParts,
) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics): gradients, then the optimizer on whatever part of the
    state is local.
    """
    optimizer = optax.with_extra_args_support(parts.optimizer)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        (loss, (metrics, model_state)), gradients, kept = parts.run.gradients(
            state.params, state.inputs, batch, state.exchange
        )
        gradients = like(constrain(gradients, parts.params.gradient), parts.updated)
        if parts.guards is None or state.guard is None:
            after = update(state, loss, gradients, model_state, lambda new, old: new)
            return replace(after, exchange=kept), {"loss": loss, **metrics}
        found = checked(parts.guards, state.guard, loss, gradients, parts.params.gradient)
        after = update(
            state,
            found.loss,
            found.gradients,
            model_state if state.guard.scale is None else model_state["model"],
            found.chosen,
        )
        guard = parts.guards.after(state.guard, found.finite)
        return replace(after, guard=guard, exchange=found.chosen(kept, state.exchange)), {
            "loss": found.loss,
            **found.metrics(state.guard),
            **metrics,
        }

    def update(
        state: TrainState,
        loss: Any,
        gradients: Tree,
        model_state: Tree,
        chosen: Callable[[Tree, Tree], Tree],
    ) -> TrainState:
        stored = parts.partition.trained(state.params)
        local = like(moved(stored, parts.params.rest, parts.params.state), parts.updated)
        before = fetched(state.opt_state, parts.opt_state)
        gradients = jax.tree.map(lambda gradient: checkpoint_name(gradient, GRADIENT), gradients)
        updates, opt_state = optimizer.update(gradients, before, local, value=loss)
        params = parts.precision.resting(
            chosen(optax.apply_updates(local, constrain(updates, parts.params.state)), local)
        )
        rested = parts.partition.joined(
            moved(parts.gather(params, stored), parts.params.state, parts.params.rest),
            state.params,
        )
        return TrainState(
            step=state.step + 1,
            params=rested,
            model_state=chosen(model_state, state.model_state),
            opt_state=to_host(chosen(opt_state, before), parts.opt_state),
        )

    return step


def named(function: Function, kind: str, digest: str) -> Function:
    """Gives a function the plan's digest as part of its name, which becomes the name of the
    compiled module.

    Args:
        function: any; changed.
        kind: "step", "init" and the like.
        digest: of the plan.
    """
    function.__name__ = function.__qualname__ = f"shardlib_{kind}_{digest}"
    return function
