"""Does the planner choose as many microbatches on one CPU device as are fastest there?

    python benchmarks/microbatches_on_cpu.py

The four-layer transformer of `pipeline_times.py` on one simulated device, with each number of
microbatches pinned and all else free, and as planned without pins. Steps alternate in one process.
Stored are predicted and measured seconds, and how much longer the free plan takes than the fastest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, simulate_devices, write
from benchmarks.pipeline_times import CONFIG, ROWS, SEQ
from benchmarks.stepping import alternate, random_tokens, stepper
from shardlib import models

simulate_devices(1)  # pipeline_times asks for eight

COUNTS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    """Plans, runs and writes the table."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each program")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"microbatches_on_cpu_jax-{jax.__version__}.json"
    )
    args = parser.parse_args()
    init, loss = models.build(CONFIG)
    pins: dict[str, dict[str, Any]] = {"free": {}, **{str(n): {"microbatches": n} for n in COUNTS}}
    plans = {
        name: shardlib.plan(
            init,
            loss,
            optax.adamw(1e-3),
            random_tokens(CONFIG, ROWS, SEQ),
            topology="cpu:1",
            pin=pin,
        )
        for name, pin in pins.items()
    }
    steps = {
        name: stepper(CONFIG, optax.adamw(1e-3), ROWS, SEQ, 1, pin) for name, pin in pins.items()
    }
    found = alternate(steps, args.repeats)
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
        print(
            f"{name:>5}: {row['microbatches']} microbatches, remat {row['remat']}, predicted"
            f" {1e3 * row['predicted_s']:.0f} ms, measured {1e3 * row['median_s']:.0f} ms"
        )
    print(f"the free plan takes {result['regret']:.1%} longer than the fastest")
    write(args.out, result)


if __name__ == "__main__":
    main()
