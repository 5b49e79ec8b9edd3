"""Trains with workers and parameter servers, where they are to be started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, get_args

from shardlib.checkpointing.owner import claim
from shardlib.errors import ArgumentError, LaunchError, raise_all
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.servers import local, ray_actors
from shardlib.servers.asked import Asked, Upkeep
from shardlib.servers.result import Trained
from shardlib.servers.worker.job import MakeJob, reference_to
from shardlib.servers.worker.process import SETTINGS
from shardlib.untrusted.shown import shown

#: What starts workers and servers.
Engine = Literal["local", "ray"]


def train(
    job: MakeJob,
    steps: int,
    *,
    exchange: Asynchronous,
    run: str | Path | None = None,
    devices: int | None = None,
    engine: Engine = "local",
    upkeep: Upkeep | None = None,
    say: Callable[[str], None] | None = None,
) -> Trained:
    """Trains with workers and parameter servers.

    Args:
        devices: CPU devices that each worker simulates; by default those that there are.
        say: is told what happens; by default it goes to standard error.
    """
    _require(steps, exchange, devices, engine)
    if SETTINGS in os.environ:
        raise LaunchError(
            "shardlib.servers.train was called where a worker loads the file of its job\nTry: call"
            ' it under if __name__ == "__main__":'
        )
    reference = reference_to(job)
    with ExitStack() as stack:
        if run is None:
            run = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardlib-servers-"))
        folder = Path(run).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        owner = claim(folder, say=say or _to_stderr)
        stack.callback(owner.release)
        request = Asked(
            job=reference,
            steps=steps,
            exchange=exchange,
            folder=folder,
            devices=devices,
            upkeep=upkeep or Upkeep(),
            say=say or _to_stderr,
        )
        return local.run(request) if engine == "local" else ray_actors.run(request)


def _require(steps: object, exchange: object, devices: object, engine: object) -> None:
    failures: list[str] = []
    if not _is_count(steps):
        failures.append(f"steps is {shown(steps)}; it is an integer of at least 1")
    if not isinstance(exchange, Asynchronous):
        failures.append(f"exchange is {shown(exchange)}; it is a shardlib.Asynchronous")
    if devices is not None and not _is_count(devices):
        failures.append(f"devices is {shown(devices)}; it is an integer of at least 1")
    if engine not in get_args(Engine):
        failures.append(f"engine is {shown(engine)}; it is 'local' or 'ray'")
    if failures:
        raise_all(ArgumentError, "shardlib.servers.train cannot use its arguments", failures)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
