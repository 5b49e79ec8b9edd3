"""A script as users write it: one island of the tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import numpy as np
import optax

import shardlib
from shardlib.islands import servers
from shardlib.processes.values import whole
from tests.islands.servers.jobs import AXES, loss, rows, weights


def main() -> None:
    shardlib.join()  # where an island has several processes
    program = shardlib.compile(
        shardlib.tree(weights, AXES),
        loss,
        optax.adamw(1e-2, eps=1e-3),
        rows(0, 0),
        topology=f"cpu:{jax.device_count()}",
        pin={"mesh": {"fsdp": 2}, "zero": 3},
    )
    exchange = os.environ.get("TEST_EXCHANGE", "diloco:2:2:rate=0.5:momentum=0.8")
    folder, steps = Path(os.environ["TEST_FOLDER"]), int(os.environ.get("TEST_STEPS", "8"))
    with servers.join(program, exchange=exchange) as island:
        log = folder / f"island-{island.number}"
        log.with_suffix(".pid").write_text(str(os.getpid()))
        state = island.start(seed=0)
        while island.steps < steps and not (folder / "stop").exists():
            batch = rows(island.number, island.steps)
            state, metrics = island.step(state, batch)
            assert np.isfinite(float(metrics["loss"]))
            time.sleep(float(os.environ.get("TEST_SLEEP", "0")))
        state = island.finish(state)
        found = jax.tree.map(whole, island.module(state))
        if jax.process_index() == 0:
            np.savez(log.with_suffix(".npz"), **found)


if __name__ == "__main__":
    main()
