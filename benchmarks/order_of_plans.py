"""The order of predicted plans, beside their order on simulated devices.

    python -m benchmarks order_of_plans --devices 8
    python -m benchmarks order_of_plans --devices 4 --job mlp --job lstm

For each job: every mesh over data, fsdp and tensor with ZeRO stages 1 and 3 and one or two
microbatches is priced; of the plans within 20% of the best prediction, the best and others that are
spread evenly over the predictions are run, their steps interleaved in one process. The time of a
step is the least of its wall time and of its processor time over the cores (lower quartile), as
`shardlib.processes.timing` does it: where other work runs beside it, the second.

*Regret*: how much longer the plan that was predicted to be the fastest takes than the fastest of
those that were run. *Rank correlation*: Spearman's, over plans that differ by more than noise, the
spread of the lower half of each plan's runs. Constants were chosen on the transformer of
`hand_sharded.py`, which is not a job here.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.environment import alternate, command_line, show, simulate_devices, stored, write

DEVICES = int(sys.argv[sys.argv.index("--devices") + 1]) if "--devices" in sys.argv else 8
simulate_devices(DEVICES)

import jax

import shardlib
from benchmarks.order_candidates import candidates, judged, pins, summary
from benchmarks.order_jobs import JOBS
from benchmarks.stepping import stepping
from shardlib.calibration import measured_cpu
from shardlib.processes.timing import cores, quiet_seconds


def run(name: str, devices: int, most: int, repeats: int) -> dict[str, Any]:
    """Plans of one job, run in turn."""
    job = JOBS[name]()
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], float]] = {}
    tried = [{}, *({**pin, "remat": "none"} for pin in pins(devices))]
    for pin, plan in candidates(job, f"cpu:{devices}", tried, most):
        program = shardlib.compile(**job, topology=f"cpu:{devices}", pin=pin)
        steps[str(len(rows))] = stepping(program, job["batch"])
        memory = program.compiled().memory_analysis()
        assert memory is not None
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
    calls = alternate(steps, repeats)
    for row, timings in zip(rows, calls.values(), strict=True):
        walls, processor = timings.seconds, timings.processor
        busy = devices >= cores()
        row["wall_s"] = min(walls)
        row["measured_s"] = quiet_seconds(walls, processor, cores=cores(), all_busy=busy)
        half = sorted(processor if busy else walls)[: (len(walls) + 1) // 2]
        row["noise"] = half[-1] / half[0] - 1
    return {
        "devices": devices,
        "load": os.getloadavg()[0],
        "plans": rows,
        **judged(
            [row["predicted_s"] for row in rows],
            [row["measured_s"] for row in rows],
            statistics.median(row["noise"] for row in rows),
        ),
    }


def main() -> None:
    parser = command_line(__doc__, "order_of_plans.json")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices")
    parser.add_argument("--job", choices=JOBS, action="append", help="all of them when left out")
    parser.add_argument("--plans", type=int, default=8, help="plans of a job that are run at most")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each plan")
    args = parser.parse_args()
    kept = stored(args.out, "jobs")
    machine = measured_cpu(args.devices)
    for name in args.job or JOBS:
        row = kept[f"{name} cpu:{args.devices}"] = run(name, args.devices, args.plans, args.repeats)
        show(f"{name} cpu:{args.devices}", {**row, "plans": len(row["plans"])})
        jax.clear_caches()
        write(
            args.out,
            {
                "benchmark": "order_of_plans",
                "machine": machine.to_json(),
                **summary(kept.values()),
                "jobs": kept,
            },
            quiet=True,
        )
    print(summary(kept.values()))
