"""Do the layouts of a plan ever change its numbers?

    python benchmarks/layout_equality.py [--programs N] [--first SEED] [--minutes M] [--redo]

Random small programs (`random_programs.py`): matmuls of square and other weights, stored
transposed, scaled, tied, of low rank, in scans, under rematerialisation and with derivatives of
their own, einsums, attention, convolutions; on meshes of up to eight simulated devices, with every
ZeRO stage and rules in any order, for plans of CPUs and of GPUs. Loss and all gradients against JAX
on one device, in float32: at most 1e-5 of the largest element of each array. One result a version
of JAX; what is in it already is not done again as long as the code is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, simulate_devices, source_digest, write

simulate_devices(8)
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0"  # hundreds of compilations, each of which runs once
)

import jax

from benchmarks.random_programs import case, errors
from shardlib.errors import ShardlibError

PATH = RESULTS / f"layout_equality_jax-{jax.__version__}.json"
TOLERANCE = 1e-5


def main() -> int:
    """Runs what is missing; returns 1 if any program was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--programs", type=int, default=150, metavar="N", help="number of programs (default: 150)"
    )
    parser.add_argument(
        "--first", type=int, default=0, metavar="SEED", help="seed of the first one"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, metavar="M", help="begin none after that time"
    )
    parser.add_argument("--redo", action="store_true", help="forget earlier results")
    options = parser.parse_args()
    code = source_digest("lowering", "propagation", "tracing")
    known = {} if options.redo or not PATH.exists() else json.loads(PATH.read_text())
    rows = dict(known["programs"]) if known.get("code") == code else {}
    end = time.monotonic() + 60 * options.minutes
    for seed in range(options.first, options.first + options.programs):
        if str(seed) in rows:
            continue
        if time.monotonic() > end:
            break
        chosen = case(random.Random(seed).choice)
        try:
            rows[str(seed)] = asdict(chosen) | {"errors": errors(chosen)}
        except ShardlibError as error:
            rows[str(seed)] = asdict(chosen) | {"refused": str(error)}
        worst = max(rows[str(seed)].get("errors", {}).values(), default=None)
        print(
            seed,
            "refused" if worst is None else f"{worst:.1e}",
            "" if worst is None or worst <= TOLERANCE else f"WRONG {chosen}",
            flush=True,
        )
        compared = [row["errors"] for row in rows.values() if "errors" in row]
        wrong = [
            seed
            for seed, row in rows.items()
            if max(row.get("errors", {}).values(), default=0.0) > TOLERANCE
        ]
        write(
            PATH,
            {
                "code": code,
                "tolerance": TOLERANCE,
                "compared": len(compared),
                "refused": len(rows) - len(compared),
                "wrong": wrong,
                "worst": max((one for row in compared for one in row.values()), default=None),
                "programs": rows,
            },
            quiet=True,
        )
        jax.clear_caches()
    compared = sum("errors" in row for row in rows.values())
    wrong = [
        seed
        for seed, row in rows.items()
        if max(row.get("errors", {}).values(), default=0.0) > TOLERANCE
    ]
    print(f"{len(wrong)} of {compared} programs wrong, {len(rows) - compared} refused; {PATH}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
