"""Memory and schedule of two published TPU jobs, as the TPU compiler makes them.

    python -m benchmarks published_jobs [llama2-70b llama2-7b llama2-7b-by-hand]

Llama 2 70B on 128 chips (v5p:4x4x8, four stages of 32-way FSDP, nothing else pinned) and Llama 2 7B
on 256 (v5e:16x16, FSDP), planned, lowered, and compiled ahead of time with no chip there; and the
7B step in plain JAX, sharded by hand (`benchmarks/hand_llama.py`). For each: bytes of a device,
collectives by kind, in the text and executed in a step, those that the device waits for
("waited") and those that run beside kernels ("overlapped"), and the cycles that the compiler
estimates for its own kernels of a step; it estimates none for the attention kernel, which is the
same in both. Beside them stand the step and the MFU that the plan promises. Results of earlier runs with the same version of JAX are kept for jobs not named.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from jax.sharding import AbstractMesh, AxisType

import shardlib
from benchmarks.compiling import inputs
from benchmarks.environment import command_line, show, source_digest, stored, table, write
from benchmarks.hand_llama import AXIS, HandLlama
from benchmarks.hlo_collectives import by_overlap
from shardlib import models
from shardlib.annotation.model import no_mesh
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import read_and_trace
from shardlib.verification.isolation import ExportedStep, Failure, Limits, compile_apart, target
from shardlib.verification.verify import export_step

JOBS: dict[str, dict[str, Any]] = table("published_jobs")
#: What of a plan is stored.
DECISIONS = ("zero", "remat", "microbatches", "schedule", "virtual_stages", "gather", "attention")
#: Ending of the name of a job that is to be done by hand.
BY_HAND = "-by-hand"


def prepared(name: str) -> tuple[shardlib.Plan, ExportedStep]:
    """The plan of a job, and its step, not compiled."""
    job = JOBS[name.removesuffix(BY_HAND)]
    config = models.load(job["model"])
    assert isinstance(config, models.TransformerConfig)
    given = inputs(config, job["batch"], job["seq"])
    plan = shardlib.plan(**given, topology=job["topology"], pin=job["pin"])
    if name.endswith(BY_HAND):
        mesh = AbstractMesh((plan.mesh.devices,), (AXIS,), axis_types=(AxisType.Auto,))
        return plan, HandLlama(config=config, mesh=mesh).exported(
            given["optimizer"], given["batch"]
        )
    with no_mesh():
        traced = read_and_trace(**given, batch_axes=None)
        return plan, export_step(lower(traced, plan, abstract=True), "tpu")


def measured(name: str, limits: Limits, options: dict[str, str]) -> dict[str, Any]:
    """What the compiler makes of a job."""
    job = JOBS[name.removesuffix(BY_HAND)]
    plan, step = prepared(name)
    where = target(shardlib.topology(job["topology"]), plan.mesh, plan.axis_order)
    made = compile_apart(step, where, limits, options)
    known = {
        "job": job,
        "source": source_digest("lowering", "tracing", "models", "annotation"),
        "options": options,
    }
    if isinstance(made, Failure):
        return {**known, "failed": f"{made.kind}: {made.message[:1000]}"}
    collectives, cycles = by_overlap(made.text, plan.mesh, where.positions)
    planned = (
        {}
        if name.endswith(BY_HAND)
        else {
            "decisions": {word: plan.decisions[word] for word in DECISIONS},
            "predicted_bytes": plan.estimate.device_bytes.peak,
            "predicted_seconds": plan.estimate.step_seconds,
            "predicted_mfu": plan.estimate.mfu,
        }
    )
    return {
        **known,
        **planned,
        "device_bytes": made.memory,
        "gibibytes": round(made.memory["peak"] / 2**30, 2),
        "cycles": cycles,
        "kernel_seconds": cycles / where.cycles_per_s,
        "collectives": collectives,
        "compile_seconds": made.seconds,
        "versions": made.versions,
    }


def main() -> None:
    parser = command_line(__doc__, "published_jobs_jax-*.json")
    names = [*JOBS, f"llama2-7b{BY_HAND}"]
    parser.add_argument("jobs", nargs="*", choices=[*names, []])
    parser.add_argument("--options", type=json.loads, default={}, help="of the compiler, as JSON")
    parser.add_argument("--seconds", type=float, default=1800.0, help="that a compilation may take")
    args = parser.parse_args()
    rows = stored(args.out, "jobs")
    for name in args.jobs or names:
        rows[name] = measured(name, Limits(seconds=args.seconds), args.options)
        show(name, rows[name], "failed", "gibibytes", "cycles", "kernel_seconds", "collectives")
        command = "python -m benchmarks published_jobs"
        write(args.out, {"command": command, "jobs": rows}, quiet=True)
