"""The process of a worker: `python -m shardlib.islands.servers.worker_process FOLDER`, with its
settings and the secret in variables of the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardlib.errors import LaunchError, ShardlibError
from shardlib.islands.exchanges import Asynchronous, Rule
from shardlib.islands.servers.server import write
from shardlib.islands.servers.server_process import SECRET
from shardlib.islands.servers.wire import Connection, Link, listed
from shardlib.islands.servers.worker import Computing, Reference, Worker, load_job
from shardlib.untrusted.data import Form, construct, parse_json

#: Variable of the environment.
SETTINGS = "SHARDLIB_WORKER"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker.

    Attributes:
        worker: its number.
        exchange: of the run.
        job: where the function stands that makes the job.
        steps: of this worker.
        patience_s: how long a server may be gone.
        bucket_bytes: of elements that cross together.
    """

    worker: int
    exchange: Asynchronous
    job: Reference
    steps: int
    patience_s: float
    bucket_bytes: int

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(asdict(self))


def log_file(folder: Path, worker: int) -> Path:
    """Returns the file in which a worker writes a line of JSON for each step."""
    return folder / f"worker-{worker}.jsonl"


def shapes_file(folder: Path, worker: int) -> Path:
    """Returns the file in which a worker writes the shapes of the trained parameters."""
    return folder / f"worker-{worker}.shapes"


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by path, as a worker has written them."""
    first = min(folder.glob("worker-*.shapes"))
    return {path: tuple(shape) for path, shape in json.loads(first.read_text()).items()}


def read_worker_settings(text: str) -> WorkerSettings:
    """The settings of a text."""
    return construct(
        WorkerSettings,
        parse_json(text, "the settings of a worker", LaunchError),
        "the settings of a worker",
        LaunchError,
        forms={Rule: Form(plain=str, build=str)},
    )


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
    settings = read_worker_settings(os.environ[SETTINGS])
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
    try:
        main(Path(sys.argv[1]))
    except ShardlibError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
