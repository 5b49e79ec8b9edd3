"""Does every model of the zoo compute the same numbers under every mesh of up to eight devices?

    python benchmarks/parity.py

The complete product: every case of the zoo x every {data, fsdp, tensor} mesh of 1, 2, 4 and 8
devices x ZeRO 1 to 3 where there is fsdp x sequence parallelism on and off where there is tensor.
Each run compares loss and gradients with the unsharded program on one device; the allowed error is
1e-5 of the largest element of each array (see `tests/zoo/parity.py`). A mesh that a model cannot
use must be refused with a `PinError` or an `InfeasibleError`, and is counted as refused.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, simulate_devices, write

simulate_devices(8)
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0"  # thousands of compilations, each of which runs once
)

import jax

from shardlib.errors import InfeasibleError, PinError
from tests.zoo import CASES, Case
from tests.zoo.parity import FLOOR, TOLERANCE, errors, run_sharded


def pins(
    devices: tuple[int, ...], zeros: tuple[int, ...], sequences: tuple[bool, ...] = (False, True)
) -> Iterator[dict[str, Any]]:
    """Every mesh with every setting that means something on it."""
    for data, fsdp, tensor in itertools.product((1, 2, 4, 8), repeat=3):
        if data * fsdp * tensor in devices:
            for zero in zeros if fsdp > 1 else (0,):
                for sequence in sequences if tensor > 1 else (False,):
                    yield {
                        "mesh": {"data": data, "fsdp": fsdp, "tensor": tensor},
                        "zero": zero,
                        "sequence_parallel": sequence,
                    }


def label(pin: dict[str, Any]) -> str:
    """The pin in a few characters."""
    mesh = "-".join(f"{axis}{size}" for axis, size in pin["mesh"].items() if size > 1) or "one"
    return f"{mesh}{' zero' + str(pin['zero']) if pin['zero'] else ''}{' sp' if pin['sequence_parallel'] else ''}"


def measure(case: Case, pin: dict[str, Any]) -> dict[str, Any]:
    """The worst error of one run as a multiple of what is allowed, or the refusal."""
    mesh = pin["mesh"]
    try:
        sharded = run_sharded(
            case, pin, devices=mesh["data"] * mesh["fsdp"] * mesh["tensor"], place=True
        )
    except (PinError, InfeasibleError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except Exception as error:  # the table shows every failure, not the first
        return {"failed": f"{type(error).__name__}: {error}"[:1000]}
    found = errors(sharded.loss, sharded.gradients, case.reference(0))
    where = max(found, key=lambda path: found[path])
    return {"error": found[where], "relative_error": found[where] * TOLERANCE, "where": where}


def main() -> int:
    """Runs the product and writes the table; 1 when some number is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", help="part of a case's name; all cases when left out"
    )
    parser.add_argument(
        "--devices",
        type=int,
        action="append",
        choices=(1, 2, 4, 8),
        help="sizes of meshes; all when left out",
    )
    parser.add_argument(
        "--zero",
        type=int,
        action="append",
        choices=(1, 2, 3),
        help="ZeRO stages; all when left out",
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="leave sequence parallelism off"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "parity.json")
    args = parser.parse_args()
    cases = [
        case for case in CASES if not args.case or any(part in case.name for part in args.case)
    ]
    table: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    for case in cases:
        rows = table[case.name] = {}
        for pin in pins(
            tuple(args.devices or (1, 2, 4, 8)),
            tuple(args.zero or (1, 2, 3)),
            (False,) if args.no_sequence_parallel else (False, True),
        ):
            row = rows[label(pin)] = measure(case, pin)
            if row.get("error", 0) > 1 or "failed" in row:
                print(f"WRONG {case.name} {label(pin)}: {row}", flush=True)
        jax.clear_caches()
        print(f"{case.name:32s} {_line(rows)}  {time.perf_counter() - start:.0f} s", flush=True)
        save(args.out, table)
    return int(save(args.out, table) > 0)


def save(path: Path, table: dict[str, dict[str, Any]]) -> int:
    """Writes what there is so far; returns the number of wrong runs."""
    runs = [row for rows in table.values() for row in rows.values()]
    wrong = sum(row.get("error", 0) > 1 or "failed" in row for row in runs)
    worst = max((row["relative_error"] for row in runs if "error" in row), default=0.0)
    write(
        path,
        {
            "benchmark": "parity",
            "tolerance": TOLERANCE,
            "floor": FLOOR,
            "runs": len(runs),
            "wrong": wrong,
            "refused": sum("refused" in row for row in runs),
            "worst_relative_error": worst,
            "cases": table,
        },
    )
    print(f"worst relative error {worst:.2e} in {len(runs)} runs, {wrong} wrong")
    return wrong


def _line(rows: dict[str, Any]) -> str:
    worst = max(
        (row["relative_error"] for row in rows.values() if "error" in row), default=float("nan")
    )
    return (
        f"{len(rows):3d} meshes, {sum('refused' in row for row in rows.values()):2d} refused, worst"
        f" {worst:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
