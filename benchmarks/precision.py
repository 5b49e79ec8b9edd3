"""Training in other dtypes beside training in float32.

    python -m benchmarks precision [--steps 80] [--out results.json]

The demonstration model learns bytes of the Python standard library on four simulated devices (data
and fsdp of two, ZeRO 3), from the same parameters on the same batches: in float32; in bfloat16 with
master weights in float32; with everything in bfloat16 that can be; in float16 with a scale of the
loss; and the same with a scale that overflows again and again. What two runs in float32 with other
parameters and batches differ by is the noise.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks.environment import command_line, show, simulate_devices, write

simulate_devices(4)

import optax

import shardlib
from shardlib import models
from shardlib.data.batches import TokenDataset
from shardlib.data.open import read

BATCH, SEQ, LAST = 8, 64, 20
PIN = {"mesh": {"data": 2, "fsdp": 2}, "zero": 3, "remat": "none", "microbatches": 1}
HALF = {"param_dtype": "bfloat16", "moment_dtype": "bfloat16", "reduction_dtype": "bfloat16"}
CLIP = shardlib.Guards(clip=1.0)
SCALED = shardlib.Guards(clip=1.0, scale=2.0**15)
#: (name, dtype of the products, pins, guards, seed).
RUNS: tuple[tuple[str, str, dict[str, Any], shardlib.Guards, int], ...] = (
    ("float32", "float32", {}, CLIP, 0),
    ("float32, other seed", "float32", {}, CLIP, 1),
    ("float32, third seed", "float32", {}, CLIP, 2),
    ("bfloat16, float32 at rest", "bfloat16", {}, CLIP, 0),
    ("bfloat16, products by the plan", "float32", {"matmul_dtype": "bfloat16"}, CLIP, 0),
    ("bfloat16 throughout", "bfloat16", HALF, CLIP, 0),
    ("float16, scaled", "float16", {}, SCALED, 0),
    ("float16, overflowing", "float16", {}, replace(SCALED, scale=2.0**40, growth=4), 0),
)


def run(
    name: str,
    dtype: str,
    pin: dict[str, Any],
    guards: shardlib.Guards,
    seed: int,
    steps: int,
    dataset: TokenDataset,
) -> dict[str, Any]:
    """One run as plain data."""
    model = replace(models.load("demo"), compute_dtype=dtype)
    init, loss = models.build(model)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(2e-4, 4e-3, 10, steps, 2e-4), b2=0.95, weight_decay=0.05
    )
    program = shardlib.compile(
        init,
        loss,
        optimizer,
        models.example_batch(model, BATCH, SEQ),
        topology="cpu:4",
        pin={**PIN, **pin},
        name=model.name,
        guards=guards,
    )
    state, losses, skipped, scales = program.init(seed), list[float](), list[int](), list[float]()
    start = time.perf_counter()
    for step in range(steps):
        state, metrics = program.step(state, dataset.batch(step * BATCH, BATCH))
        losses.append(float(metrics["loss"]))
        skipped.append(int(metrics["skipped"]))
        scales.append(float(metrics.get("loss_scale", 1.0)))
    done = [loss for loss, skip in zip(losses, skipped, strict=True) if not skip]
    return {
        "name": name,
        "dtypes": dict(program.plan.dtypes),
        "compute_dtype": dtype,
        "seed": seed,
        "last": statistics.fmean(done[-LAST:]),
        "skipped": sum(skipped),
        "last_scale": scales[-1],
        "losses": losses,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = command_line(__doc__, "precision.json")
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    datasets = {seed: read(seq=SEQ, seed=seed) for seed in {run[-1] for run in RUNS}}
    print(
        f"{'':34s} {'loss':>7s} {'- float32':>10s} {'skipped':>8s} {'scale':>9s}   loss: mean of"
        f" the last {LAST} steps that were done, nats a byte"
    )
    rows: list[dict[str, Any]] = []
    for one in RUNS:
        rows.append(run(*one, steps=args.steps, dataset=datasets[one[-1]]))
        row = rows[-1]
        show(row["name"], row, "last", "skipped", "last_scale")
    exact = [row["last"] for row in rows if row["name"].startswith("float32")]
    noise = max(exact) - min(exact)
    far = {
        row["name"]: row["last"] - rows[0]["last"]
        for row in rows
        if abs(row["last"] - rows[0]["last"]) > noise
    }
    print(f"runs in float32 differ by up to {noise:.4f}; further away: {far or 'none'}")
    write(
        args.out,
        {
            "benchmark": "precision",
            "steps": args.steps,
            "batch": BATCH,
            "seq": SEQ,
            "mesh": PIN["mesh"],
            "noise": noise,
            "further_away": far,
            "rows": rows,
        },
    )
