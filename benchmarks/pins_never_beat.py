"""Is the plan without pins ever slower than one with pins?

    python benchmarks/pins_never_beat.py [--jobs 500] [--first SEED] [--out FILE]

Pins restrict the space that is searched, so no pinned plan may be faster than the free one. Draws
random small models and machines with random pins (`tests/planner/pinned_jobs.py`) and prints how
many pinned plans were faster; each of them is in the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.environment import RESULTS, write
from tests.planner.pinned_jobs import PINS_A_MODEL, beaten


def main() -> None:
    """Draws the jobs and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=None, help="end after so many")
    parser.add_argument("--out", type=Path, default=RESULTS / "pins_never_beat.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for seed in range(args.first, args.first + -(-args.jobs // PINS_A_MODEL)):
        for row in beaten(seed):
            rows.append(row)
            if row["beaten"]:
                print(row, flush=True)
        if args.seconds is not None and time.monotonic() - start > args.seconds:
            break
    compared = [row for row in rows if row["pinned_seconds"] is not None]
    worse = [row for row in compared if row["beaten"]]
    print(
        f"{len(worse)} of {len(compared)} pinned plans are faster than the free one"
        f" ({len(rows)} jobs, {len(rows) - len(compared)} of which allow no plan)"
    )
    write(
        args.out,
        {
            "benchmark": "pins_never_beat",
            "command": "python benchmarks/pins_never_beat.py",
            "jobs": len(rows),
            "compared": len(compared),
            "beaten": len(worse),
            "first_seed": args.first,
            "rows": [row for row in rows if row["pinned_seconds"] is not None],
        },
    )


if __name__ == "__main__":
    main()
