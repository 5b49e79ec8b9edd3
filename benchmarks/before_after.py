"""Planning time and dispatch of a step, of this checkout over another one, interleaved.

    git worktree add /tmp/before COMMIT
    python -m benchmarks before_after /tmp/before [--rounds 7]

Each round runs both checkouts, one after the other, in fresh processes: three planning jobs (a
perceptron on 4 nodes, Llama 3 8B on 256 TPUs, Llama 3 405B on 16,384 GPUs), and what `program.step`
takes to return for a small model on eight simulated devices. Times are CPU seconds, of the process
for planning, and of the calling thread for a step (the median call), so that other work on the
machine and the simulated devices themselves count little; the ratio of a round is taken pair by pair.
A round that is not counted comes first: it leaves compiled bytecode behind, as an installed package
has. The first plan of a process imports what planning needs ("first plan"); the other jobs come
after it. Python's garbage is collected before every job, so that none pays for the imports of
another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import ROOT, command_line

PLANNING = """
import gc, json, time
import jax, jax.numpy as jnp, optax, shardlib
from flax import nnx
from shardlib import models

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8192, 32768, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
        self.down = nnx.Linear(32768, 8192, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs)

def loss(model, batch):
    return jnp.mean((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)

batch = {name: jax.ShapeDtypeStruct((262144, 8192), jnp.bfloat16) for name in ("x", "y")}
jobs = {"perceptron": (Model, loss, batch, "4*h100:8")}
for name, topology, rows, seq in (("llama3-8b", "v5e:16x16", 256, 4096), ("llama3-405b", "2048*h100:8", 2048, 8192)):
    config = models.load(name)
    jobs[name] = (*models.build(config), models.example_batch(config, rows, seq), topology)
found = {}
gc.collect()
start = time.process_time()
shardlib.plan(*jobs["perceptron"][:2], optax.sgd(0.1), batch, topology="h100:8")
found["first plan"] = time.process_time() - start
for name, (init, loss, batch, topology) in jobs.items():
    gc.collect()
    start = time.process_time()
    shardlib.plan(init, loss, optax.adamw(1e-4), batch, topology=topology)
    found[name] = time.process_time() - start
print(json.dumps(found))
"""
DISPATCH = """
import json, time
import jax, jax.numpy as jnp, numpy as np, optax, shardlib
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

def loss(model, batch):
    return jnp.mean((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)

batch = {name: np.ones((16, 16), np.float32) for name in ("x", "y")}
program = shardlib.compile(Model, loss, optax.adamw(1e-3), batch, topology="cpu:8", pin={"mesh": {"fsdp": 8}})
state = program.init(0)
times = []
for step in range(300):
    start = time.thread_time()
    state, metrics = program.step(state, batch)
    times.append(time.thread_time() - start)
    jax.block_until_ready((state.params, metrics))
print(json.dumps({"dispatch": sorted(times)[len(times) // 2]}))
"""


def timed(checkout: Path, code: str, bytecode: Path) -> dict[str, float]:
    """What a program prints as JSON when it runs with the package of a checkout."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__, "before_after.json")
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows: list[dict[str, dict[str, float]]] = []
    order = [("before", options.before.resolve()), ("after", ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            row: dict[str, dict[str, float]] = {}
            for name, checkout in order if number % 2 else order[::-1]:
                row[name] = {
                    **timed(checkout, PLANNING, Path(folder)),
                    **timed(checkout, DISPATCH, Path(folder)),
                }
            rows.append(row)
    rows = rows[1:]
    ratios = {
        job: statistics.median(row["after"][job] / row["before"][job] for row in rows)
        for job in rows[0]["after"]
    }
    options.out.write_text(json.dumps({"ratios": ratios, "rounds": rows}, indent=1) + "\n")
    print("  ".join(f"{job} {ratio:.3f}" for job, ratio in ratios.items()))


if __name__ == "__main__":
    main()
