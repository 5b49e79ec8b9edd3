"""Three workers over two parameter servers, one of them slow: what do the others lose, how stale
are gradients, and what does the slow one cost?

    python -m benchmarks parameter_server

Worker 2 is a process that is stopped and continued again, so that it runs a fifth of the time. Each
worker simulates two devices; a step waits 10 ms for its rows, so that a machine of two cores has
room for all. `bound=0` is a barrier: nobody begins a step before all have done the one before. Also
measured: seconds of a fetch and a push of 40 MB over the loopback address.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardlib
from benchmarks.environment import RESULTS, command_line, show, write
from shardlib.islands import servers
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.service import Listening
from shardlib.islands.servers.wire import Ask, Connection, address_file, listed

STEPS, WIDTH, ROWS, SLOW = 200, 16, 64, 2
#: Seconds for which the slow worker runs, and is stopped.
RUNS, STOPPED = 0.05, 0.2
#: What each case says beside three workers and two servers.
CASES: dict[str, dict[str, Any]] = {
    "no bound": {},
    "no bound, one rate": {"by_staleness": False},
    "no bound, warm": {"warm": 20},
    "bound 8": {"bound": 8},
    "bound 0 (a barrier)": {"bound": 0},
}
AXES = {"up": ("embed", "mlp"), "down": ("mlp", None)}
#: Steps of all workers, by time, whose mean loss is held against `GOAL`.
WINDOW, GOAL = 15, 0.1


def weights(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(second, (2 * WIDTH, 1)) / 6,
    }


def loss(params: Any, batch: Any) -> jax.Array:
    found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.mean((found[:, 0] - batch["y"]) ** 2)


def rows(worker: int, step: int) -> dict[str, np.ndarray]:
    time.sleep(0.01)
    logs = [Path(os.environ.get("BENCHMARK_RUN", ""), f"worker-{k}.jsonl") for k in range(3)]
    while step == 1 and not all(log.exists() for log in logs):
        time.sleep(0.01)  # all begin together
    x = np.random.default_rng([worker, step]).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1]}


def job() -> servers.Job:
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=rows)


def slowed(folder: Path, ended: threading.Event) -> None:
    """Stops and continues the slow worker, from its first step on."""
    log, pids = folder / f"worker-{SLOW}.jsonl", folder / "pids.json"
    while not (log.exists() and log.stat().st_size) and not ended.is_set():
        time.sleep(0.01)
    pid = json.loads(pids.read_text())[f"worker-{SLOW}"]
    while not ended.is_set() and log.read_text().count("\n") < STEPS:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(pid, signal.SIGCONT)
        time.sleep(RUNS)


def seconds_to_goal(trained: servers.Trained, began: float) -> float | None:
    """Seconds from the moment when all workers have begun, to a mean loss below the goal."""
    every = sorted((one.at_s, one.loss) for steps in trained.steps for one in steps)
    values = [value for _, value in every if value is not None]
    for last in range(WINDOW, len(values)):
        if every[last][0] > began and np.mean(values[last - WINDOW : last]) < GOAL:
            return every[last][0] - began
    return None


def row(more: dict[str, Any]) -> dict[str, Any]:
    """One case."""
    exchange = shardlib.islands.Asynchronous(workers=3, servers=2, rule="sgd", rate=0.004, **more)
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        slow = threading.Thread(target=slowed, args=(Path(folder), ended))
        slow.start()
        try:
            os.environ["BENCHMARK_RUN"] = folder
            trained = servers.train(job, STEPS, exchange=exchange, devices=2, run=folder)
        finally:
            ended.set()
            slow.join()
    began = max(steps[1].at_s for steps in trained.steps)
    counts = trained.staleness[0]
    return {
        "exchange": exchange.to_json(),
        "steps_per_s": [round(rate_after(steps, began), 2) for steps in trained.steps],
        "waited_s": trained.metrics()["waited_s"],
        "seconds_of_worker": [steps[-1].at_s - began for steps in trained.steps],
        "seconds_to_goal": seconds_to_goal(trained, began),
        "last_losses": [float(np.mean(one[-WINDOW:])) for one in trained.losses],
        "staleness": {str(s): counts[s] for s in sorted(counts)},
        "mean_staleness": sum(s * n for s, n in counts.items()) / sum(counts.values()),
        "pushes": trained.pushes,
        "events": trained.events,
    }


def rate_after(steps: Any, began: float) -> float:
    """Steps a second of a worker, once all have begun."""
    times = [one.at_s for one in steps if one.at_s >= began]
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def serve(folder: Path, rule: Any) -> None:
    """A server for `transfers`, in a process of its own."""
    exchange = shardlib.islands.Asynchronous(workers=1, servers=1, rule=rule)
    listening = Listening(service=Service(exchange=exchange), secret="benchmark")
    where = {"host": "127.0.0.1", "port": listening.port}
    address_file(folder, 0).write_text(json.dumps(where))
    listening.serve()


def transfers(rule: str, elements: int = 10_000_000) -> dict[str, float]:
    """Seconds of a fetch and of a push, each the median of five."""
    with tempfile.TemporaryDirectory() as name:
        words = [
            sys.executable,
            "-m",
            "benchmarks",
            "parameter_server",
            "--serve",
            name,
            "--rule",
            rule,
        ]
        process = subprocess.Popen(words)
        try:
            link = Connection(where=listed(Path(name), 0), server=0, worker=0, secret="benchmark")
            arrays = {"w": np.random.default_rng(0).normal(size=elements).astype(np.float32)}
            link.ask(Ask(kind="offer", worker=0), arrays)
            found: dict[str, list[float]] = {"fetch_s": [], "push_s": []}
            for serial in range(1, 6):
                for kind, sent in (("fetch", None), ("push", arrays)):
                    began = time.perf_counter()
                    link.ask(Ask(kind=kind, worker=0, serial=serial), sent)
                    found[f"{kind}_s"].append(time.perf_counter() - began)
            link.close()
        finally:
            process.kill()
            process.wait()
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rule", default="sgd", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.rule)
        return
    found = {}
    for name, more in CASES.items():
        found[name] = case = row(more)
        show(name, case, "mean_staleness", "seconds_to_goal")
    bytes_40m = {rule: transfers(rule) for rule in ("sgd", "adagrad")}
    print(bytes_40m)
    write(
        RESULTS / "parameter_server.json",
        {
            "command": "python -m benchmarks parameter_server",
            "steps": STEPS,
            "slow_worker": SLOW,
            "cases": found,
            "transfers_of_40_mb": bytes_40m,
        },
    )
