"""Plans and programs beside those that were stored.

    python -m benchmarks replay [plans] [programs] [--only WORD ...] [--write]

Plans of hundreds of jobs (`tests/replay/jobs.py`: digest, price, bytes, mesh, findings) and
collectives and memory of lowered programs (`tests/replay/programs.py`) are made again and compared
with the stored tables, `tests/replay/plans.json` and `tests/replay/programs.json`, which have a
part for every version of JAX. Exit code 1 where something differs; `--write` stores what was found.
`--only` makes those rows again that have one of some words in their names, or a mesh axis of that
name and more than one device in what was stored; the others stay.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import command_line, stored
from tests.conftest import keep_figures  # simulates the devices of the tests

keep_figures()

from tests.replay.plans import differences, versions


def replayed(what: str, only: Sequence[str] = (), *, write: bool) -> int:
    """Makes a table, or those rows that `only` names, again; returns how many rows differ."""
    table = importlib.import_module(f"tests.replay.{what}")
    path: Path = table.STORED
    kept = stored(path)
    before, after, differing, begin = kept.get(versions(), {}), {}, 0, time.perf_counter()
    jobs = tuple(
        job
        for job in table.everything()
        if not only
        or any(
            word in job.name or word in before.get(job.name, {}).get("mesh", ()) for word in only
        )
    )
    for job, row in table.rows(jobs):
        after[job.name] = row
        changed = differences(before[job.name], row) if job.name in before else ["is new"]
        differing += bool(changed)
        for line in changed:
            print(f"{job.name}: {line}", flush=True)
        if write:
            path.write_text(
                json.dumps({**kept, versions(): {**before, **after}}, indent=0, sort_keys=True)
                + "\n"
            )
    if write and not only:
        path.write_text(json.dumps({**kept, versions(): after}, indent=0, sort_keys=True) + "\n")
    print(
        f"{what}: {len(after)} made again in {time.perf_counter() - begin:.0f} s, {differing}"
        f" differ from what was stored for {versions()}"
    )
    return differing


def main() -> int:
    parser = command_line(__doc__)
    tables = ("plans", "programs")
    parser.add_argument("what", nargs="*", metavar="plans|programs", help="[both]")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="rows by their names")
    parser.add_argument("--write", action="store_true", help="store what is found")
    options = parser.parse_args()
    if unknown := set(options.what) - set(tables):
        parser.error(f"{', '.join(sorted(unknown))}: neither of {' and '.join(tables)}")
    return int(
        sum(replayed(what, options.only, write=options.write) for what in options.what or tables)
        > 0
    )


if __name__ == "__main__":
    sys.exit(main())
