"""A run over parameter servers as it was asked for, and how it is kept going."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardlib.errors import ArgumentError, raise_all
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.exchanges.parts import BUCKET_BYTES, wrong_bucket_bytes
from shardlib.servers.ownership import joined
from shardlib.servers.result import Trained, counted, read_steps
from shardlib.servers.server.process import ServerSettings
from shardlib.servers.wire.messages import STARTER, Ask, Link
from shardlib.servers.worker.job import Reference
from shardlib.servers.worker.process import WorkerSettings, log_file, read_shapes
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown


def _one_core() -> dict[str, float]:
    return {"CPU": 1.0}


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How a run is kept going, and how its elements cross.

    Attributes:
        save_every: pushes of a server between two of its checkpoints; with 1, a push is on disk
            before it is answered; 0 for the end alone.
        restarts: how often each server may be started again.
        silent_s: seconds after which a worker that says nothing is not waited for.
        patience_s: seconds for which workers ask a server that does not answer.
        bucket_bytes: of elements that cross together, in the order in which the loss first uses
            them.
        resources: what Ray reserves for each worker, such as {"GPU": 4}; Ray alone uses it.

    Raises:
        ArgumentError: values out of range; all of them are listed.
    """

    save_every: int = 100
    restarts: int = 3
    silent_s: float = 60.0
    patience_s: float = 60.0
    bucket_bytes: int = BUCKET_BYTES
    resources: Mapping[str, float] = field(default_factory=_one_core)

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {shown(value)}; it is an integer of at least 0"
            for name, value in (("save_every", self.save_every), ("restarts", self.restarts))
            if not _is_number(value, int) or value < 0
        ]
        failures += [
            f"{name} is {shown(value)}; it is a number of more than 0"
            for name, value in (("silent_s", self.silent_s), ("patience_s", self.patience_s))
            if not _is_number(value, int, float) or not value > 0
        ]
        failures += wrong_bucket_bytes(self.bucket_bytes)
        failures += [
            f"resources has {shown(name)}: {shown(value)}; it is a number of at least 0"
            for name, value in self.resources.items()
            if not _is_number(value, int, float) or not value >= 0
        ]
        if failures:
            raise_all(ArgumentError, "Upkeep is not usable", failures)


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run.

    Attributes:
        job: where the function stands that makes the job.
        steps: of each worker.
        exchange: how many workers and servers, and how they exchange.
        folder: of the run.
        devices: CPU devices that each worker simulates; None for those that there are.
        upkeep: checkpoints, restarts, patience.
        say: is told what happens.
    """

    job: Reference
    steps: int
    exchange: Asynchronous
    folder: Path
    devices: int | None
    upkeep: Upkeep
    say: Callable[[str], None]

    def server(self, server: int, host: str) -> ServerSettings:
        """What a server is told."""
        return ServerSettings(
            server=server,
            exchange=self.exchange,
            save_every=self.upkeep.save_every,
            silent_s=self.upkeep.silent_s,
            host=host,
        )

    def worker(self, worker: int) -> WorkerSettings:
        """What a worker is told."""
        return WorkerSettings(
            worker=worker,
            exchange=self.exchange,
            job=self.job,
            steps=self.steps,
            patience_s=self.upkeep.patience_s,
            bucket_bytes=self.upkeep.bucket_bytes,
        )

    def logs(self) -> list[tuple[Path, int]]:
        """Of each worker the file of its steps, and how many bytes earlier runs have left in it."""
        files = [log_file(self.folder, worker) for worker in range(self.exchange.workers)]
        return [(file, file.stat().st_size if file.exists() else 0) for file in files]

    def collected(
        self,
        links: Sequence[Link],
        logs: Sequence[tuple[Path, int]],
        events: Sequence[str],
        seconds: float,
    ) -> Trained:
        """What came of the run, once all workers have ended.

        Args:
            seconds: that the run has taken.
        """
        parts = [link.ask(Ask(kind="fetch", worker=STARTER))[1] for link in links]
        reports = [link.ask(Ask(kind="report", worker=STARTER))[0].report for link in links]
        return Trained(
            params=joined(parts, read_shapes(self.folder)),
            steps=tuple(read_steps(log, skip) for log, skip in logs),
            staleness=tuple(counted(report["staleness"]) for report in reports),
            pushes=tuple(report["clock"] for report in reports),
            events=(*events, *_events(reports)),
            seconds=seconds,
        )


def _events(reports: Sequence[JsonObject]) -> list[str]:
    return [
        f"server {number}: {event}"
        for number, report in enumerate(reports)
        for event in report["events"]
    ]
