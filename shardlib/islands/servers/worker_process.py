"""The process of a worker: `python -m shardlib.islands.servers.worker_process FOLDER`, with its
settings and the secret in variables of the environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shardlib.errors import LaunchError
from shardlib.islands.exchanges import Asynchronous, Rule
from shardlib.islands.servers.processes import SECRET, run
from shardlib.islands.servers.service import ProcessSettings, write
from shardlib.islands.servers.wire import Connection, Link, listed
from shardlib.islands.servers.worker import MAIN, Computing, Job, Reference, Worker
from shardlib.untrusted.data import shown

#: Variable of the environment.
SETTINGS = "SHARDLIB_WORKER"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """Settings of a worker.

    Attributes:
        worker: its number.
        exchange: of the run.
        job: where the function stands that makes the job.
        steps: of this worker.
        patience_s: how long a server may be gone.
        bucket_bytes: of elements that cross together.
    """

    what = "the settings of a worker"
    words = Rule

    worker: int
    exchange: Asynchronous
    job: Reference
    steps: int
    patience_s: float
    bucket_bytes: int


def load_job(reference: Reference) -> Job:
    """The job, made by the function."""
    make = getattr(_module(reference), reference.name, None)
    if make is None:
        raise LaunchError(f"{reference.file} has no function {reference.name}")
    job = make()
    if not isinstance(job, Job):
        raise LaunchError(
            f"{reference.name} of {reference.file} gives {shown(job)}\nTry: return"
            " shardlib.servers.Job(init=..., loss=..., rows=...)"
        )
    return job


def _module(reference: Reference) -> ModuleType:
    if reference.module != MAIN and importlib.util.find_spec(reference.module) is not None:
        return importlib.import_module(reference.module)
    spec = importlib.util.spec_from_file_location(MAIN, reference.file)
    if spec is None or spec.loader is None:
        raise LaunchError(f"{reference.file} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    spec.loader.exec_module(module)
    return module


def log_file(folder: Path, worker: int) -> Path:
    """Returns the file in which a worker writes a line of JSON for each step."""
    return folder / f"worker-{worker}.jsonl"


def shapes_file(folder: Path, worker: int) -> Path:
    """Returns the file in which a worker writes the shapes of the trained parameters."""
    return folder / f"worker-{worker}.shapes"


def trained_by(settings: WorkerSettings, folder: Path, links: Sequence[Link]) -> None:
    """Trains as one worker."""
    exchange, number = settings.exchange, settings.worker
    job = load_job(settings.job)
    computing = Computing(job, number, exchange.local_rate)
    shapes = {path: list(leaf.shape) for path, leaf in computing.trained.items()}
    write(shapes_file(folder, number), json.dumps(shapes).encode())
    worker = Worker(
        number=number,
        exchange=exchange,
        computing=computing,
        links=links,
        bucket_bytes=settings.bucket_bytes,
    )
    worker.run(settings.steps, job.rows, log_file(folder, number))


def main(folder: Path) -> None:
    """Trains as the worker that the environment describes."""
    settings = WorkerSettings.read(os.environ[SETTINGS])
    links = [
        Connection(
            where=listed(folder, server),
            server=server,
            worker=settings.worker,
            secret=os.environ[SECRET],
            patience_s=settings.patience_s,
        )
        for server in range(settings.exchange.servers)
    ]
    trained_by(settings, folder, links)


if __name__ == "__main__":
    run(main, sys.argv[1])
