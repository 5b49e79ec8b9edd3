"""Savings and cost of optimizer state on disk: predicted, compiled for a TPU, and in a process.

    python -m benchmarks state_on_disk [--steps 10] [--disk FOLDER] [--only compiled|run]

`compiled` needs libtpu beside JAX: all programs of a step of the model of `memory_savers.py` are
compiled for v5e:2x4, and the one that needs the most memory, with what lies beside it, is compared
with the prediction, as is the step that keeps its state on the devices. `run` trains a smaller
model on eight simulated devices, in a process of its own with the state in memory and in one with
it on disk, and compares resident memory between steps, losses and seconds of a step. Files stay in
the page cache of the machine while it has room: the rate of the disk is what a larger state would
meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import RESULTS, card, command_line, simulate_devices, stored, write

PIN = {"mesh": {"fsdp": 8}, "zero": 3, "remat": "full", "microbatches": 1}
WHERE = {"memory": {}, "disk": {"offload": ["disk"]}}


def compiled(folder: str) -> dict[str, Any]:
    """Bytes of a device, predicted and compiled for v5e:2x4."""
    from jax.experimental import topologies

    import shardlib
    from benchmarks.compiling import inputs
    from benchmarks.memory_savers import BATCH, MODEL, SEQ

    devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    found: dict[str, Any] = {"topology": "v5e:2x4", "model": MODEL.name, "batch": BATCH, "seq": SEQ}
    for where, pin in WHERE.items():
        program = shardlib.compile(
            **inputs(MODEL, BATCH, SEQ),
            topology="v5e:2x4",
            pin={**PIN, **pin},
            devices=devices,
            disk=folder,
        )
        predicted, made = program.plan.estimate.device_bytes.peak, program.memory()["peak"]
        found[where] = {
            "predicted_bytes": predicted,
            "compiled_bytes": made,
            "error": predicted / made - 1,
        }
        print(where, found[where], flush=True)
    for key in ("predicted_bytes", "compiled_bytes"):
        found[f"saved_{key}"] = found["memory"][key] - found["disk"][key]
    return found


def resident() -> int:
    """Bytes of this process in memory, but for pages of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def run(where: str, steps: int, folder: str) -> dict[str, Any]:
    """A few steps on simulated devices."""
    simulate_devices(8)
    import jax
    import optax

    import shardlib
    from benchmarks.stepping import random_tokens
    from shardlib import models

    config = card("llama-60m")
    init, loss = models.build(config)
    batch = random_tokens(config.vocab_size, 8, 32)
    program = shardlib.compile(
        init,
        loss,
        optax.adamw(3e-4),
        batch,
        topology="cpu:8",
        pin={**PIN, **WHERE[where]},
        disk=folder,
    )
    program.prepare()
    state = program.init(0)
    losses, seconds, sizes = [], [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready(state)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
        sizes.append(resident())
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    return {
        "parameters": config.parameter_count(),
        "state_bytes": own,
        "losses": losses,
        "seconds": seconds,
        "resident_bytes": sorted(sizes)[len(sizes) // 2],
        "predicted_bytes": 8 * program.plan.estimate.device_bytes.peak,
        "predicted_state_bytes": 8 * program.plan.estimate.device_bytes.optimizer,
    }


def compared(steps: int, folder: str) -> dict[str, Any]:
    """Both places, each in a process of its own."""
    found: dict[str, Any] = {}
    for where in WHERE:
        output = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks",
                "state_on_disk",
                "--child",
                where,
                "--steps",
                str(steps),
                "--disk",
                folder,
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        found[where] = json.loads(output.splitlines()[-1])
    memory, disk = found["memory"], found["disk"]
    rate = sum(sorted(disk["seconds"])[:-1]) / sum(sorted(memory["seconds"])[:-1])
    return {
        **found,
        "saved_bytes": memory["resident_bytes"] - disk["resident_bytes"],
        "predicted_saved_bytes": memory["predicted_state_bytes"] - disk["predicted_state_bytes"],
        "step_over_in_memory": rate,
        "largest_difference_of_losses": max(
            abs(one / other - 1)
            for one, other in zip(memory["losses"], disk["losses"], strict=True)
        ),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--disk", default=None)
    parser.add_argument("--only", choices=("compiled", "run"), default=None)
    parser.add_argument("--child", choices=tuple(WHERE), default=None)
    options = parser.parse_args()
    path = RESULTS / "state_on_disk.json"
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        if options.child:
            print(json.dumps(run(options.child, options.steps, folder)))
            return
        found = stored(path)
        if options.only != "run":
            found["compiled"] = compiled(folder)
        if options.only != "compiled":
            found["run"] = compared(options.steps, folder)
            print(
                {key: value for key, value in found["run"].items() if key not in WHERE}, flush=True
            )
    write(path, {key: found[key] for key in ("compiled", "run") if key in found})
