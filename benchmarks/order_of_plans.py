"""Are the plans that are predicted to be the fastest the fastest, on simulated devices?

    python benchmarks/order_of_plans.py --devices 8
    python benchmarks/order_of_plans.py --devices 4 --job mlp --job lstm

For each job: every mesh over data, fsdp and tensor with ZeRO stages 1 and 3 and one or two
microbatches is priced; of the plans within 20% of the best prediction, the best and others that are
spread evenly over the predictions are run, their steps interleaved in one process. The time of a
step is the least of its wall time and of its processor time over the cores (lower quartile), as
`shardlib.calibration` does it: where other work runs beside it, the second.

*Regret*: how much longer the plan that was predicted to be the fastest takes than the fastest of
those that were run. *Rank correlation*: Spearman's, over plans that differ by more than noise, the
spread of the lower half of each plan's runs. Constants were chosen on the transformer of
`hand_sharded.py`, which is not a job here.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, command_line, simulate_devices, write

DEVICES = int(sys.argv[sys.argv.index("--devices") + 1]) if "--devices" in sys.argv else 8
simulate_devices(DEVICES)

import jax

import shardlib
from benchmarks.order_candidates import candidates, judged, pins, summary
from benchmarks.order_jobs import JOBS
from shardlib.calibration import cores, measured_cpu, quiet_seconds


def run(name: str, devices: int, most: int, repeats: int) -> dict[str, Any]:
    """Plans of one job, run in turn."""
    job = JOBS[name]()
    rows: list[dict[str, Any]] = []
    programs: list[Any] = []
    tried = [{}, *({**pin, "remat": "none"} for pin in pins(devices))]
    for pin, plan in candidates(job, f"cpu:{devices}", tried, most):
        program = shardlib.compile(**job, topology=f"cpu:{devices}", pin=pin)
        batch, state = program.put(job["batch"]), program.init(0)
        state, _ = program.step(state, batch)
        programs.append([program, batch, state, [], []])
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
    """Runs the jobs and adds them to the table."""
    parser = command_line(__doc__)
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


if __name__ == "__main__":
    main()
