"""Does the memory of a pipeline stay the same when it gets more microbatches?

    python benchmarks/pipeline_memory.py v5p:2x2x2
    python benchmarks/pipeline_memory.py h100:8

Llama 2 7B on four stages of two devices (ZeRO 3), microbatches of one sequence of 4096 tokens a
device, 8 of them against 32, compiled ahead of time by the compiler of the chip (extras
`shardlib[tpu]` and `shardlib[gpu]`), which says the peak of bytes on a device. 1F1B, zero-bubble
and interleaved pipelines must stay within 2%; GPipe, which remembers all microbatches, is there for
comparison. The batch itself, 32 KiB a sequence, is among the arguments, and is counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, source_digest, write
from shardlib import models
from shardlib.verification.isolation import Limits

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


def compiled(
    topology: str, schedule: str, virtual: int, remat: str, microbatches: int, seconds: float
) -> dict[str, Any]:
    """Bytes on a device and compile time of one program."""
    config = models.load("llama2-7b")
    init, loss = models.build(config)
    pin = {
        "mesh": {"stage": 4, "fsdp": 2},
        "zero": 3,
        "gather": "use",
        "schedule": schedule,
        "virtual_stages": virtual,
        "remat": remat,
        "microbatches": microbatches,
    }
    given = {
        "init": init,
        "loss": loss,
        "optimizer": optax.adamw(3e-4),
        "batch": models.example_batch(config, 2 * microbatches, 4096),
        "name": config.name,
    }
    plan = shardlib.plan(**given, topology=topology, pin=pin)
    found = shardlib.verify(**given, topology=topology, plan=plan, limits=Limits(seconds=seconds))
    if found.compiled is None:
        return {"failed": str(found.findings[0])[:1000]}
    predicted, made = plan.estimate.device_bytes, found.compiled.device_bytes
    return {
        "predicted_peak": predicted.peak,
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
        str(count): compiled(topology, schedule, virtual, remat, count, seconds)
        for count in (FEW, MANY)
    }
    if any("failed" in row for row in rows.values()):
        return {"microbatches": rows, "failed": True}
    return {"microbatches": rows, "growth": rows[str(MANY)]["peak"] / rows[str(FEW)]["peak"] - 1}


def main() -> int:
    """Compiles every schedule and writes the table; 1 when the memory of a schedule that should
    stay the same grows.
    """
    parser = command_line(__doc__)
    parser.add_argument("topology", help="a machine of eight devices: v5p:2x2x2, h100:8")
    parser.add_argument("--only", help="a schedule; all when left out")
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="time that the compiler may take for a program"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_memory.json")
    args = parser.parse_args()
    tables: dict[str, dict[str, Any]] = (
        json.loads(args.out.read_text())["topologies"] if args.out.exists() else {}
    )
    table = tables.setdefault(args.topology, {})
    source, grew = source_digest("lowering", "tracing", "models", "annotation", "schedules"), False
    for schedule, virtual, remat in SCHEDULES:
        if args.only in (None, schedule):
            row = table[f"{schedule} {remat}"] = {
                **measure(args.topology, schedule, virtual, remat, args.seconds),
                "source": source,
            }
            grew |= schedule != "gpipe" and not row.get("growth", 1.0) <= ALLOWED
            print(f"{args.topology} {schedule} {remat}: {row.get('growth', row)}", flush=True)
            write(
                args.out,
                {
                    "benchmark": "pipeline_memory",
                    "few": FEW,
                    "many": MANY,
                    "allowed": ALLOWED,
                    "topologies": tables,
                },
                quiet=True,
            )
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
