"""How long does planning a 405-billion-parameter model for 16,384 GPUs take?

    python benchmarks/planning_time.py

Times, each in a fresh process: the whole command `shardlib plan llama3-405b --topology
"2048*h100:8"`, and inside another one the import, the tracing and the search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.environment import RESULTS, write

INSIDE = """
import json, sys, time
start = time.perf_counter()
import jax, optax, shardlib
from shardlib import models
imported = time.perf_counter()
model, topology, batch, seq = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = models.load(model)
init, loss = models.build(config)
plan = shardlib.plan(init, loss, optax.adamw(1e-4), models.example_batch(config, batch, seq), topology=topology)
done = time.perf_counter()
print(json.dumps({"import_seconds": imported - start, "trace_and_search_seconds": done - imported, "search_seconds": plan.search.seconds,
                  "trace_seconds": done - imported - plan.search.seconds, "gap": plan.search.gap, "mesh": dict(plan.mesh), "evaluations": plan.search.evaluations,
                  "candidates": plan.search.candidates, "step_seconds": plan.estimate.step_seconds, "mfu": plan.estimate.mfu}))
"""


def run(command: list[str]) -> tuple[float, str]:
    """Wall seconds and standard output of a command."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - start, done.stdout


def main() -> None:
    """Runs both and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--topology", default="2048*h100:8")
    parser.add_argument("--batch", type=int, default=2048, help="sequences in a batch")
    parser.add_argument("--seq", type=int, default=8192, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "planning_time.json")
    args = parser.parse_args()
    sizes = [str(args.batch), str(args.seq)]
    command = [
        sys.executable,
        "-m",
        "shardlib.cli",
        "plan",
        args.model,
        "--topology",
        args.topology,
        "--batch",
        sizes[0],
        "--seq",
        sizes[1],
        "--json",
    ]
    whole: list[float] = []
    inside: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        seconds, text = run(command)
        plan = json.loads(text)
        whole.append(seconds)
        inside.append(
            json.loads(
                run([sys.executable, "-c", INSIDE, args.model, args.topology, *sizes])[
                    1
                ].splitlines()[-1]
            )
        )
    medians = {
        key: statistics.median(row[key] for row in inside)
        for key in inside[0]
        if key.endswith("_seconds") and key != "step_seconds"
    }
    write(
        args.out,
        {
            "benchmark": "planning_time",
            "model": args.model,
            "topology": args.topology,
            "batch": args.batch,
            "seq": args.seq,
            "command_seconds": statistics.median(whole),
            "command_seconds_all": whole,
            **medians,
            "runs": inside,
            "mesh": plan["mesh"],
        },
    )
    print(
        f"whole command {statistics.median(whole):.2f} s, tracing {medians['trace_seconds']:.2f} s,"
        f" search {medians['search_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main()
