"""Processes of two devices that train together on a mesh of all, half or one of their devices.
Arguments: how many, a free port, the folder, devices of the mesh, how they are interrupted after
step 4 of 12: "kill", "term", or "" for not at all.

The run is in `run`; every process writes what it has come to into `found-NUMBER`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from shardlib.lowering.program import Program
from shardlib.lowering.step import Guards
from shardlib.processes.values import whole
from shardlib.training.callbacks import LearningRate
from shardlib.training.fit import Fitted, fit
from shardlib.training.measures import Policy
from shardlib.training.settings import Settings
from shardlib.training.states import averaged, with_average
from shardlib.training.stepping import BatchOf
from shardlib.training.validation import Validation
from tests.processes import forked, until
from tests.training.small import Model, batch_of, loss

STEPS, EVERY = 12, 3


def compiled(devices: int) -> Program:
    """With an average, guards and a learning rate in the state."""
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 9))
    return shardlib.compile(
        Model,
        loss,
        with_average(adam, 0.9),
        batch_of(0),
        topology=f"cpu:{devices}",
        pin={"mesh": {"fsdp": devices}, "zero": 3 if devices > 1 else 0},
        guards=Guards(clip=1.0, spike=True),
    )


def fitted(program: Program, batches: BatchOf, run: str | None) -> Fitted:
    return fit(
        program,
        batches,
        steps=STEPS,
        settings=Settings(
            run=run,
            save_every=EVERY,
            loggers=(),
            hang_seconds=60,
            policy=Policy(action="skip"),
            validation=Validation(data=lambda: [batch_of(100), batch_of(101)], every=6),
            callbacks=(LearningRate(),),
        ),
    )


def described(program: Program, run: Fitted) -> dict[str, Any]:
    """Plain data of a run: what its losses, validations, average and parameters are."""
    rows = batch_of(102)
    parameters = jax.tree.map(lambda leaf: whole(leaf).ravel(), jax.tree.leaves(run.state.params))
    return {
        "steps": run.steps,
        "resumed": run.resumed,
        "stopped": run.stopped,
        "losses": run.losses,
        "validations": {str(step): dict(one) for step, one in run.validations.items()},
        "loss": float(program.evaluate(run.state, rows)["loss"]),
        "loss of the average": float(program.evaluate(averaged(program, run.state), rows)["loss"]),
        "parameters": np.concatenate(parameters).tolist(),
        "next loss": float(program.step(run.state, rows)[1]["loss"]),
    }


def own_step(devices: int, folder: Path) -> list[float]:
    """Losses of two steps of the user's own, with a state that is saved and restored between."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (16, 16)) / 4, "seen": jnp.zeros((), jnp.int32)}

    def step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        def error(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)

        value, gradient = jax.value_and_grad(error)(state["w"])
        return {"w": state["w"] - gradient, "seen": state["seen"] + 1}, {"loss": value}

    program = shardlib.compile_step(
        init, step, batch_of(0), topology=f"cpu:{devices}", pin={"mesh": {"fsdp": devices}}
    )
    state, first = program.step(program.init(0), batch_of(0))
    program.save(folder, state)
    return [
        float(first["loss"]),
        float(program.step(program.restore(folder), batch_of(1))[1]["loss"]),
    ]


def work(number: int, count: int, port: str, folder: str) -> None:
    devices, how = int(sys.argv[4]), sys.argv[5]
    jax.distributed.initialize(f"localhost:{port}", count, number)

    def batches(step: int) -> Any:
        if step == EVERY + 1 and how == "kill":
            until(Path(folder, "run", "checkpoints", str(EVERY)).exists)
            os.kill(os.getpid(), signal.SIGKILL)
        if (step, how, number) == (EVERY + 1, "term", count - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(step)

    program = compiled(devices)
    run = fitted(program, batches, str(Path(folder, "run")))
    found = described(program, run)
    if not how:
        found["own step"] = own_step(devices, Path(folder, "own"))
    Path(folder, f"found-{number}").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(work))
