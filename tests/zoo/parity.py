"""How far is a sharded program from the truth?

The optimizer `capture` changes nothing and keeps the gradient as its state, so that a step through
the public interface shows the gradients as the program computed them, with no subtraction of nearly
equal numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from tests.zoo.case import Case, Gradients, leaves_by_path

#: A sharded program may differ from the unsharded one by this share of the largest element of each
#: array.
TOLERANCE = 1e-5
#: Gradients that are zero on paper (the bias of attention keys) come out as rounding noise of the
#: terms that cancel; those terms are as large as the largest gradient of the model, and float32
#: keeps 2**-24 of them.
FLOOR = 2.0**-24


def capture() -> optax.GradientTransformation:
    """An optimizer that leaves the parameters alone and keeps the last gradient as its state."""

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(jnp.zeros_like, params)

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(jnp.zeros_like, gradients), gradients

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One step of a sharded program."""

    program: shardlib.Program
    loss: float
    gradients: Gradients

    @property
    def plan(self) -> shardlib.Plan:
        return self.program.plan


def run_sharded(
    case: Case, pin: Mapping[str, Any], *, devices: int = 8, seed: int = 0, place: bool = False
) -> Sharded:
    """Plans and compiles the case under the pins, runs one step and reads the loss and the
    gradients.

    Args:
        case: the model.
        pin: decisions fixed by hand, besides one microbatch.
        devices: simulated devices.
        seed: of the parameters.
        place: whether to draw the parameters on one device and place them, which compiles less than
            `program.init` does.
    """
    program = shardlib.compile(
        case.init,
        case.loss,
        capture(),
        dict(case.batch),
        topology=f"cpu:{devices}",
        pin={"microbatches": 1, **pin},
        batch_axes=None if case.batch_axes is None else dict(case.batch_axes),
        name=case.name,
    )
    state, metrics = program.step(
        placed_state(program, seed) if place else program.init(seed), dict(case.batch)
    )
    return Sharded(
        program=program, loss=float(metrics["loss"]), gradients=leaves_by_path(state.opt_state)
    )


def placed_state(program: shardlib.Program, seed: int) -> shardlib.TrainState:
    """The state before the first step, drawn op by op on one device and then put where the program
    wants it.
    """
    params, model_state = program.model.init(seed)
    drawn = dataclasses.replace(
        program.state,
        step=np.int32(0),
        params=params,
        model_state=model_state,
        opt_state=program.optimizer.init(params),
    )
    return jax.tree.map(
        lambda leaf, abstract: jax.device_put(leaf, abstract.sharding), drawn, program.state
    )


def errors(loss: float, gradients: Gradients, truth: tuple[float, Gradients]) -> dict[str, float]:
    """Error of the loss and of each gradient as a multiple of what is allowed; above 1 is wrong.

    Raises:
        AssertionError: the gradients have other paths or shapes than the truth.
    """
    true_loss, true_gradients = truth
    assert gradients.keys() == true_gradients.keys(), gradients.keys() ^ true_gradients.keys()
    floor = FLOOR * max(float(np.abs(gradient).max()) for gradient in true_gradients.values())
    found = {"loss": abs(loss - true_loss) / (TOLERANCE * abs(true_loss))}
    for path, true in true_gradients.items():
        assert gradients[path].shape == true.shape, (path, gradients[path].shape, true.shape)
        found[path] = float(np.abs(gradients[path] - true).max()) / (
            TOLERANCE * float(np.abs(true).max()) + floor
        )
    return found


def relative_errors(
    program: shardlib.Program, loss: Callable[[Any, Any], Any], batch: Any
) -> dict[str, float]:
    """Errors of the loss and of every gradient of a program that captures them, against JAX on one
    device: of the loss relative to it, of gradients relative to their largest element.
    """
    state = program.init(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state.params)
    state, metrics = program.step(state, batch)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    wanted, actual = leaves_by_path(gradients), leaves_by_path(state.opt_state)
    assert actual.keys() == wanted.keys(), actual.keys() ^ wanted.keys()
    return {
        "loss": abs(float(metrics["loss"]) / float(value) - 1),
        **{
            path: float(np.abs(actual[path] - true).max() / max(np.abs(true).max(), 1e-30))
            for path, true in wanted.items()
        },
    }
