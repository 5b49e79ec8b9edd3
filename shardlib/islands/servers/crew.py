"""The processes of a run: started together, watched, and gone with who has started them.

A server that ends is started again at its checkpoint, as often as it may; a worker that ends is
named, and the others go on.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardlib.errors import ArgumentError, LaunchError, raise_all
from shardlib.islands.exchanges import (
    BUCKET_BYTES,
    Asynchronous,
    between,
    whole,
    wrong_bucket_bytes,
)
from shardlib.islands.servers.server import ServerSettings
from shardlib.islands.servers.service import write
from shardlib.islands.servers.wire import STARTER, Ask, Link
from shardlib.islands.servers.worker import Reference
from shardlib.islands.servers.worker_process import WorkerSettings, log_file
from shardlib.processes.kin import Guard, finish, start
from shardlib.untrusted.data import JsonObject, printable, shown

if TYPE_CHECKING:
    from shardlib.lowering.program import Program
    from shardlib.lowering.runtime import TrainState


#: Seconds between two looks.
LOOK_SECONDS = 0.05
#: Seconds that servers have to save and end.
END_SECONDS = 30.0
#: Lines of what a process wrote last that an error shows.
LINES = 12


@dataclass(kw_only=True)
class Crew:
    """Running processes.

    Attributes:
        folder: of the run; what processes write is in its files.
        servers: variables of the environment of each server.
        workers: the same of each worker.
        restarts: how often each server may be started again.
        say: is told what happens.
    """

    folder: Path
    servers: list[Mapping[str, str]]
    workers: list[Mapping[str, str]]
    restarts: int
    say: Callable[[str], None]
    events: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._guard = Guard()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._left = [self.restarts] * len(self.servers)

    def run(self) -> None:
        """Starts all, and waits until the last worker has ended."""
        for number in range(len(self.servers)):
            self._server(number)
        waiting = {number: self._worker(number) for number in range(len(self.workers))}
        well = 0
        while waiting:
            time.sleep(LOOK_SECONDS)
            self.look_after_servers()
            for number, process in list(waiting.items()):
                if (code := process.poll()) is not None:
                    del waiting[number]
                    well += code == 0
                    if code:
                        self._worker_failed(number, code)
        if not well:
            raise LaunchError(f"no worker has ended well\n{self._last_lines('worker-0')}")

    def look_after_servers(self) -> None:
        """Starts servers again that have ended."""
        for number in range(len(self.servers)):
            code = self._running[f"server-{number}"].poll()
            if code is None:
                continue
            why = ended(code)
            if code == 2 or not self._left[number]:
                raise LaunchError(f"server {number} {why}\n{self._last_lines(f'server-{number}')}")
            self._left[number] -= 1
            self._note(f"server {number} {why}; it is started again from its checkpoint")
            self._server(number)

    def _worker_failed(self, number: int, code: int) -> None:
        self._note(f"worker {number} {ended(code)}; the others go on")
        if code > 0:
            self.say(self._last_lines(f"worker-{number}"))

    def end_servers(self) -> None:
        """Makes servers save and end."""
        running = [self._running[f"server-{number}"] for number in range(len(self.servers))]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            with suppress(subprocess.TimeoutExpired):  # then it is killed, and says nothing more
                process.wait(END_SECONDS)

    def close(self) -> None:
        """Ends whatever has not ended."""
        for process in self._running.values():
            finish(process, self._guard)
        self._guard.close()

    def _server(self, number: int) -> None:
        words = ("shardlib.islands.servers.processes", "server")
        self._start(f"server-{number}", words, self.servers[number])

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        words = ("shardlib.islands.servers.worker_process",)
        return self._start(f"worker-{number}", words, self.workers[number])

    def _start(
        self, name: str, module: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", *module, str(self.folder)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = start(
                words,
                self._guard,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[name] = process
        pids = {name: process.pid for name, process in self._running.items()}
        write(self.folder / "pids.json", json.dumps(pids).encode())
        return process

    def _note(self, text: str) -> None:
        self.events.append(text)
        self.say(text)

    def _last_lines(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(printable(line) for line in text.splitlines()[-LINES:])


def ended(code: int) -> str:
    """Describes the end of a process, in words.

    >>> ended(-9), ended(2)
    ('was killed by SIGKILL', 'ended with code 2')

    Args:
        code: its exit code; negative for a signal.
    """
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def environment(devices: int | None, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that finds the same modules as this one.

    Args:
        devices: CPU devices that it simulates; None for the devices that there are.
    """
    paths = [path or os.getcwd() for path in sys.path]
    simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        **simulated,
        **more,
    }


# --------------------------------------------------------------------------------------------------
# Results of training over parameter servers.

#: Losses at the end of a run whose mean is shown.
LAST = 8


@dataclass(frozen=True, kw_only=True)
class WorkerStep:
    """A step of a worker.

    Attributes:
        step: number, by the worker's own count.
        loss: of its rows; None where it was not finite.
        at_s: when it was done, seconds since 1970.
        waited_s: that the worker waited before it: for a bound, or a warm start.
        staleness: of the last gradient that the worker had pushed, at the first server.
    """

    step: int
    loss: float | None
    at_s: float
    waited_s: float
    staleness: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """Parameters, and how they came about.

    Attributes:
        params: trained parameters, float32, by dotted path.
        steps: of each worker what it did, in order.
        staleness: of each server, how many gradients were how stale.
        pushes: of each server, how many gradients it has applied.
        events: what happened on the way: who died, what was refused, what was started again.
        seconds: from the first start to the end.
    """

    params: Mapping[str, np.ndarray]
    steps: tuple[tuple[WorkerStep, ...], ...]
    staleness: tuple[Mapping[int, int], ...]
    pushes: tuple[int, ...]
    events: tuple[str, ...]
    seconds: float

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """Of each worker the losses of its steps; NaN where one was not finite."""
        return tuple(
            tuple(float("nan") if step.loss is None else step.loss for step in steps)
            for steps in self.steps
        )

    def state(self, program: Program, seed: int = 0) -> TrainState:
        """A state with these parameters, to be evaluated or exported."""
        from dataclasses import replace

        from shardlib.islands.program import with_trained

        first = program.init(seed)
        return replace(first, params=with_trained(program, first.params, self.params))

    def metrics(self) -> JsonObject:
        """All but the parameters, as plain data."""
        return {
            "seconds": self.seconds,
            "losses": [[step.loss for step in steps] for steps in self.steps],
            "waited_s": [sum(step.waited_s for step in steps) for steps in self.steps],
            "staleness": [dict(sorted(counts.items())) for counts in self.staleness],
            "pushes": list(self.pushes),
            "events": list(self.events),
        }

    def summary(self) -> str:
        """The figures as text."""
        lines = [
            f"worker {number}: {len(losses)} steps, loss {_first_and_last(losses)}"
            for number, losses in enumerate(self.losses)
        ]
        for number, counts in enumerate(self.staleness):
            total = sum(counts.values())
            mean = sum(s * count for s, count in counts.items()) / total if total else 0.0
            lines.append(
                f"server {number}: {self.pushes[number]} pushes, staleness {mean:.2f} in the mean,"
                f" {max(counts, default=0)} at most"
            )
        return "\n".join([*lines, *self.events])


def _first_and_last(losses: tuple[float, ...]) -> str:
    if not losses:
        return "none"
    finite = [loss for loss in losses[-LAST:] if math.isfinite(loss)]
    left_out = len(losses[-LAST:]) - len(finite)
    last = f"{float(np.mean(finite)):.4f}" if finite else "nan"
    note = f" ({left_out} of the last {LAST} not finite)" if left_out else ""
    return f"{losses[0]:.4f} at first, {last} at last{note}"


def read_steps(log: Path, skip: int = 0) -> tuple[WorkerStep, ...]:
    """The steps that a worker has written down; of a worker that was killed, whole lines alone.

    Args:
        skip: bytes before them, of earlier runs.
    """
    if not log.exists():
        return ()
    lines = log.read_bytes()[skip:].decode().split("\n")[:-1]
    return tuple(WorkerStep(**json.loads(line)) for line in lines)


def counted(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """A histogram of what a server reports."""
    return Counter(dict(pairs))


# --------------------------------------------------------------------------------------------------
# A run over parameter servers as it was asked for, and how it is kept going.


def _one_core() -> dict[str, float]:
    return {"CPU": 1.0}


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """Options of keeping a run going, and of sending its elements.

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
            *whole("save_every", self.save_every, 0),
            *whole("restarts", self.restarts, 0),
            *between("silent_s", self.silent_s, most=math.inf, above=True),
            *between("patience_s", self.patience_s, most=math.inf, above=True),
            *wrong_bucket_bytes(self.bucket_bytes),
        ]
        failures += [
            f"resources has {shown(name)}: {shown(value)}; it is a number of at least 0"
            for name, value in self.resources.items()
            if between(name, value, most=math.inf, above=False)
        ]
        if failures:
            raise_all(ArgumentError, "Upkeep is not usable", failures)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by path, as a worker has written them."""
    first = min(folder.glob("worker-*.shapes"))
    return {path: tuple(shape) for path, shape in json.loads(first.read_text()).items()}


def joined(
    parts: Sequence[Mapping[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Whole arrays, of the elements of all servers."""
    return {
        path: np.concatenate(
            [np.zeros(0, np.float32), *(arrays[path] for arrays in parts if path in arrays)]
        ).reshape(shape)
        for path, shape in shapes.items()
    }


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
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
        """Returns the settings of a server."""
        return ServerSettings(
            server=server,
            exchange=self.exchange,
            save_every=self.upkeep.save_every,
            silent_s=self.upkeep.silent_s,
            host=host,
        )

    def worker(self, worker: int) -> WorkerSettings:
        """Returns the settings of a worker."""
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
        """Collects the results of the run, once all workers have ended."""
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
