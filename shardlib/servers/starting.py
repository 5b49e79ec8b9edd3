"""Trains with workers and parameter servers, all of them processes of this machine."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import ArgumentError, raise_all
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.launching.addresses import LOOPBACK
from shardlib.servers.crew import Crew, environment
from shardlib.servers.ownership import Flat, joined
from shardlib.servers.result import Trained, counted, read_steps
from shardlib.servers.server import process as server_process
from shardlib.servers.server.process import SECRET, ServerSettings
from shardlib.servers.wire.connection import Connection, address_file
from shardlib.servers.wire.messages import STARTER, Ask
from shardlib.servers.worker import process as worker_process
from shardlib.servers.worker.job import MakeJob, Reference, reference_to
from shardlib.servers.worker.process import WorkerSettings, log_file, read_shapes
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How a run is kept going.

    Attributes:
        save_every: pushes of a server between two of its checkpoints; with 1, a push is on disk
            before it is answered; 0 for the end alone.
        restarts: how often each server may be started again.
        silent_s: seconds after which a worker that says nothing is not waited for.
        patience_s: seconds for which workers ask a server that does not answer.

    Raises:
        ArgumentError: values out of range; all of them are listed.
    """

    save_every: int = 100
    restarts: int = 3
    silent_s: float = 60.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {shown(value)}; it is an integer of at least 0"
            for name, value in (("save_every", self.save_every), ("restarts", self.restarts))
            if not isinstance(value, int) or isinstance(value, bool) or value < 0
        ]
        failures += [
            f"{name} is {shown(value)}; it is a number of more than 0"
            for name, value in (("silent_s", self.silent_s), ("patience_s", self.patience_s))
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0
        ]
        if failures:
            raise_all(ArgumentError, "Upkeep is not usable", failures)


def train(
    job: MakeJob,
    steps: int,
    *,
    exchange: Asynchronous,
    run: str | Path | None = None,
    devices: int | None = None,
    upkeep: Upkeep | None = None,
    say: Callable[[str], None] | None = None,
) -> Trained:
    """Trains with workers and parameter servers, all of them processes of this machine.

    Args:
        job: a function at the top of a file, which gives the `Job`; every worker calls it in its
            own process, where the file is loaded again, but for what stands under `if __name__ ==
            "__main__"`.
        steps: of each worker.
        exchange: how many workers and servers, and how they exchange.
        run: folder for checkpoints of servers and what processes write; where servers have
            checkpoints there, training goes on with them. By default one that is deleted.
        devices: CPU devices that each worker simulates; by default those that there are.
        upkeep: checkpoints, restarts, patience.
        say: is told what happens; by default it goes to standard error.

    Returns:
        Parameters, losses of each worker, histograms of staleness, pushes, events.

    Raises:
        ArgumentError: arguments that cannot be used; all of them are listed.
        LaunchError: no worker has ended well, or a server ends again and again.
    """
    _require(steps, exchange, devices)
    reference, upkeep = reference_to(job), upkeep or Upkeep()
    with ExitStack() as stack:
        if run is None:
            run = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardlib-servers-"))
        folder = Path(run).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        asked = _Asked(
            reference=reference,
            steps=steps,
            exchange=exchange,
            folder=folder,
            devices=devices,
            upkeep=upkeep,
        )
        return asked.run(say or _to_stderr)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A run as it was asked for."""

    reference: Reference
    steps: int
    exchange: Asynchronous
    folder: Path
    devices: int | None
    upkeep: Upkeep

    def run(self, say: Callable[[str], None]) -> Trained:
        secret, began = secrets.token_hex(16), time.monotonic()
        for server in range(self.exchange.servers):
            address_file(self.folder, server).unlink(missing_ok=True)
        logs = [log_file(self.folder, worker) for worker in range(self.exchange.workers)]
        before = [log.stat().st_size if log.exists() else 0 for log in logs]
        crew = Crew(
            folder=self.folder,
            servers=[self._server(server, secret) for server in range(self.exchange.servers)],
            workers=[self._worker(worker, secret) for worker in range(self.exchange.workers)],
            restarts=self.upkeep.restarts,
            say=say,
        )
        try:
            crew.run()
            params, reports = self._collected(crew, secret)
            crew.end_servers()
        finally:
            crew.close()
        return Trained(
            params=params,
            steps=tuple(read_steps(log, skip) for log, skip in zip(logs, before, strict=True)),
            staleness=tuple(counted(report["staleness"]) for report in reports),
            pushes=tuple(report["clock"] for report in reports),
            events=(*crew.events, *_events(reports)),
            seconds=time.monotonic() - began,
        )

    def _server(self, server: int, secret: str) -> dict[str, str]:
        settings = ServerSettings(
            server=server,
            exchange=self.exchange,
            save_every=self.upkeep.save_every,
            silent_s=self.upkeep.silent_s,
            host=LOOPBACK,
        )
        return environment(None, {SECRET: secret, server_process.SETTINGS: settings.to_json()})

    def _worker(self, worker: int, secret: str) -> dict[str, str]:
        settings = WorkerSettings(
            worker=worker,
            exchange=self.exchange,
            job=self.reference,
            steps=self.steps,
            patience_s=self.upkeep.patience_s,
        )
        more = {SECRET: secret, worker_process.SETTINGS: settings.to_json()}
        return environment(self.devices, more)

    def _collected(self, crew: Crew, secret: str) -> tuple[Flat, list[JsonObject]]:
        """Parameters, and what each server has to tell."""
        parts: list[Flat] = []
        reports: list[JsonObject] = []
        for server in range(self.exchange.servers):
            link = Connection(
                folder=self.folder,
                server=server,
                worker=STARTER,
                secret=secret,
                patience_s=self.upkeep.patience_s,
                meanwhile=crew.look_after_servers,
            )
            parts.append(link.ask(Ask(kind="fetch", worker=STARTER))[1])
            reports.append(link.ask(Ask(kind="report", worker=STARTER))[0].report)
            link.close()
        return joined(parts, read_shapes(self.folder)), reports


def _events(reports: list[JsonObject]) -> list[str]:
    return [
        f"server {number}: {event}"
        for number, report in enumerate(reports)
        for event in report["events"]
    ]


def _require(steps: object, exchange: object, devices: object) -> None:
    failures: list[str] = []
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        failures.append(f"steps is {shown(steps)}; it is an integer of at least 1")
    if not isinstance(exchange, Asynchronous):
        failures.append(f"exchange is {shown(exchange)}; it is a shardlib.Asynchronous")
    if devices is not None and (
        not isinstance(devices, int) or isinstance(devices, bool) or devices < 1
    ):
        failures.append(f"devices is {shown(devices)}; it is an integer of at least 1")
    if failures:
        raise_all(ArgumentError, "shardlib.servers.train cannot use its arguments", failures)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
