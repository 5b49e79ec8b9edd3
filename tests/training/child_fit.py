"""Two processes of two devices that train together. Arguments: a free port, the folder of the run, steps, and the step at which the second one gets SIGTERM (0 for none).

Imports are done once: the processes are forks from before JAX has started anything.
"""

from __future__ import annotations

import os
import signal
import sys

import jax

from shardlib.training.fit import Settings, fit
from tests.training.small import batch_of, compiled


def run(number: int, port: str, folder: str, steps: int, stop: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, number)

    def batches(step: int) -> object:
        if number == 1 and stop and step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(step)

    found = fit(compiled({"fsdp": 4}), batches, steps=steps, settings=Settings(run=folder, save_every=7, tensorboard=False, hang_seconds=30))
    print(number, found.steps, found.stopped, flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    children = []
    for number in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            run(number, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
            os._exit(0)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
