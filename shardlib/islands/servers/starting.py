"""Trains with workers and parameter servers, where they are to be started."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, get_args

from shardlib.checkpointing.folder import claim
from shardlib.errors import ArgumentError, LaunchError, raise_all
from shardlib.islands.exchanges import Asynchronous
from shardlib.islands.servers import ray_actors, server_process, worker_process
from shardlib.islands.servers.crew import Asked, Crew, Trained, Upkeep, environment
from shardlib.islands.servers.server_process import SECRET
from shardlib.islands.servers.wire import STARTER, Connection, address_file, listed
from shardlib.islands.servers.worker import MakeJob, reference_to
from shardlib.islands.servers.worker_process import SETTINGS
from shardlib.processes.console import LOOPBACK
from shardlib.untrusted.data import shown

# --------------------------------------------------------------------------------------------------
# Workers and servers as processes of this machine, over its loopback address.


def run_processes(request: Asked) -> Trained:
    """Runs it to its end."""
    secret, began, logs = secrets.token_hex(16), time.monotonic(), request.logs()
    servers, workers = range(request.exchange.servers), range(request.exchange.workers)
    for server in servers:
        address_file(request.folder, server).unlink(missing_ok=True)
    crew = Crew(
        folder=request.folder,
        servers=[_server(request, server, secret) for server in servers],
        workers=[_worker(request, worker, secret) for worker in workers],
        restarts=request.upkeep.restarts,
        say=request.say,
    )
    try:
        crew.run()
        links = [
            Connection(
                where=listed(request.folder, server),
                server=server,
                worker=STARTER,
                secret=secret,
                patience_s=request.upkeep.patience_s,
                meanwhile=crew.look_after_servers,
            )
            for server in servers
        ]
        trained = request.collected(links, logs, crew.events, time.monotonic() - began)
        for link in links:
            link.close()
        crew.end_servers()
        return trained
    except KeyboardInterrupt:
        crew.end_servers()  # which save first
        raise
    finally:
        crew.close()


def _server(request: Asked, server: int, secret: str) -> dict[str, str]:
    settings = request.server(server, LOOPBACK).to_json()
    return environment(None, {SECRET: secret, server_process.SETTINGS: settings})


def _worker(request: Asked, worker: int, secret: str) -> dict[str, str]:
    settings = request.worker(worker).to_json()
    return environment(request.devices, {SECRET: secret, worker_process.SETTINGS: settings})


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
            "shardlib.servers.train was called where a worker loads the file of its job\nTry:"
            " call"
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
        return run_processes(request) if engine == "local" else ray_actors.run(request)


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
        raise_all(
            ArgumentError, "shardlib.islands.servers.train cannot use its arguments", failures
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
