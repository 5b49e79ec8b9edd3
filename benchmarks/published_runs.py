"""Predictions of training runs that others have published.

    python -m benchmarks published_runs FILE.yaml

Every row of the file (`benchmarks/published/document.py` says what one is) is traced as the
reference transformer, planned with the published plan pinned, priced by the planner's own cost
model for its chip and software stack, and compared with what was measured. One set of constants per
chip and stack; none per row.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import RESULTS, command_line, show, write
from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.freely import Better, better, counts
from benchmarks.published.pricing import Bench
from benchmarks.published.summary import Result, compare, overall, summary
from shardlib.errors import ShardlibError
from shardlib.processes import child

#: Figures of a source that are printed.
FIGURES = (
    *("rows", "step_time_median_error", "step_time_p90_error", "step_time_signed_median"),
    *("memory_median_error", "memory_signed_median", "oom_right", "fits_right", "rank_right"),
)


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
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=child.ask_kernel
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
    figures = {"pooled": summary(results), "by_source": by_source}
    return {
        "summary": overall(by_source, results) | figures,
        "left_out": left_out,
        "rows": [result.to_json() for result in results],
    }


def print_all(found: dict[str, Any], free: list[Better]) -> None:
    """The figures of every source, the reasons why rows are left out, and where the planner would
    do otherwise.
    """
    for source, figures in found["summary"]["by_source"].items():
        show(source, figures, *FIGURES)
    show("mean over sources", found["summary"], *FIGURES)
    show("all rows", found["summary"]["pooled"], *FIGURES)
    show("left out", Counter(reason.splitlines()[0] for reason in found["left_out"].values()))
    for plan in free:
        if plan.faster or plan.slower:
            show(plan.id, {**plan.__dict__, "published_fits": plan.published_fits})
    if free:
        show("planned freely", counts(free))


def main() -> int:
    parser = command_line(__doc__, "published_runs.json", optional=True)
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
        print_all(found, free)
    if args.out:
        command = f"python -m benchmarks published_runs {args.file.name} --out {args.out.name}"
        write(args.out, {"command": command, **found})
    if args.free and args.free_out:
        write(
            args.free_out,
            {
                "command": (
                    f"python -m benchmarks published_runs {args.file.name} --free --free-out"
                ),
                "seconds": found["seconds"],
                "summary": counts(free),
                "rows": found["free"],
            },
        )
    return 0
