"""Is what the real TPU and GPU compilers communicate, and keep in memory, what was planned?

    python benchmarks/planned_collectives.py [CASES.json] [--only TEXT] [--out RESULTS.json]

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
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import shardlib
from benchmarks.environment import command_line, environment, source_digest
from benchmarks.families import FAMILIES
from shardlib.machines.topology import Topology, place
from shardlib.verification.isolation import Limits
from shardlib.verification.report import Key, counts, key_text, totals

#: What the plan may be off by before more of the same is unplanned.
SLACK = 1.02


def run(case: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """One case, compiled, and what its plan has of it."""
    start = time.monotonic()
    given = FAMILIES[case["family"]](case["batch"], case["seq"])
    try:
        found = shardlib.verify(**given, topology=case["topology"], pin=case["pin"], limits=limits)
    except shardlib.ShardlibError as error:
        return {"case": case, "failed": f"{type(error).__name__}: {error}"}
    if found.compiled is None:
        return {"case": case, "failed": str(found.findings[0])}
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
        "plan": {
            "mesh": dict(plan.mesh),
            **{name: plan.decisions[name] for name in ("zero", "remat", "microbatches")},
        },
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


def line(row: dict[str, Any]) -> str:
    """A case in one line for people."""
    case = row["case"]
    name = f"{case['family']} {case['topology']} {json.dumps(case['pin'])}"
    if "failed" in row:
        return f"{name}: failed: {row['failed'].splitlines()[0]}"
    return (
        f"{name}: planned {row['planned']:.1%}, missing {row['missing']:.1%}, slow"
        f" {row['slow'] / 2**20:.1f} MiB, memory {row['memory']:+.1%}"
    )


def stored(path: Path | None) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run by their cases, in their order."""
    if path is None or not path.exists():
        return {}
    return {_key(row["case"]): row for row in json.loads(path.read_text())["rows"]}


def _key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def main() -> None:
    """Runs the cases of a file."""
    parser = command_line(__doc__)
    parser.add_argument(
        "cases",
        type=Path,
        nargs="?",
        default=Path(__file__).parent / "planned_cases.json",
        help="a JSON list of cases",
    )
    parser.add_argument("--only", default="", help="cases whose line has this text")
    parser.add_argument("--out", type=Path, help="add the rows to this JSON")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="time that the compiler may take for a case"
    )
    args = parser.parse_args()
    limits = Limits(seconds=args.seconds, memory_bytes=24 * 2**30)
    table = stored(args.out)
    for case in json.loads(args.cases.read_text()):
        if args.only not in json.dumps(case):
            continue
        row = table[_key(case)] = run(case, limits)
        print(line(row), file=sys.stderr, flush=True)
        rows = [*table.values()]
        result = {
            **environment(),
            "benchmark": "planned_collectives",
            "rows": rows,
            "summary": summary(rows) if any("failed" not in row for row in rows) else {},
        }
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
