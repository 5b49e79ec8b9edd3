"""How well does shardlib predict training runs that others have published?

    python benchmarks/published_runs.py FILE.yaml

Every row of the file (`benchmarks/published/document.py` says what one is) is traced as the
reference transformer, planned with the published plan pinned, priced by the planner's own cost
model for its chip and software stack, and compared with what was measured. One set of constants per
chip and stack; none per row.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import RESULTS, command_line, write
from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.freely import Better, better, counts
from benchmarks.published.pricing import Bench
from benchmarks.published.summary import Result, compare, overall, summary
from shardlib.errors import ShardlibError
from shardlib.processes import child

COLUMNS: tuple[tuple[str, str], ...] = (
    ("rows", "rows"),
    ("step_time_median_error", "time"),
    ("step_time_p90_error", "p90"),
    ("step_time_signed_median", "signed"),
    ("memory_median_error", "memory"),
    ("memory_signed_median", "signed"),
    ("oom_right", "oom"),
    ("fits_right", "fits"),
    ("rank_right", "rank"),
)


def end_with_parent() -> None:
    """Has this process end with the one that started it, whatever ends that: for workers of a pool,
    as its initializer.
    """
    parent = os.getppid()
    child.ask_kernel()
    threading.Thread(
        target=_watch_parent, args=(parent,), name="shardlib-parent", daemon=True
    ).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(128 + signal.SIGKILL)


def price_all(cases: list[Case], bench: Bench) -> tuple[list[Result], dict[str, str]]:
    """Prices cases; also those that the planner refuses, with its words."""
    results: list[Result] = []
    refused: dict[str, str] = {}
    for case in cases:
        try:
            results.append(compare(case, bench.predict(case)))
        except ShardlibError as error:
            refused[case.id] = str(error)
        except (
            AssertionError,
            ValueError,
            KeyError,
            IndexError,
        ) as error:  # a fault of shardlib: said in the table, and the other rows are priced
            refused[case.id] = f"fault: {type(error).__name__}: {error}"
    return results, refused


def price_side_by_side(cases: list[Case], processes: int) -> tuple[list[Result], dict[str, str]]:
    """As `price_all`, by several processes: rows of one source, which share their models, stay
    together, and the largest sources are dealt out first.
    """
    counts = Counter(case.source for case in cases)
    shares: list[list[Case]] = [[] for _ in range(processes)]
    for source, _ in counts.most_common():
        min(shares, key=len).extend(case for case in cases if case.source == source)
    with ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    ) as pool:
        found = list(pool.map(_price_alone, shares))
    order = {case.id: number for number, case in enumerate(cases)}
    results = sorted(
        (result for some, _ in found for result in some), key=lambda result: order[result.id]
    )
    return results, {name: why for _, refused in found for name, why in refused.items()}


def _price_alone(cases: list[Case]) -> tuple[list[Result], dict[str, str]]:
    return price_all(cases, Bench())


def report(results: list[Result], left_out: dict[str, str]) -> dict[str, Any]:
    """The result as plain data: the summary, then the rows."""
    sources = sorted({result.source for result in results})
    by_source = {
        source: summary([result for result in results if result.source == source])
        for source in sources
    }
    return {
        "summary": {
            **overall(by_source, results),
            "pooled": summary(results),
            "by_source": by_source,
        },
        "left_out": left_out,
        "rows": [
            {
                "id": r.id,
                "source": r.source,
                "predicted_s": r.predicted_s,
                "measured_s": r.measured_s,
                "error": r.time_error,
                "predicted_bytes": r.predicted_bytes,
                "measured_bytes": r.measured_bytes,
                "memory_error": r.memory_error,
                "predicted_fits": r.predicted_fits,
                "measured_fits": r.measured_fits,
                "seconds": r.parts,
                "device_bytes": r.memory,
                "assumed": list(r.assumed),
            }
            for r in results
        ],
    }


def table(found: dict[str, Any]) -> str:
    """The summary for people."""

    def cell(value: Any) -> str:
        return (
            "-"
            if value is None
            else str(value)
            if isinstance(value, int)
            else f"{100 * value:.1f}%"
        )

    lines = [["source", *(head for _, head in COLUMNS)]]
    lines += [
        [source, *(cell(figures[key]) for key, _ in COLUMNS)]
        for source, figures in found["summary"]["by_source"].items()
    ]
    lines += [["mean over sources", *(cell(found["summary"][key]) for key, _ in COLUMNS)]]
    pooled = found["summary"]["pooled"]
    lines += [["all rows", *(cell(pooled[key]) for key, _ in COLUMNS)]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def left_out_text(left_out: dict[str, str]) -> str:
    """Why rows were left out, and how many of each."""
    counts = Counter(reason.splitlines()[0] for reason in left_out.values())
    return "\n".join(
        [
            f"left out: {len(left_out)} rows",
            *(f"  {count:4} {reason}" for reason, count in counts.most_common()),
        ]
    )


def free_text(found: list[Better]) -> str:
    """Where the planner would do otherwise."""
    lines = [
        f"{one.id}: published {one.published_s:.3f} s, planned {one.planned_s:.3f} s ({one.what})"
        for one in found
        if one.faster
    ]
    count, slower = (
        counts(found),
        [
            one.id + ("" if one.published_fits else " (which does not fit)")
            for one in found
            if one.slower
        ],
    )
    return "\n".join(
        [
            *lines,
            (
                f"{count['planned_faster']} of {count['rows']} plans of the planner are faster than"
                f" the published ones, {count['planned_slower']} slower"
            ),
            *(f"  slower than the published plan: {one}" for one in slower),
        ]
    )


def main() -> int:
    """Prices the rows of a file."""
    parser = command_line(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--source", action="append", help="rows of this source alone; may be repeated"
    )
    parser.add_argument("--id", action="append", help="this row alone; may be repeated")
    parser.add_argument("--limit", type=int, help="the first so many rows of every source")
    parser.add_argument(
        "--processes", type=int, default=1, help="price rows of different sources side by side"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--free",
        action="store_true",
        help=(
            "also plan each row freely, and say where and why that differs from the published plan"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        nargs="?",
        const=RESULTS / "published_runs.json",
        help="also write the result as JSON",
    )
    parser.add_argument(
        "--free-out",
        type=Path,
        nargs="?",
        const=RESULTS / "published_free.json",
        help="with --free, also write that as JSON",
    )
    args = parser.parse_args()
    started = time.perf_counter()
    document, cases, left_out = read(args.file), list[Case](), dict[str, str]()
    seen: Counter[str] = Counter()
    for row in document.rows:
        if (
            (args.source and row["source"] not in args.source)
            or (args.id and row["id"] not in args.id)
            or (args.limit and seen[row["source"]] >= args.limit)
        ):
            continue
        case = case_of(document, row)
        if isinstance(case, str):
            left_out[row["id"]] = case
        else:
            seen[row["source"]] += 1
            cases.append(case)
    bench = Bench()
    results, refused = (
        price_all(cases, bench)
        if args.processes == 1
        else price_side_by_side(cases, args.processes)
    )
    found = report(results, left_out | refused)
    free = (
        [
            one
            for case in cases
            if case.id not in refused and (one := better(bench, case)) is not None
        ]
        if args.free
        else []
    )
    found["free"] = [{**one.__dict__, "published_fits": one.published_fits} for one in free]
    found["seconds"] = time.perf_counter() - started
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            table(found),
            left_out_text(found["left_out"]),
            *([free_text(free)] if args.free else []),
            f"{found['seconds']:.0f} s",
            sep="\n",
        )
    if args.out:
        command = f"python benchmarks/published_runs.py {args.file.name} --out {args.out.name}"
        write(args.out, {"command": command, **found})
    if args.free and args.free_out:
        write(
            args.free_out,
            {
                "command": (
                    f"python benchmarks/published_runs.py {args.file.name} --free --free-out"
                ),
                "seconds": found["seconds"],
                "summary": counts(free),
                "rows": found["free"],
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
