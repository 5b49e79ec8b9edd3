"""Trains with workers and parameter servers, where they are to be started."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Literal, Protocol, get_args

from shardlib.checkpointing.folder import claim
from shardlib.errors import ArgumentError, LaunchError, MissingPackageError, raise_all
from shardlib.islands.exchanges import Asynchronous, whole
from shardlib.islands.servers import processes
from shardlib.islands.servers.crew import Crew, Trained, TrainingRun, Upkeep, environment
from shardlib.islands.servers.processes import SECRET
from shardlib.islands.servers.server import ServerSettings, service_of
from shardlib.islands.servers.wire import (
    STARTER,
    Answer,
    Arrivals,
    Ask,
    Connection,
    Flat,
    address_file,
    listed,
    read_answer,
    read_ask,
)
from shardlib.islands.servers.worker import MAIN, MakeJob, Reference
from shardlib.islands.servers.worker_process import SETTINGS, WorkerSettings, trained_by
from shardlib.processes.console import LOOPBACK
from shardlib.processes.wire import Outgoing, made, pack, unpack
from shardlib.untrusted.data import JsonObject, fit, printable, shown

# --------------------------------------------------------------------------------------------------
# Workers and servers as processes of this machine, over its loopback address.


def run_processes(request: TrainingRun) -> Trained:
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


def _server(request: TrainingRun, server: int, secret: str) -> dict[str, str]:
    settings = request.server(server, LOOPBACK).to_json()
    return environment(None, {SECRET: secret, processes.SETTINGS: settings})


def _worker(request: TrainingRun, worker: int, secret: str) -> dict[str, str]:
    settings = request.worker(worker).to_json()
    return environment(request.devices, {SECRET: secret, SETTINGS: settings})


# --------------------------------------------------------------------------------------------------
# Workers and servers as Ray actors: the same service and the same loop, with Ray between them.
#
# Ray places actors, starts a server again that ends (at its checkpoint), and carries messages: the
# headers and safetensors of `wire` as plain data and bytes. Who may speak is Ray's matter.

#: Seconds between two tries to reach a server that is started again.
AGAIN_SECONDS = 0.2


class Method(Protocol):
    """A method of an actor, as Ray wraps it."""

    def remote(self, *arguments: object) -> object:
        """Calls it, and gives what stands for its result."""
        ...


class Handle(Protocol):
    """A handle of an actor: of a server, or of a worker."""

    answer: Method
    gone: Method
    run: Method


class ServerActor:
    """A server; many threads of Ray call it."""

    def __init__(self, settings: str, folder: str) -> None:
        parsed = ServerSettings.read(settings)
        _say_pid(Path(folder), f"server-{parsed.server}")
        self._service = service_of(parsed, Path(folder))

    def answer(self, header: JsonObject, body: bytes, who: int) -> tuple[JsonObject, bytes]:
        """Answers a message."""
        answer, arrays = self._service.answer(read_ask(header), unpack(body), who)
        return answer.to_json(), pack(arrays)

    def gone(self, worker: int) -> None:
        """A worker is gone, and nobody waits for it."""
        self._service.gone(worker)


class WorkerActor:
    """A worker."""

    def run(self, settings: str, folder: str, servers: Sequence[Handle]) -> None:
        """Trains."""
        parsed = WorkerSettings.read(settings)
        links = [
            RayLink(
                server=server, handle=handle, worker=parsed.worker, patience_s=parsed.patience_s
            )
            for server, handle in enumerate(servers)
        ]
        _say_pid(Path(folder), f"worker-{parsed.worker}")
        trained_by(parsed, Path(folder), links)


def handed(answer: Answer, arrays: Outgoing, arrivals: Arrivals | None) -> tuple[Answer, Flat]:
    """Returns the value of `Link.ask` for an answer that has come as a whole."""
    arrays_made = made(arrays)
    if arrivals is None:
        return answer, arrays_made
    arrivals.begin(answer)
    for name, array in arrays_made.items():
        arrivals.take(name, array)
    return answer, Flat()


@dataclass(kw_only=True)
class RayLink:
    """A way to a server that is an actor.

    Attributes:
        server: its number.
        handle: the actor.
        worker: who asks.
        patience_s: how long a server may be gone.
    """

    server: int
    handle: Handle
    worker: int
    patience_s: float

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        """See `Link`; what comes is handed on as a whole."""
        ray, until = _ray(), time.monotonic() + self.patience_s
        while True:
            try:
                call = self.handle.answer.remote(ask.to_json(), pack(arrays or {}), self.worker)
                header, body = ray.get(call, timeout=self.patience_s)
                return handed(read_answer(header), unpack(body), arrivals)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"server {self.server} has not answered for {self.patience_s:g} s: {error}"
                    ) from error
                time.sleep(AGAIN_SECONDS)

    def close(self) -> None:
        """Ray closes what it has opened."""


def run_actors(request: TrainingRun) -> Trained:
    """Runs it to its end."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    began, logs, events = time.monotonic(), request.logs(), list[str]()
    servers = [_server_actor(ray, request, number) for number in range(request.exchange.servers)]
    workers = [_worker_actor(ray, request) for _ in range(request.exchange.workers)]
    try:
        _watched(ray, request, servers, workers, events)
        links = [
            RayLink(
                server=number, handle=handle, worker=STARTER, patience_s=request.upkeep.patience_s
            )
            for number, handle in enumerate(servers)
        ]
        for link in links:
            link.ask(Ask(kind="save", worker=STARTER))
        return request.collected(links, logs, events, time.monotonic() - began)
    finally:
        for actor in (*workers, *servers):
            ray.kill(actor)


def _server_actor(ray: ModuleType, request: TrainingRun, number: int) -> Handle:
    """An actor, on whatever host has room. It reserves nothing: it computes little."""
    options = {
        "num_cpus": 0,
        "max_restarts": request.upkeep.restarts,
        "max_concurrency": 2 * request.exchange.workers + 8,
        "runtime_env": _environment(None, {}),
    }
    settings = request.server(number, "").to_json()
    return ray.remote(ServerActor).options(**options).remote(settings, str(request.folder))


def _worker_actor(ray: ModuleType, request: TrainingRun) -> Handle:
    needs = dict(request.upkeep.resources)
    options = {
        "num_cpus": needs.pop("CPU", 0),
        "num_gpus": needs.pop("GPU", 0),
        "resources": needs,
        "runtime_env": _environment(request.devices, {SETTINGS: "{}"}),
    }
    return ray.remote(WorkerActor).options(**options).remote()


def _environment(devices: int | None, more: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
    """Variables of an actor, beside those of Ray."""
    variables = environment(devices, {})
    names = ("PYTHONPATH", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    return {"env_vars": {name: variables[name] for name in names if name in variables} | dict(more)}


def _watched(
    ray: ModuleType,
    request: TrainingRun,
    servers: Sequence[Handle],
    workers: Sequence[Handle],
    events: list[str],
) -> None:
    """Makes all workers train, and waits until the last has ended; what happens is put into
    `events`.
    """
    waiting = {
        worker.run.remote(request.worker(number).to_json(), str(request.folder), servers): number
        for number, worker in enumerate(workers)
    }
    well, last = 0, ""
    while waiting:
        for call in ray.wait(list(waiting), num_returns=1, timeout=1.0)[0]:
            number = waiting.pop(call)
            try:
                ray.get(call)
                well += 1
                continue
            except ray.exceptions.RayActorError:
                last = f"worker {number} is gone; the others go on"
            except ray.exceptions.RayTaskError as error:
                why = fit(printable(str(error.cause)), 2000)
                last = f"worker {number} ended with an error; the others go on: {why}"
            events.append(last)
            request.say(last)
            for server in servers:
                server.gone.remote(number)
    if not well:
        raise LaunchError(f"no worker has ended well\n{last}")


def _say_pid(folder: Path, name: str) -> None:
    (folder / f"{name}.pid").write_text(f"{os.getpid()}\n")


def _ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackageError(
            "engine='ray' needs the package ray\nTry: pip install 'shardlib[ray]'"
        ) from error


# --------------------------------------------------------------------------------------------------
# Training, with either of them.

#: What starts workers and servers.
Engine = Literal["local", "ray"]


def reference_to(job: MakeJob) -> Reference:
    """Returns the reference by which another process finds a function."""
    name = getattr(job, "__qualname__", "")
    module = sys.modules.get(getattr(job, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not isinstance(job, FunctionType) or "<" in name or file is None:
        raise ArgumentError(
            f"job is {shown(job)}, which other processes cannot find\nTry: a function at the top of"
            " a file: def job(): return shardlib.servers.Job(init=..., loss=..., rows=...)"
        )
    module_name = MAIN if job.__module__ == "__main__" else job.__module__
    return Reference(module=module_name, file=str(Path(file).resolve()), name=name)


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
        request = TrainingRun(
            job=reference,
            steps=steps,
            exchange=exchange,
            folder=folder,
            devices=devices,
            upkeep=upkeep or Upkeep(),
            say=say or _to_stderr,
        )
        return run_processes(request) if engine == "local" else run_actors(request)


def _require(steps: object, exchange: object, devices: object, engine: object) -> None:
    failures = whole("steps", steps, 1)
    if not isinstance(exchange, Asynchronous):
        failures.append(f"exchange is {shown(exchange)}; it is a shardlib.islands.Asynchronous")
    if devices is not None:
        failures += whole("devices", devices, 1)
    if engine not in get_args(Engine):
        failures.append(f"engine is {shown(engine)}; it is 'local' or 'ray'")
    if failures:
        raise_all(
            ArgumentError, "shardlib.islands.servers.train cannot use its arguments", failures
        )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
