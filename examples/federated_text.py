"""Ten clients train a model of text together, and none shows its text to the others.

    pip install 'shardlib[federated]'
    python examples/federated_text.py

Each client has the modules of one package of Python's own library: `encodings` is tables, `email`
is prose about messages, so that clients are far from alike. They train in Flower's simulation, in
one process that stands for all of them in turn; the first plans for two devices, the others for
one. The model predicts each byte from the eight before it.

On a GPU, say `--gpus 1`: one process a GPU, and JAX takes memory as it needs it, not all at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sysconfig
import time
from pathlib import Path

import numpy as np

# Before JAX and Ray start: two simulated devices in every process, and no memory ahead of time.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import jax
import jax.numpy as jnp
import optax
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedProx, Result
from flwr.simulation import run_simulation

import shardlib
from shardlib.islands import federated

PACKAGES = (
    "asyncio",
    "ctypes",
    "email",
    "encodings",
    "http",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
#: Bytes of text of a client, of a row, and before a byte that is predicted.
TEXT, LENGTH, BEFORE = 65_536, 64, 8
#: Rows of a local step; widths of the model.
BATCH, EMBED, HIDDEN = 16, 16, 128
AXES = {"embed": ("vocab", "embed"), "up": (None, "mlp"), "down": ("mlp", "vocab")}


def weights(key: jax.Array) -> dict[str, jax.Array]:
    """The parameters of the model."""
    first, second, third = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(first, (256, EMBED)),
        "up": jax.random.normal(second, (BEFORE * EMBED, HIDDEN)) * (BEFORE * EMBED) ** -0.5,
        "down": jax.random.normal(third, (HIDDEN, 256)) * HIDDEN**-0.5,
    }


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Nats a byte."""
    text = batch["text"]
    count = LENGTH - BEFORE
    seen = jnp.stack([text[:, k : k + count] for k in range(BEFORE)], axis=-1)
    embedded = params["embed"][seen].reshape(*seen.shape[:2], BEFORE * EMBED)
    logits = jnp.tanh(embedded @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, BEFORE:]).mean()


def text_of(package: str) -> np.ndarray:
    """The rows of a package: [rows, LENGTH]. Not cached: what Ray copies are plain functions."""
    files = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:TEXT]
    return np.frombuffer(text[: len(text) // LENGTH * LENGTH], np.uint8).reshape(-1, LENGTH)


def rows_of(
    partition: int, partitions: int, *, alike: bool, held_out: bool
) -> dict[str, np.ndarray]:
    """Rows of a client, of one package, or drawn from all; every tenth is held out."""
    if alike:
        every = np.concatenate([text_of(package) for package in PACKAGES])
        mixed = np.random.default_rng(0).permutation(len(every))
        rows = every[mixed[partition::partitions]]
    else:
        rows = text_of(PACKAGES[partition])
    last = np.arange(len(rows)) % 10 == 9
    return {"text": rows[last if held_out else ~last].astype(np.int32)}


def devices_of(partition: int) -> str | None:
    """The first client has two simulated devices; all have what there is on an accelerator."""
    if jax.default_backend() != "cpu":
        return None
    return "cpu:2" if partition == 0 else "cpu:1"


def job_of(alike: bool, epochs: int) -> federated.Job:
    """What clients train."""
    return federated.Job(
        init=shardlib.tree(weights, AXES),
        loss=loss,
        optimizer=optax.sgd(0.5),
        batch={"text": jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)},
        rows=functools.partial(rows_of, alike=alike, held_out=False),
        validation=functools.partial(rows_of, alike=alike, held_out=True),
        topology=devices_of,
        local=federated.Local(epochs=epochs),
    )


def train(
    rounds: int, *, epochs: int = 1, mu: float = 0.0, alike: bool = False, gpus: float = 0.0
) -> tuple[list[float], shardlib.TrainState]:
    """Held-out losses by round, from before the first on, and the state at the end."""
    job, server, results = job_of(alike, epochs), ServerApp(), list[Result]()
    program = federated.program(job, devices_of(1))
    held_out = [rows_of(k, len(PACKAGES), alike=alike, held_out=True) for k in range(len(PACKAGES))]
    every = {"text": np.concatenate([rows["text"] for rows in held_out])}

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
        found = program.evaluate(federated.state(program, arrays), every)
        return MetricRecord({"loss": float(found["loss"])})

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedProx(
            proximal_mu=mu,
            fraction_evaluate=0.0,
            min_available_nodes=len(PACKAGES),
            train_metrics_aggr_fn=federated.metrics,
        )
        first = federated.record(program, program.init(seed=0))
        results.append(strategy.start(grid, first, num_rounds=rounds, evaluate_fn=evaluated))

    run_simulation(
        server_app=server,
        client_app=federated.client(job),
        num_supernodes=len(PACKAGES),
        backend_config={
            "init_args": {"num_cpus": 2, "log_to_driver": False},
            "client_resources": {"num_cpus": 2 if not gpus else 1, "num_gpus": gpus},
        },
    )
    (result,) = results
    losses = [float(one["loss"]) for _, one in sorted(result.evaluate_metrics_serverapp.items())]
    return losses, federated.state(program, result.arrays)


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1, help="of each client in a round")
    parser.add_argument("--mu", type=float, default=0.0, help="weight of FedProx's term")
    parser.add_argument("--alike", action="store_true", help="text of all packages for everyone")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of a process of clients")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    began = time.monotonic()
    words = {name: getattr(asked, name) for name in ("epochs", "mu", "alike", "gpus")}
    losses, _ = train(asked.rounds, **words)
    for number, value in enumerate(losses):
        print(f"round {number:2}: {value:.3f} nats a byte held out")
    print(f"{time.monotonic() - began:.0f} s")
    if asked.out:
        asked.out.write_text(json.dumps({**words, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
