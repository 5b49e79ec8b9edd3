"""What does one training step do, as a function that `jax.jit` compiles?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.model import Model
from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Function, Index, Metrics
from shardlib.lowering.accumulation.deferred_reduction import accumulated_once, once
from shardlib.lowering.accumulation.microbatches import Microbatches, accumulated
from shardlib.lowering.loss.forward import placed_loss
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.mesh.pinning import constrain
from shardlib.lowering.mesh.precision import Precision, like
from shardlib.lowering.pipeline.lockstep.pipeline import Pipeline
from shardlib.lowering.program.guards import Guards, checked
from shardlib.lowering.program.update.parts import Kept, Run, StepParts
from shardlib.lowering.program.update.updated import updated
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.lowering.runtime.state import Gradients, TrainState


def unpiped(
    traced: LossJaxpr,
    placing: Placing,
    microbatches: Microbatches,
    gradient: Tree,
    partition: Partition,
) -> Run:
    """The batch at once, or one microbatch after another."""
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
    """The microbatches through the stages of a pipeline."""
    parts = Microbatches(shardings=shardings, dims=dims, count=pipeline.microbatches)
    return Run.of(
        lambda params, state, batch: pipeline.gradients(params, state, *parts.split(batch)),
        pipeline.stages.table,
    )


def of_trained(run: Run, partition: Partition) -> Run:
    """A run that gives the gradients of trained parameters, for one that has some for all."""

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
        precision: dtypes of stored arrays.
        guards: None for none.
    """

    def init(seed: Index) -> TrainState:
        # static parts that `init` makes anew, as functions, are other objects than the traced ones
        traced = jax.tree.structure((model.params, model.state))
        params, state = traced.unflatten(jax.tree.leaves(model.init(seed)))
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
    gradients, apply = gradients_function(parts), apply_function(parts)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        return apply(state, gradients(state, batch))

    return step


def gradients_function(parts: StepParts) -> Callable[[TrainState, Tree], Gradients]:
    """(state, batch) -> gradients, the first half of a step."""

    def gradients(state: TrainState, batch: Tree) -> Gradients:
        (loss, (metrics, model_state)), found, kept = parts.run.gradients(
            state.params, state.inputs, batch, state.exchange
        )
        return Gradients(
            params=like(constrain(found, parts.params.gradient), parts.updated),
            loss=loss,
            metrics=dict(metrics),
            model_state=model_state,
            exchange=kept,
        )

    return gradients


def apply_function(
    parts: StepParts,
) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
    """(state, gradients) -> (state, metrics), the second half of a step."""

    def apply(state: TrainState, given: Gradients) -> tuple[TrainState, Metrics]:
        if parts.guards is None or state.guard is None:
            after = updated(
                parts, state, given.loss, given.params, given.model_state, lambda new, old: new
            )
            return replace(after, exchange=given.exchange), {"loss": given.loss, **given.metrics}
        found = checked(parts.guards, state.guard, given.loss, given.params, parts.params.gradient)
        after = updated(
            parts,
            state,
            found.loss,
            found.gradients,
            given.model_state if state.guard.scale is None else given.model_state["model"],
            found.chosen,
        )
        guard = parts.guards.after(state.guard, found.finite)
        exchange = found.chosen(given.exchange, state.exchange)
        return replace(after, guard=guard, exchange=exchange), {
            "loss": found.loss,
            **found.metrics(state.guard),
            **given.metrics,
        }

    return apply


def named(function: Function, kind: str, digest: str) -> Function:
    """Gives a function the plan's digest as part of its name, which becomes the name of the
    compiled module.
    """
    function.__name__ = function.__qualname__ = f"shardlib_{kind}_{digest}"
    return function
