"""What `shardlib.why` says of programs whose communication has a known cause.

    python -m benchmarks why_programs [cpu:8 v5e:4x2 h100:8] [--programs NAME ...] [--out FILE]

The programs of `tests/diagnosis/causes.py`: twelve usual causes, each in a forward pass and where a
gradient or a transposition makes it, and eight after public reports. What is to be said of each was
written down before: the source line of the collective with the most bytes, the two shardings that
meet there, and whether it can be avoided. Counted are the lines that are right, the shardings, the
avoidable collectives with a cure that was compiled and helps, and the others without one. Results
of programs and topologies that are not named stay as they were stored.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import command_line, stored, write
from tests.diagnosis.causes import CASES, Case, diagnose, judge

TOPOLOGIES = ("cpu:8", "v5e:4x2", "h100:8")


def measured(case: Case, topology: str) -> dict[str, Any]:
    """What a diagnosis says, and what of it is right."""
    start = time.perf_counter()
    diagnosis = diagnose(case, topology)
    judgement = judge(case, diagnosis)
    return {
        "line": judgement.line,
        "shardings": judgement.shardings,
        "cure": judgement.cure,
        "avoidable": case.avoidable and topology.partition(":")[0] not in case.local,
        "row": judgement.row,
        "cures": [cure.text for cure in diagnosis.cures],
        "bytes": round(diagnosis.communication.wire_bytes),
        "bytes_with_cures": round(diagnosis.cures[-1].bytes[1]) if diagnosis.cures else None,
        "tried": diagnosis.tried,
        "seconds": round(time.perf_counter() - start, 1),
    }


def counted(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Counts of what is right of the programs of one topology."""

    def share(values: list[bool]) -> str:
        return f"{sum(values)} of {len(values)}"

    return {
        "lines": share([row["line"] for row in rows.values()]),
        "shardings": share([row["shardings"] for row in rows.values()]),
        "cures": share([row["cure"] for row in rows.values() if row["avoidable"]]),
        "none for others": share([row["cure"] for row in rows.values() if not row["avoidable"]]),
    }


def main() -> None:
    """Diagnoses the programs, writes what is right of them, and prints the counts."""
    parser = command_line(__doc__, "why_programs_jax-*.json")
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--programs", nargs="*", default=[case.name for case in CASES])
    args = parser.parse_args()
    for topology in args.topologies:
        for case in CASES:
            if case.name in args.programs:
                row = measured(case, topology)
                print(topology, case.name, row, flush=True)
                result = stored(args.out)
                rows = {**result.get("programs", {}).get(topology, {}), case.name: row}
                ordered = {c.name: rows[c.name] for c in CASES if c.name in rows}
                programs = {**result.get("programs", {}), topology: ordered}
                counts = {name: counted(entry) for name, entry in programs.items()}
                command = "python -m benchmarks why_programs"
                write(args.out, {"command": command, "counts": counts, "programs": programs})
        print(topology, counted(stored(args.out, "programs")[topology]), file=sys.stderr)
