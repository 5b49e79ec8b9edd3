# ruff: noqa: E402  (paths and simulated devices are set before JAX is imported)
"""Are the plans that are predicted to be the fastest the fastest, on simulated devices?

    python benchmarks/order_of_plans.py --devices 8
    python benchmarks/order_of_plans.py --devices 4 --job mlp --job lstm

For each job: every mesh over data, fsdp and tensor with ZeRO stages 1 and 3 and one or two
microbatches is priced; of the plans within 20% of the best prediction, the best and others that are
spread evenly over the predictions are run, their steps interleaved in one process. The time of a
step is the least of its wall time and of its processor time over the cores (lower quartile), as
`shardlib.calibration.stopwatch` does it: where other work runs beside it, the second.

*Regret*: how much longer the plan that was predicted to be the fastest takes than the fastest of
those that were run. *Rank correlation*: Spearman's, over plans that differ by more than noise, the
spread of the lower half of each plan's runs. Constants were chosen on the transformer of
`hand_sharded.py`, which is no job here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, simulate_devices, write

DEVICES = int(sys.argv[sys.argv.index("--devices") + 1]) if "--devices" in sys.argv else 8
simulate_devices(DEVICES)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from shardlib import models
from shardlib.calibration import measured_cpu
from shardlib.calibration.stopwatch import cores, quiet_seconds
from shardlib.errors import InfeasibleError, PinError
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import Experts

#: Plans are run that are predicted to take at most so many times the fastest.
SLACK = 1.2
Tree = Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model with a loss and a batch."""

    init: Any
    loss: Callable[[Any, Any], jax.Array]
    batch: dict[str, np.ndarray]


def transformer(batch: int, seq: int, **changes: Any) -> Job:
    """A transformer of the reference models."""
    shape = {"layers": 3, "embed": 192, "heads": 6, "kv_heads": 6, "head_dim": 32, "mlp": 768}
    config = TransformerConfig(
        name="job",
        vocab_size=512,
        max_seq=seq,
        compute_dtype="float32",
        activation="gelu_tanh",
        gated=False,
        **{**shape, **changes},
    )
    init, loss = models.build(config)
    numbers = np.random.default_rng(0)
    return Job(
        init=init,
        loss=loss,
        batch={
            key: numbers.integers(0, 512, (batch, seq)).astype(np.int32)
            for key in ("inputs", "targets")
        },
    )


def _weights(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * float(np.prod(shape[:-1])) ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _batch(classes: int, *shape: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    return {
        "x": numbers.standard_normal(shape).astype(np.float32),
        "y": numbers.integers(0, classes, shape[0]).astype(np.int32),
    }


def _entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def mlp() -> Job:
    """Four wide layers on vectors."""
    shapes = {"a": (256, 1024), "b": (1024, 512), "c": (512, 1024), "d": (1024, 64)}
    axes = {"a": ("in", "mlp"), "b": ("mlp", "mid"), "c": ("mid", "wide"), "d": ("wide", "out")}

    def loss(p: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for name in "abc":
            x = jax.nn.relu(x @ p[name])
        return _entropy(x @ p["d"], batch["y"])

    return Job(
        init=shardlib.tree(lambda key: _weights(key, shapes), axes),
        loss=loss,
        batch=_batch(64, 512, 256),
    )


def convolutions() -> Job:
    """Three convolutions on small images, and a head."""
    shapes = {"a": (3, 3, 3, 32), "b": (3, 3, 32, 64), "c": (3, 3, 64, 64), "head": (64, 16)}
    axes = {
        "a": (None, None, None, "first"),
        "b": (None, None, "first", "second"),
        "c": (None, None, "second", "third"),
        "head": ("third", "out"),
    }

    def loss(p: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for name, stride in (("a", 1), ("b", 2), ("c", 2)):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x,
                    p[name],
                    (stride, stride),
                    "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
            )
        return _entropy(x.mean((1, 2)) @ p["head"], batch["y"])

    return Job(
        init=shardlib.tree(lambda key: _weights(key, shapes), axes),
        loss=loss,
        batch=_batch(16, 64, 24, 24, 3),
    )


def lstm() -> Job:
    """An LSTM over a sequence of vectors, and a head."""
    width = 256
    shapes = {"x": (128, 4 * width), "h": (width, 4 * width), "head": (width, 32)}
    axes = {"x": ("in", "gates"), "h": ("hidden", "gates"), "head": ("hidden", "out")}

    def loss(p: Tree, batch: Tree) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> Tree:
            c, h = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

        start = jnp.zeros((batch["x"].shape[0], width))
        (_, h), _ = jax.lax.scan(step, (start, start), jnp.swapaxes(batch["x"], 0, 1))
        return _entropy(h @ p["head"], batch["y"])

    return Job(
        init=shardlib.tree(lambda key: _weights(key, shapes), axes),
        loss=loss,
        batch=_batch(32, 128, 24, 128),
    )


JOBS: dict[str, Callable[[], Job]] = {
    "transformer": lambda: transformer(32, 96),
    "long": lambda: transformer(8, 256, layers=2, kv_heads=2),
    "experts": lambda: transformer(
        16, 64, layers=2, experts=Experts(count=8, per_token=2, mlp=256)
    ),
    "mlp": mlp,
    "convolutions": convolutions,
    "lstm": lstm,
}


def pins(devices: int) -> Iterator[dict[str, Any]]:
    """Every mesh over data, fsdp and tensor, with ZeRO stages and microbatches."""
    for tensor in (n for n in (1, 2, 4, 8) if devices % n == 0):
        for fsdp in (n for n in (1, 2, 4, 8) if devices // tensor % n == 0):
            mesh = {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}
            for zero in (1, 3) if fsdp > 1 else (0,):
                for micro in (1, 2):
                    yield {"mesh": mesh, "zero": zero, "microbatches": micro, "remat": "none"}


def candidates(job: Job, devices: int, most: int) -> list[tuple[dict[str, Any], shardlib.Plan]]:
    """The plans within `SLACK` of the best prediction, at most so many: the best, and others spread
    evenly over the predictions.
    """
    found: dict[str, tuple[dict[str, Any], shardlib.Plan]] = {}
    for pin in [{}, *pins(devices)]:
        try:
            plan = shardlib.plan(
                job.init,
                job.loss,
                optax.adamw(1e-3),
                job.batch,
                topology=f"cpu:{devices}",
                pin=pin,
            )
        except (PinError, InfeasibleError):
            continue
        found.setdefault(json.dumps(plan.decisions, sort_keys=True, default=str), (pin, plan))
    ordered = sorted(found.values(), key=lambda one: one[1].estimate.step_seconds)
    least = ordered[0][1].estimate.step_seconds
    near = [one for one in ordered if one[1].estimate.step_seconds <= SLACK * least]
    if len(near) <= most:
        return near
    return [near[round(i * (len(near) - 1) / (most - 1))] for i in range(most)]


def run(name: str, devices: int, most: int, repeats: int) -> dict[str, Any]:
    """Plans of one job, run in turn."""
    job = JOBS[name]()
    rows: list[dict[str, Any]] = []
    programs: list[Any] = []
    for pin, plan in candidates(job, devices, most):
        program = shardlib.compile(
            job.init,
            job.loss,
            optax.adamw(1e-3),
            job.batch,
            topology=f"cpu:{devices}",
            pin=pin,
        )
        batch, state = program.put(job.batch), program.init(0)
        state, _ = program.step(state, batch)
        programs.append([program, batch, state, [], []])
        memory = program.compiled().memory_analysis()
        rows.append(
            {
                "mesh": dict(plan.mesh),
                "zero": plan.zero,
                "microbatches": plan.microbatches,
                "predicted_s": plan.estimate.step_seconds,
                "predicted_bytes": plan.estimate.device_bytes.peak,
                "found_bytes": memory.argument_size_in_bytes
                + memory.temp_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes,
            }
        )
    for repeat in range(repeats):
        for one in programs if repeat % 2 == 0 else programs[::-1]:
            program, batch, state, walls, processor = one
            start, used = time.perf_counter(), time.process_time()
            one[2], metrics = program.step(state, batch)
            float(metrics["loss"])
            walls.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    for row, (_, _, _, walls, processor) in zip(rows, programs, strict=True):
        busy = devices >= cores()
        row["wall_s"] = min(walls)
        row["measured_s"] = quiet_seconds(walls, processor, cores=cores(), all_busy=busy)
        half = sorted(processor if busy else walls)[: (len(walls) + 1) // 2]
        row["noise"] = half[-1] / half[0] - 1
    return {"devices": devices, "load": os.getloadavg()[0], "plans": rows, **judged(rows)}


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Regret, and the rank correlation where plans differ by more than noise."""
    measured = [row["measured_s"] for row in rows]
    first = min(rows, key=lambda row: row["predicted_s"])
    noise = statistics.median(row["noise"] for row in rows)
    told = max(measured) / min(measured) - 1 > max(noise, 0.02) and len(rows) > 2
    return {
        "regret": first["measured_s"] / min(measured) - 1,
        "predicted_over_measured": first["predicted_s"] / first["measured_s"],
        "spread": max(measured) / min(measured) - 1,
        "noise": noise,
        "rank_correlation": (
            spearman([row["predicted_s"] for row in rows], measured) if told else None
        ),
    }


def spearman(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""

    def ranks(values: list[float]) -> np.ndarray:
        return np.array(
            [np.mean([v < x for v in values]) + np.mean([v <= x for v in values]) for x in values]
        )

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def main() -> None:
    """Runs the jobs and adds them to the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="simulated devices")
    parser.add_argument("--job", choices=JOBS, action="append", help="all of them when left out")
    parser.add_argument("--plans", type=int, default=8, help="plans of a job that are run at most")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each plan")
    parser.add_argument("--out", type=Path, default=RESULTS / "order_of_plans.json")
    args = parser.parse_args()
    kept = json.loads(args.out.read_text())["jobs"] if args.out.exists() else {}
    machine = measured_cpu(args.devices)
    for name in args.job or JOBS:
        row = kept[f"{name} cpu:{args.devices}"] = run(name, args.devices, args.plans, args.repeats)
        print(
            f"{name:13s} cpu:{args.devices} {len(row['plans'])} plans: regret {row['regret']:.1%},"
            f" spread {row['spread']:.1%}, noise {row['noise']:.1%}, rank correlation"
            f" {row['rank_correlation']}, predicted/measured {row['predicted_over_measured']:.2f},"
            f" load {row['load']:.1f}",
            flush=True,
        )
        jax.clear_caches()
        regrets = [one["regret"] for one in kept.values()]
        ranks = [one["rank_correlation"] for one in kept.values()]
        told = [one for one in ranks if one is not None]
        summary = {
            "median_regret": statistics.median(regrets),
            "worst_regret": max(regrets),
            "median_rank_correlation": statistics.median(told) if told else None,
        }
        write(
            args.out,
            {
                "benchmark": "order_of_plans",
                "machine": machine.to_json(),
                **summary,
                "jobs": kept,
            },
            quiet=True,
        )
    print(summary)


if __name__ == "__main__":
    main()
