"""Collectives and memory by the real TPU and GPU compilers, beside the plan.

    python -m benchmarks planned_collectives [CASES.json] [--only TEXT] [--out RESULTS.json]

A case has a `family` (`families.py`), a `topology`, `batch`, `seq` and `pin`. Its program is
compiled ahead of time, with none of the hardware there. Of the bytes of compiled collectives,

- `planned`: the part that the plan has, too, by kind and mesh axes; of what is there more often or
  larger than planned by more than 2%, only the planned bytes count;
- `missing`: planned bytes, by kind and axes, that were not compiled, as a part of all compiled;
- `slow`: bytes that nobody planned over an axis that runs over the slow network, beyond 2%;
- `memory`: predicted / compiled - 1 of the peak bytes of a device.

Rows are added to RESULTS.json in the place of those of the same cases; others that are there stay.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import shardlib
from benchmarks.compiling import compiled, decisions
from benchmarks.environment import (
    ROOT,
    command_line,
    show,
    source_digest,
    stored,
    write,
)
from benchmarks.families import FAMILIES
from shardlib.machines.topology import Topology, place
from shardlib.verification.report import Key, counts, key_text, totals

#: What the plan may be off by before more of the same is unplanned.
SLACK = 1.02


def run(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One case, compiled, and what its plan has of it."""
    start = time.monotonic()
    given = FAMILIES[case["family"]](case["batch"], case["seq"])
    found = compiled(given, case["topology"], seconds=seconds, gibibytes=24, pin=case["pin"])
    if isinstance(found, str):
        return {"case": case, "failed": found}
    return {
        "case": case,
        **compared(found, shardlib.topology(case["topology"])),
        "versions": dict(found.versions),
        "source": source_digest("lowering", "tracing", "models", "annotation"),
        "compile_seconds": found.compile_seconds,
        "wall_seconds": time.monotonic() - start,
    }


def compared(found: shardlib.Verification, topology: Topology) -> dict[str, Any]:
    """A compiled program beside its plan."""
    assert found.compiled is not None
    plan = found.plan
    planned, compiled = totals(plan.estimate.collectives), totals(found.compiled.collectives)
    often, executed = counts(plan.estimate.collectives), counts(found.compiled.collectives)
    total = sum(compiled.values())
    spans = place(plan.mesh, topology) or {}
    slow = {
        axis
        for axis, parts in spans.items()
        if topology.tiers[0].kind == "network" and any(part.tier == 0 for part in parts)
    }
    extra = {key: size - planned.get(key, 0) for key, size in compiled.items()}
    unplanned = {
        key: size for key, size in extra.items() if compiled[key] > SLACK * planned.get(key, 0)
    }
    memory = plan.estimate.device_bytes.peak, found.compiled.device_bytes["peak"]
    return {
        "planned": 1 - sum(unplanned.values()) / total if total else 1.0,
        "missing": (
            sum(max(0, size - SLACK * compiled.get(key, 0)) for key, size in planned.items())
            / total
            if total
            else 0.0
        ),
        "slow": sum(size for key, size in unplanned.items() if slow & {*key[1]}),
        "memory": memory[0] / memory[1] - 1,
        "compiled_bytes": total,
        "by_key": {
            key_text(key): {
                "planned": [often.get(key, 0), planned.get(key, 0)],
                "compiled": [executed.get(key, 0), compiled.get(key, 0)],
            }
            for key in _largest({*planned, *compiled}, planned, compiled)
        },
        "causes": _causes(found, unplanned),
        "device_bytes": {
            "predicted": plan.estimate.to_json()["device_bytes"],
            "compiled": dict(found.compiled.device_bytes),
        },
        "plan": decisions(plan),
    }


def _largest(keys: set[Key], planned: dict[Key, int], compiled: dict[Key, int]) -> list[Key]:
    return sorted(keys, key=lambda key: (-max(planned.get(key, 0), compiled.get(key, 0)), key))


def _causes(found: shardlib.Verification, unplanned: dict[Key, int]) -> list[dict[str, Any]]:
    """The largest collectives of kinds and axes with unplanned bytes."""
    assert found.compiled is not None
    mine = [one for one in found.compiled.collectives if (one.kind, one.axes) in unplanned]
    return [
        {
            "what": key_text((one.kind, one.axes)),
            "count": one.count,
            "bytes": one.bytes,
            "cause": one.cause,
        }
        for one in mine[:8]
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, float | int]:
    """The figures over all cases that compiled."""
    done = [row for row in rows if "failed" not in row]
    everything = sum(row["compiled_bytes"] for row in done)
    memory = [row["memory"] for row in done]
    return {
        "cases": len(rows),
        "failed": len(rows) - len(done),
        "planned": sum(row["planned"] * row["compiled_bytes"] for row in done) / everything,
        "planned_least": min(row["planned"] for row in done),
        "cases_with_99_percent": sum(row["planned"] >= 0.99 for row in done),
        "slow_bytes": sum(row["slow"] for row in done),
        "memory_median_error": statistics.median(map(abs, memory)),
        "memory_worst_error": max(map(abs, memory)),
        "memory_most_under": -min(memory),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "cases",
        type=Path,
        nargs="?",
        default=ROOT / "benchmarks" / "planned_cases.json",
        help="a JSON list of cases",
    )
    parser.add_argument("--only", default="", help="cases whose line has this text")
    parser.add_argument("--out", type=Path, help="add the rows to this JSON")
    parser.add_argument("--seconds", type=float, default=300.0, help="for a case")
    args = parser.parse_args()
    before = stored(args.out, "rows", []) if args.out else []
    table = {json.dumps(row["case"], sort_keys=True): row for row in before}
    for case in json.loads(args.cases.read_text()):
        if args.only not in json.dumps(case):
            continue
        row = table[json.dumps(case, sort_keys=True)] = run(case, args.seconds)
        show(json.dumps(case), row, "failed", "planned", "missing", "slow", "memory")
        rows = [*table.values()]
        figures = summary(rows) if any("failed" not in row for row in rows) else {}
        if args.out is not None:
            result = {"benchmark": "planned_collectives", "rows": rows, "summary": figures}
            write(args.out, result, quiet=True)
    show("summary", figures)
