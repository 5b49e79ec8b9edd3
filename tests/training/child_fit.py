"""Processes of two devices that train together, of which the last one gets SIGTERM at step 12 of
30. Arguments: how many, a free port, the folder.

The run is in `run`; every process writes what it has come to into `found-NUMBER`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import jax

from shardlib.training.fit import fit
from shardlib.training.settings import Settings
from tests.processes import forked
from tests.training.small import batch_of, compiled


def run(number: int, count: int, port: str, folder: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", count, number)

    def batches(step: int) -> object:
        if (number, step) == (count - 1, 12):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(step)

    found = fit(
        compiled({"fsdp": 2 * count}),
        batches,
        steps=30,
        settings=Settings(run=str(Path(folder, "run")), save_every=7, loggers=(), hang_seconds=30),
    )
    Path(folder, f"found-{number}").write_text(
        json.dumps({"steps": found.steps, "stopped": found.stopped})
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(run))
