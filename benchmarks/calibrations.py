"""Ten calibrations of simulated devices in a row, and what the plans by each are worth.

    python -m benchmarks calibrations
    python -m benchmarks calibrations --busy 1

Each calibration (`shardlib.calibration`) prices the demonstration's training step on eight simulated devices. Its *plain* plan is the one
predicted to be the fastest; its *candidates* are the fastest plans of the first meshes within a third of it, of which `plan(refine=K)` takes
the fastest when run. All candidates are then run in turns in one process, two steps of each in a pass; every other pass chooses, the others
judge, each by the lower quartile.

*Regret*: how much longer a plan takes than the fastest candidate of any calibration, in the judging half. With `--busy N`, N other
processes compute all the time. `load` is the share of the processors that other programs used in the quietest pass of a calibration,
the busy processes included.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.environment import command_line, simulate_devices, stored, write

DEVICES = 8
simulate_devices(DEVICES)
os.environ["SHARDLIB_CACHE_DIR"] = tempfile.mkdtemp()

import optax

import shardlib
from shardlib import models
from shardlib.calibration import measured_cpu
from shardlib.frontend.timed import lower_quartile, stepping
from shardlib.frontend.verified import NEAR, one_of_each_mesh
from shardlib.models import presets
from shardlib.planner.plan import Plan
from shardlib.planner.search import PlanSource
from shardlib.processes.timing import Busy, Clock

BATCH, SEQ = 16, 128


def job() -> dict[str, Any]:
    """The demonstration."""
    config: Any = presets.load("demo")
    init, loss = models.build(config)
    batch = models.example_batch(config, BATCH, SEQ)
    return {"init": init, "loss": loss, "optimizer": optax.adamw(1e-3), "batch": batch}


def candidates(count: int) -> list[Plan]:
    """The plain plan, and plans that are run with it."""
    plan = shardlib.plan(**job(), topology=f"cpu:{DEVICES}")
    assert isinstance(plan.source, PlanSource)
    ranking = plan.source.ranked(plan.source.topology)
    first = list(itertools.islice(one_of_each_mesh(ranking), count))
    near = [entry for entry in first if entry.seconds <= NEAR * first[0].seconds]
    return [entry.build() for entry in near]


def run(calibrations: int, count: int, passes: int) -> dict[str, Any]:
    """Calibrations, the plans by each, and what they take."""
    plans: dict[str, Plan] = {}
    rows: list[dict[str, Any]] = []
    for _ in range(calibrations):
        machine = measured_cpu(DEVICES, refresh=True)
        chosen = candidates(count)
        plans |= {plan.digest: plan for plan in chosen}
        assert machine.measured is not None
        rows.append(
            {
                "load": machine.measured.load,
                "candidates": {plan.digest: plan.estimate.step_seconds for plan in chosen},
            }
        )
        print(f"{len(rows)}: {chosen[0].mesh}, load {machine.measured.load:.0%}", flush=True)
    programs = {digest: shardlib.compile(**job(), plan=plan) for digest, plan in plans.items()}
    clock = Clock(budget_s=0.0, runs=2)
    for digest, program in programs.items():
        clock.seconds(digest, lambda program=program: stepping(program, program.batch), devices=1)
    busy = Busy()
    clock.again(passes)
    others = busy.share()
    halves: list[dict[str, float]] = []
    for start in (1, 2):  # every other pass, so that both see the same load
        halves.append(
            {digest: lower_quartile(runs[start::2]) for digest, runs in clock.passes.items()}
        )
    choosing, judging = halves
    best = min(judging.values())
    for row in rows:
        names = [*row["candidates"]]
        plain, refined = names[0], min(names, key=choosing.__getitem__)
        for word, name in (("plain", plain), ("refined", refined)):
            row[word] = {
                "mesh": dict(plans[name].mesh),
                "predicted_s": row["candidates"][name],
                "measured_s": judging[name],
                "regret": judging[name] / best - 1,
                "predicted_over_measured": row["candidates"][name] / judging[name],
                "memory": plans[name].estimate.device_bytes.peak / compiled_bytes(programs[name]),
            }
    return {
        "load_of_runs": others,
        **{
            f"{word}_{figure}": [row[word][figure] for row in rows]
            for word in ("plain", "refined")
            for figure in ("regret", "predicted_over_measured", "memory")
        },
        "programs": {name: [dict(plans[name].mesh), judging[name]] for name in plans},
        "calibrations": rows,
    }


def compiled_bytes(program: Any) -> int:
    """Bytes of a device by the compiler."""
    memory = program.compiled().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def main() -> None:
    parser = command_line(__doc__, "calibrations.json")
    parser.add_argument("--calibrations", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=4, help="plans that are run at most")
    parser.add_argument("--passes", type=int, default=16, help="passes over all candidates")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute")
    args = parser.parse_args()
    kept = stored(args.out).get("runs", {})
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)
    ]
    try:
        result = run(args.calibrations, args.candidates, args.passes)
    finally:
        for process in others:
            process.kill()
    kept[f"busy {args.busy}"] = result
    for figure in (
        "plain_regret",
        "refined_regret",
        "refined_predicted_over_measured",
        "refined_memory",
    ):
        values = result[figure]
        print(
            f"{figure}: median {statistics.median(values):.3f}, {min(values):.3f} to {max(values):.3f}"
        )
    write(args.out, {"benchmark": "calibrations", "devices": DEVICES, "runs": kept})


if __name__ == "__main__":
    main()
