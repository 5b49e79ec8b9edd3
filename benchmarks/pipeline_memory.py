"""Memory of a pipeline with few and with many microbatches.

    python -m benchmarks pipeline_memory v5p:2x2x2
    python -m benchmarks pipeline_memory h100:8

Llama 2 7B on four stages of two devices (ZeRO 3), microbatches of one sequence of 4096 tokens a
device, 8 of them against 32, compiled ahead of time by the compiler of the chip (extras
`shardlib[tpu]` and `shardlib[gpu]`), which says the peak of bytes on a device. 1F1B, zero-bubble
and interleaved pipelines must stay within 2%; GPipe, which remembers all microbatches, is there for
comparison. The batch itself, 32 KiB a sequence, is among the arguments, and is counted.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


import shardlib
from benchmarks.compiling import compiled, inputs
from benchmarks.environment import command_line, show, source_digest, stored, write
from shardlib import models

#: (schedule, chunks of layers on a stage, recomputation).
SCHEDULES = (
    ("1f1b", 1, "full"),
    ("interleaved", 2, "full"),
    ("zero-bubble", 1, "full"),
    ("1f1b", 1, "dots"),
    ("gpipe", 1, "full"),
)
FEW, MANY = 8, 32
ALLOWED = 0.02


def measured(
    topology: str, schedule: str, virtual: int, remat: str, microbatches: int, seconds: float
) -> dict[str, Any]:
    """Bytes on a device and compile time of one program."""
    pin = {
        "mesh": {"stage": 4, "fsdp": 2},
        "zero": 3,
        "gather": "use",
        "schedule": schedule,
        "virtual_stages": virtual,
        "remat": remat,
        "microbatches": microbatches,
    }
    given = inputs(models.load("llama2-7b"), 2 * microbatches, 4096)
    plan = shardlib.plan(**given, topology=topology, pin=pin)
    found = compiled(given, topology, seconds=seconds, plan=plan)
    if isinstance(found, str):
        return {"failed": found[:1000]}
    made = found.compiled.device_bytes
    return {
        "predicted_peak": plan.estimate.device_bytes.peak,
        "peak": made["peak"],
        "device_bytes": made,
        "compile_seconds": found.compile_seconds,
        "versions": dict(found.versions),
    }


def measure(
    topology: str, schedule: str, virtual: int, remat: str, seconds: float
) -> dict[str, Any]:
    """Few microbatches against many."""
    rows = {
        str(count): measured(topology, schedule, virtual, remat, count, seconds)
        for count in (FEW, MANY)
    }
    if any("failed" in row for row in rows.values()):
        return {"microbatches": rows, "failed": True}
    return {"microbatches": rows, "growth": rows[str(MANY)]["peak"] / rows[str(FEW)]["peak"] - 1}


def main() -> int:
    """Compiles every schedule and writes the table; 1 when the memory of a schedule that should
    stay the same grows.
    """
    parser = command_line(__doc__, "pipeline_memory.json")
    parser.add_argument("topology", help="a machine of eight devices: v5p:2x2x2, h100:8")
    parser.add_argument("--only", help="a schedule; all when left out")
    parser.add_argument("--seconds", type=float, default=900.0, help="for a program")
    args = parser.parse_args()
    tables: dict[str, dict[str, Any]] = stored(args.out, "topologies")
    table = tables.setdefault(args.topology, {})
    source, grew = source_digest("lowering", "tracing", "models", "annotation", "schedules"), False
    for schedule, virtual, remat in SCHEDULES:
        if args.only in (None, schedule):
            row = table[f"{schedule} {remat}"] = {
                **measure(args.topology, schedule, virtual, remat, args.seconds),
                "source": source,
            }
            grew |= schedule != "gpipe" and not row.get("growth", 1.0) <= ALLOWED
            show(f"{args.topology} {schedule} {remat}", row, "growth", "failed")
            sizes = {"few": FEW, "many": MANY, "allowed": ALLOWED}
            result = {"benchmark": "pipeline_memory", **sizes, "topologies": tables}
            write(args.out, result, quiet=True)
    return int(grew)
