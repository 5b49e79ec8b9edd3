"""The driver of a job on a Ray cluster, which starts the processes on its hosts.

`python -m shardlib.launch.ray_driver JOB`, the entrypoint of the Ray job that `shardlib
launch --ray` submits. It reserves all hosts at once (a placement group, STRICT_SPREAD: no two
bundles on one node), and puts an actor on each, which starts the processes and waits for them. When
one ends with an error, all are ended; the driver starts them again on hosts that are alive, so
often without a new checkpoint as the job allows. `ray job stop` tells the driver, which tells the
processes.

Ray's interface: docs.ray.io/en/latest/ray-core/scheduling/placement-group.html and
.../ray-core/actors.html (read 2026-11).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import LaunchError, MissingPackageError
from shardlib.launch.clusters import RayHosts
from shardlib.launch.submission import SAVE_SECONDS
from shardlib.processes.place import STOPPED, USAGE

#: Seconds between two looks at the processes.
LOOK_EVERY = 0.2
#: Exit code of a host whose actor was lost with its node.
LOST = 1


class Host:
    """The processes of one host; an actor, with one thread that waits for them and one that hears
    of a stop.
    """

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []

    def address(self) -> str:
        """HOST:PORT for the coordinator, free at this moment."""
        node = importlib.import_module("ray").util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((node, 0))
            return f"{node}:{probe.getsockname()[1]}"

    def run(self, text: str, number: int, coordinator: str, start: str, secret: str = "") -> int:
        """Starts the processes of a host, and gives the first exit code that is not 0; a failure
        ends the others of the host.
        """
        job = RayHosts.from_json(text)
        base = {
            **os.environ,
            **job.environment,
            **job.place,
            "SHARDLIB_COORDINATOR": coordinator,
            "SHARDLIB_START": start,
            "SHARDLIB_SECRET": secret,
        }
        self.running = [
            subprocess.Popen(
                job.words,
                cwd=job.workdir,
                env={
                    **base,
                    "SHARDLIB_PROCESS": str(number * job.host_processes + local),
                    "SHARDLIB_HOST_PROCESS": str(local),
                },
            )
            for local in range(job.host_processes)
        ]
        code = 0
        while any(process.poll() is None for process in self.running):
            time.sleep(LOOK_EVERY)
            code = code or self._code()
            if code not in (0, STOPPED):
                self.end(signal.SIGKILL)
        return code or self._code()

    def end(self, number: int) -> None:
        """Sends a signal to the processes that run."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(number)

    def _code(self) -> int:
        """The first exit code that is not 0, a signal as a shell has it."""
        return next(
            (
                code if code > 0 else 128 - code
                for code in (process.poll() for process in self.running)
                if code
            ),
            0,
        )


class Stop:
    """Returns whether somebody has asked the driver to end."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        self.asked = True


def drive(job: RayHosts, stop: Stop) -> int:
    """Runs a job on a Ray cluster that this process has joined, and gives its exit code."""
    ray = importlib.import_module("ray")
    group = ray.util.placement_group([dict(job.resources)] * job.hosts, strategy="STRICT_SPREAD")
    try:
        if not group.wait(timeout_seconds=job.wait_seconds):
            raise LaunchError(
                f"Ray has no {job.hosts} nodes with {dict(job.resources)} each, after"
                f" {job.wait_seconds} s\nTry: ray status shows what it has"
            )
        failures, newest = 0, _newest(job.run)
        while True:
            code = _start(ray, group, job, stop)
            if code in (0, USAGE, STOPPED) or stop.asked:
                return code
            before, newest = newest, _newest(job.run)
            failures = 1 if newest > before else failures + 1
            print(
                f"the processes ended with code {code}; failures without a new checkpoint:"
                f" {failures}",
                file=sys.stderr,
                flush=True,
            )
            if failures > job.restarts:
                return code
            time.sleep(2.0 ** min(failures, 6))
    finally:
        ray.util.remove_placement_group(group)


def _start(ray: Any, group: Any, job: RayHosts, stop: Stop) -> int:
    """One start of all processes, until all have ended."""
    actor = ray.remote(max_concurrency=2)(Host)
    placed = importlib.import_module(
        "ray.util.scheduling_strategies"
    ).PlacementGroupSchedulingStrategy
    needs = {"num_cpus": job.resources.get("CPU", 0), "num_gpus": job.resources.get("GPU", 0)}
    hosts = [
        actor.options(
            **needs, scheduling_strategy=placed(group, placement_group_bundle_index=i)
        ).remote()
        for i in range(job.hosts)
    ]
    try:
        coordinator = ray.get(hosts[0].address.remote())
        start, secret = uuid.uuid4().hex, secrets.token_hex(16)
        return _watch(
            ray,
            hosts,
            [
                host.run.remote(job.to_json(), i, coordinator, start, secret)
                for i, host in enumerate(hosts)
            ],
            job,
            stop,
        )
    except ray.exceptions.RayActorError:
        return LOST
    finally:
        for host in hosts:
            ray.kill(host)


def _watch(ray: Any, hosts: Sequence[Any], runs: Sequence[Any], job: RayHosts, stop: Stop) -> int:
    """Waits for all hosts; the first failure ends the others, and so does the end of their time,
    after they could save.
    """
    waiting, code, signalled, began = list(runs), 0, 0.0, time.monotonic()
    while waiting and (not signalled or time.monotonic() - signalled < SAVE_SECONDS):
        done, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_EVERY)
        for run in done:
            code = code or _code(ray, run)
        if code not in (0, STOPPED):
            _tell(ray, hosts, signal.SIGKILL)
            return code
        if not signalled and (
            stop.asked or (job.seconds is not None and time.monotonic() - began > job.seconds)
        ):
            signalled = time.monotonic()
            _tell(ray, hosts, signal.SIGTERM)
    if waiting:
        _tell(ray, hosts, signal.SIGKILL)
        return 128 + signal.SIGKILL
    return code


def _code(ray: Any, run: Any) -> int:
    try:
        return ray.get(run)
    except ray.exceptions.RayError:
        return LOST


def _tell(ray: Any, hosts: Sequence[Any], number: int) -> None:
    """Sends a signal to the processes of all hosts that still answer."""
    for reply in [host.end.remote(number) for host in hosts]:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(reply, timeout=10)


def _newest(run: str | None) -> int:
    """The newest checkpoint of a run; 0 where there is none, or none can be seen from here."""
    if run is None or "://" in run:
        return 0
    from shardlib.training.run import RunFolder

    return max(RunFolder(Path(run)).saved(), default=0)


def main() -> None:
    """The entrypoint of the Ray job."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackageError(
            "the Ray job needs the package ray\nTry: an image that has it"
        ) from error
    stop = Stop()
    ray.init()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(drive(RayHosts.from_word(sys.argv[1]), stop))


if __name__ == "__main__":
    main()
