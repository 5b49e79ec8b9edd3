"""Step time, MFU and memory on the accelerators of this machine, against predictions.

    python -m benchmarks accelerator h100:1
    python -m benchmarks accelerator h100:1 --topology-file measured.toml
    shardlib plan gpt2-small --topology measured.toml --batch 8 --seq 1024

First it measures what a large matmul and a large copy reach of the vendor's peaks. They are written
into a topology file, which plans take as any other, so that what was measured is what is priced.
Then each job is planned twice, with the figures that come with shardlib and with those of the file,
and run: the median of the steps after the first two, by the clock, each waited for. Memory is the
allocator's peak where the backend says it, and the compiler's account elsewhere.

Nothing is stored for machines that nobody has run it on.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardlib
from benchmarks.environment import command_line, write
from benchmarks.stepping import random_tokens, stepping
from shardlib import models
from shardlib.machines.topology import Topology
from shardlib.models.config import TransformerConfig

#: A job: a model, rows of a batch on each device, positions.
Job = tuple[TransformerConfig, int, int]
GPT2, LLAMA = models.PRESETS["gpt2-small"], models.PRESETS["llama3-8b"]
assert isinstance(GPT2, TransformerConfig) and isinstance(LLAMA, TransformerConfig)
JOBS: tuple[Job, ...] = (
    (GPT2, 8, 1024),
    (replace(LLAMA, name="llama3-8b, 4 layers", layers=4), 1, 2048),
)
#: Rows and columns of the matmul, and numbers of the copy: large enough for a peak.
SIDE, NUMBERS = 8192, 1 << 28


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call whose results are waited for; the first two are left out."""
    found: list[float] = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def shares(machine: Topology, side: int, numbers: int, repeats: int = 10) -> dict[str, float]:
    """What one device reaches of the peaks of its chip, in bfloat16: large matmuls, and large
    chains of element-wise operations.
    """
    chip, dtype = machine.chip, jnp.bfloat16
    a = jnp.ones((side, side), dtype)
    matmul = jax.jit(jnp.matmul)
    flops = 2 * side**3 / seconds_of(lambda: matmul(a, a), repeats)
    x = jnp.ones((numbers,), dtype)
    copy = jax.jit(lambda x: x * 2 + 1)
    moved = 2 * numbers * dtype.dtype.itemsize / seconds_of(lambda: copy(x), repeats)
    found = {
        "matmul": flops / chip.peak("bfloat16"),
        "memory": moved / chip.hbm_bytes_per_s,
    }
    return {name: round(min(share, 1.0), 4) for name, share in found.items()}


def topology_file(machine: Topology, found: dict[str, float]) -> str:
    """The machine with measured shares of its peaks, as the text of a topology file."""
    lines = [f'chip = "{machine.chip.name}"']
    for tier in machine.tiers:
        lines += ["[[tiers]]", f'name = "{tier.name}"', f'kind = "{tier.kind}"']
        lines += [f"shape = {list(tier.shape)}", f"bytes_per_s = {tier.bytes_per_s:g}"]
        lines += [f"latency_s = {tier.latency_s:g}", f"efficiency = {tier.efficiency:g}"]
        if tier.kind == "torus":
            lines.append(f"wrap = {json.dumps(list(tier.wrap))}")
    lines += ["[efficiency]", *(f"{name} = {share}" for name, share in found.items())]
    return "\n".join(lines) + "\n"


def peak_bytes(program: shardlib.Program) -> tuple[int, str]:
    """Peak bytes of the fullest device, and who says so."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(one["peak_bytes_in_use"]) for one in stats if "peak_bytes_in_use" in one]
    return (max(peaks), "allocator") if peaks else (program.memory()["peak"], "compiler")


def job_row(job: Job, machines: dict[str, Topology], repeats: int) -> dict[str, Any]:
    """A job, planned for each machine, and run under the first plan."""
    config, rows, seq = job
    init, loss = models.build(config)
    devices = next(iter(machines.values())).devices
    batch = random_tokens(config.vocab_size, rows * devices, seq)
    given = (init, loss, optax.adamw(3e-4), batch)
    plans = {which: shardlib.plan(*given, topology=machine) for which, machine in machines.items()}
    program = shardlib.compile(*given, topology=next(iter(machines.values())))
    measured, (peak, by) = seconds_of(stepping(program, batch), repeats), peak_bytes(program)
    estimate = program.plan.estimate
    return {
        "job": config.name,
        "batch": rows * devices,
        "seq": seq,
        "mesh": dict(program.plan.mesh),
        "step_seconds": measured,
        "mfu": estimate.model_flops / measured / estimate.peak_flops_per_s,
        "predicted_over_measured": {
            which: plan.estimate.step_seconds / measured for which, plan in plans.items()
        },
        "peak_bytes": peak,
        "peak_by": by,
        "predicted_peak_over_found": estimate.device_bytes.peak / peak,
    }


def run(
    spelling: str,
    jobs: Sequence[Job],
    *,
    side: int = SIDE,
    numbers: int = NUMBERS,
    repeats: int = 10,
    file: Path | None = None,
) -> dict[str, Any]:
    """All of it, for the devices here."""
    machine = shardlib.topology(spelling)
    found = shares(machine, side, numbers)
    machines = {"shipped": machine}
    if file is not None:
        file.write_text(topology_file(machine, found), encoding="utf-8")
        machines["measured"] = shardlib.topology(str(file))
    return {
        "benchmark": "accelerator",
        "topology": machine.name,
        "device": jax.devices()[0].device_kind,
        "shares": found,
        "jobs": [job_row(job, machines, repeats) for job in jobs],
    }


def main() -> None:
    parser = command_line(__doc__, "accelerator.json")
    parser.add_argument("topology", help="what the devices here are, such as h100:1")
    parser.add_argument("--topology-file", type=Path, help="where to write what was measured")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    args = parser.parse_args()
    found = run(args.topology, JOBS, repeats=args.repeats, file=args.topology_file)
    print(json.dumps(found, indent=1))
    write(args.out, found, quiet=True)
