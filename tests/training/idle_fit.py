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
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import shardlib
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.program import Program
from shardlib.processes.values import whole
from shardlib.training.callbacks.rate import LearningRate
from shardlib.training.fit import Fitted, fit
from shardlib.training.measures.judge import Policy
from shardlib.training.settings import Settings
from shardlib.training.states.average import averaged, with_average
from shardlib.training.stepping.batches import BatchOf
from shardlib.training.validation.asked import Validation
from tests.processes import forked
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


def work(number: int, count: int, port: str, folder: str) -> None:
    devices, how = int(sys.argv[4]), sys.argv[5]
    jax.distributed.initialize(f"localhost:{port}", count, number)

    def batches(step: int) -> Any:
        if step == EVERY + 1 and how == "kill":
            end = time.monotonic() + 60
            while not Path(folder, "run", "checkpoints", str(EVERY)).exists():
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        if (step, how, number) == (EVERY + 1, "term", count - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(step)

    program = compiled(devices)
    run = fitted(program, batches, str(Path(folder, "run")))
    Path(folder, f"found-{number}").write_text(json.dumps(described(program, run)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(work))
