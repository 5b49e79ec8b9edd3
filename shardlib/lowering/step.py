"""What does one training step do, as a function that `jax.jit` compiles?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from shardlib.annotation.model import Model, PureLoss, Tree
from shardlib.lowering.microbatches import accumulated, averaged
from shardlib.lowering.shardings import ParameterShardings, constrain
from shardlib.lowering.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Everything that a step is made of.

    Attributes:
        loss: the loss of one microbatch over parameters at rest, with its layouts in place.
        optimizer: the user's optimizer.
        params: shardings of the parameters.
        gather: lays updated parameters out as they rest.
        batch: sharding of each array of the batch.
        batch_dims: batch dim of each array of the batch, by path.
        microbatches: number of parts that the batch is worked through in.
    """

    loss: PureLoss
    optimizer: optax.GradientTransformation
    params: ParameterShardings
    gather: Callable[[Tree], Tree]
    batch: Tree
    batch_dims: Mapping[str, int | None]
    microbatches: int


def init_function(model: Model, optimizer: optax.GradientTransformation) -> Callable[[Any], TrainState]:
    """seed -> the state before the first step."""

    def init(seed: Any) -> TrainState:
        params, state = model.init(seed)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, model_state=state, opt_state=optimizer.init(params))

    return init


def step_function(parts: StepParts) -> Callable[[TrainState, Tree], tuple[TrainState, dict[str, Any]]]:
    """(state, batch) -> (state, metrics): gradients, then the optimizer on whatever part of the state is local."""
    optimizer = optax.with_extra_args_support(parts.optimizer)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        run = accumulated(parts.loss, batch, parts.batch, parts.batch_dims, parts.microbatches,
                          lambda tree: constrain(tree, parts.params.gradient))
        (loss, (metrics, model_state)), gradients = run(state.params, state.model_state)
        gradients = constrain(gradients, parts.params.gradient)
        local = constrain(state.params, parts.params.state)
        updates, opt_state = optimizer.update(gradients, state.opt_state, local, value=loss)
        params = optax.apply_updates(local, constrain(updates, parts.params.state))
        after = TrainState(step=state.step + 1, params=constrain(parts.gather(params), parts.params.rest), model_state=model_state, opt_state=opt_state)
        return after, {"loss": loss, **metrics}

    return step


def evaluate_function(parts: StepParts) -> Callable[[TrainState, Tree], dict[str, Any]]:
    """(state, batch) -> metrics, with no gradients and no change of state."""

    def evaluate(state: TrainState, batch: Tree) -> dict[str, Any]:
        run = averaged(parts.loss, batch, parts.batch, parts.batch_dims, parts.microbatches)
        loss, (metrics, _) = run(state.params, state.model_state)
        return {"loss": loss, **metrics}

    return evaluate


def named(function: Callable[..., Any], kind: str, digest: str) -> Callable[..., Any]:
    """Gives a function the plan's digest as part of its name, which becomes the name of the compiled module."""
    function.__name__ = function.__qualname__ = f"shardlib_{kind}_{digest}"
    return function
