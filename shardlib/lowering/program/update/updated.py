"""The update of a step: the optimizer on whatever part of the state is local."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax
from jax.ad_checkpoint import checkpoint_name

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value
from shardlib.lowering.host_memory.disk.parts import GRADIENT
from shardlib.lowering.host_memory.offload import fetched, to_host
from shardlib.lowering.mesh.pinning import constrain, moved
from shardlib.lowering.mesh.precision import like
from shardlib.lowering.program.update.parts import StepParts
from shardlib.lowering.runtime.state import TrainState


def updated(
    parts: StepParts,
    state: TrainState,
    loss: Value,
    gradients: Tree,
    model_state: Tree,
    chosen: Callable[[Tree, Tree], Tree] = lambda new, old: new,
) -> TrainState:
    """The state after the optimizer's update, with nothing that devices keep.

    Args:
        gradients: of the trained parameters, in the dtypes of the update.
    """
    optimizer = optax.with_extra_args_support(parts.optimizer)
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
