"""Processor seconds of a plan: what importing, tracing and searching take, by job.

    python -m benchmarks search_times [JOB ...] [--rounds 3]

Each job runs in a process of its own, once for every round, and the median is stored beside the
least and the most. *Import* is that of shardlib and the model, *trace* ends with the problem,
*search* is everything after it: preparing costs, the search, which is exact, and the plan with its
findings, or the error where nothing fits. Bytecode is written by a run that is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.environment import ROOT, command_line, write

#: Job -> model, rows, tokens of a row, topology. A perceptron has two layers.
JOBS: dict[str, tuple[str, int, int, str]] = {
    "405B on 16,384": ("llama3-405b", 2048, 8192, "2048*h100:8"),
    "DeepSeek-V3 on 2,048": ("deepseek-v3", 2048, 4096, "256*h100:8"),
    "1T mixture on 16,384": ("1t-moe", 2048, 4096, "2048*h100:8"),
    "gpt2-small on 128": ("gpt2-small", 32, 128, "16*h100:8"),
    "405B on 16": ("llama3-405b", 16, 8192, "2*h100:8"),
    "DeepSeek-V3 on 64": ("deepseek-v3", 64, 4096, "8*h100:8"),
    "1T mixture on 64": ("1t-moe", 64, 4096, "8*h100:8"),
    "perceptron on 8": ("perceptron", 16, 1, "h100:8"),
}
JOB = """
import json, sys, time
from shardlib.cli.inputs import inputs_of
from shardlib.errors import InfeasibleError
from shardlib.frontend import choice
from shardlib.frontend.model import read_and_trace
name, rows, tokens, topology = json.loads(sys.argv[1])
if name == "perceptron":
    import jax, jax.numpy as jnp, optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

    def loss(model, batch):
        return jnp.mean((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)

    batch = {name: jax.ShapeDtypeStruct((rows, 16), jnp.float32) for name in ("x", "y")}
    given = {"init": Model, "loss": loss, "optimizer": optax.adamw(1e-3), "batch": batch}
else:
    given = inputs_of(name, rows, tokens)
imported = time.process_time()
model = read_and_trace(*map(given.get, ("init", "loss", "optimizer", "batch", "batch_axes", "name")))
traced = time.process_time()
try:
    plan = choice.searched(model, topology, None)[1]
    outcome = {"mesh": str(plan.mesh), "priced": plan.search.evaluations}
except InfeasibleError:
    outcome = {"mesh": "nothing fits"}
searched = time.process_time()
print(json.dumps({"import": imported, "trace": traced - imported, "search": searched - traced, **outcome}))
"""


def main() -> None:
    parser = command_line(__doc__, "search_times_jax-*.json")
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help="by default all")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        for job in options.jobs:
            runs: list[dict[str, Any]] = []
            for _ in range(options.rounds + (not rows)):
                done = subprocess.run(
                    [sys.executable, "-c", JOB, json.dumps(JOBS[job])],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                runs.append(json.loads(done.stdout.splitlines()[-1]))
            runs = runs[-options.rounds :]
            row = {name: runs[0][name] for name in ("mesh", "priced") if name in runs[0]}
            for part in ("import", "trace", "search"):
                times = sorted(run[part] for run in runs)
                row[part] = [
                    round(statistics.median(times), 3),
                    round(times[0], 3),
                    round(times[-1], 3),
                ]
            rows[job] = row
            print(job, row, flush=True)
    write(options.out, {"benchmark": "search_times", "jobs": rows})


if __name__ == "__main__":
    main()
