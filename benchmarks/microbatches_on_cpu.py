"""The planned number of microbatches on one CPU device, beside the fastest.

    python -m benchmarks microbatches_on_cpu

The four-layer transformer of `pipeline_times.py` on one simulated device, with each number of
microbatches pinned and all else free, and as planned without pins. Steps alternate in one process.
Stored are predicted and measured seconds, and how much longer the free plan takes than the fastest.
"""

from __future__ import annotations

from typing import Any

import optax

import shardlib
from benchmarks.environment import alternate, command_line, show, simulate_devices, write
from benchmarks.pipeline_times import CONFIG, ROWS, SEQ
from benchmarks.stepping import random_tokens, stepper
from shardlib import models

simulate_devices(1)  # pipeline_times asks for eight

COUNTS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = command_line(__doc__, "microbatches_on_cpu_jax-*.json")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each program")
    args = parser.parse_args()
    init, loss = models.build(CONFIG)
    pins: dict[str, dict[str, Any]] = {"free": {}, **{str(n): {"microbatches": n} for n in COUNTS}}
    plans = {
        name: shardlib.plan(
            init,
            loss,
            optax.adamw(1e-3),
            random_tokens(CONFIG.vocab_size, ROWS, SEQ),
            topology="cpu:1",
            pin=pin,
        )
        for name, pin in pins.items()
    }
    steps = {
        name: stepper(CONFIG, optax.adamw(1e-3), ROWS, SEQ, 1, pin) for name, pin in pins.items()
    }
    found = {name: calls.summary() for name, calls in alternate(steps, args.repeats).items()}
    fastest = min(row["median_s"] for row in found.values())
    result = {
        "benchmark": "microbatches_on_cpu",
        "regret": found["free"]["median_s"] / fastest - 1,
        "plans": {
            name: {
                "microbatches": plan.microbatches,
                "remat": plan.remat,
                "predicted_s": plan.estimate.step_seconds,
                **found[name],
            }
            for name, plan in plans.items()
        },
    }
    for name, row in result["plans"].items():
        show(name, row)
    print(f"the free plan takes {result['regret']:.1%} longer than the fastest")
    write(args.out, result)
