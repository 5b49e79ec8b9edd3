"""Predictions of published training runs, of sources that nothing was fitted to.

    python -m benchmarks published_unseen FILE.yaml... --out

Leave one source out: for every source of the files the figures of chips under frameworks are fitted
anew to all rows of the other sources, and the source's own rows are priced with those. Beside it
stands the error of the same rows under the figures that come with shardlib. Every row is traced once and kept
as arrays (`benchmarks/published/unseen/tallies.py`), so that a price under other figures takes a
millisecond and a fit seconds.

What is left out are the fitted constants. Facts of framework profiles - what hides behind what, what
is saved, which dtypes - are taken from their sources; memory depends on them alone, and no constant
of it is fitted.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import command_line, show, write
from benchmarks.published.summary import Result, summary
from benchmarks.published.unseen.levels import (
    MOST,
    SOURCED,
    Fit,
    by_level,
    figures_of,
    fitted,
    spread,
)
from benchmarks.published.unseen.runs import Run, runs_of
from shardlib import frameworks
from shardlib.cost.roofline import curves

#: How constants are fitted: level by level, or for each pair of chip and framework alone.
METHODS: tuple[str, ...] = ("levels", "pairs")


def pairs(runs: list[Run], wanted: set[str]) -> dict[str, Fit]:
    """The fit of every wanted pair to its own runs alone, from the chip's sourced figures."""
    timed = [run for run in runs if run.sample.measured_s]
    return {
        name: fitted(spread([run for run in timed if run.group == name], MOST), SOURCED)
        for name in wanted
    }


def priced(runs: list[Run], others: list[Run], method: str) -> list[Result]:
    """Some runs priced with figures that are fitted to others."""
    wanted = {run.group for run in runs}
    if method == "levels":
        fits = {name: steps[-1] for name, steps in by_level(others, wanted).items()}
    else:
        fits = pairs(others, wanted)
    return [run.beside(figures_of(fits[run.group].level, run)) for run in runs]


def unseen(runs: list[Run], sources: list[str], method: str) -> dict[str, list[Result]]:
    """For every source its rows, priced with figures that are fitted to all other sources."""
    found: dict[str, list[Result]] = {}
    for source in sources:
        started = time.perf_counter()
        own = [run for run in runs if run.sample.source == source]
        others = [run for run in runs if run.sample.source != source]
        found[source] = priced(own, others, method)
        seconds = time.perf_counter() - started
        show(source, {**summary(found[source]), "seconds": seconds})
    return found


def shipped(runs: list[Run]) -> dict[str, list[Result]]:
    """All rows by source under the figures that come with shardlib."""
    known = {**curves(), **frameworks.curves()}
    found: dict[str, list[Result]] = {}
    for run in runs:
        one = known.get((run.chip, run.stack))
        values = {**run.start, **run.fixed, **(dict(one.values) if one else {})}
        (seconds,) = run.priced.many([values])
        result = replace(run.result, predicted_s=float(seconds))
        found.setdefault(run.sample.source, []).append(result)
    return found


def figures(found: dict[str, list[Result]]) -> dict[str, Any]:
    """Pooled figures, and those of every source."""
    return {
        "pooled": summary([result for results in found.values() for result in results]),
        "by_source": {source: summary(results) for source, results in sorted(found.items())},
    }


def main() -> int:
    parser = command_line(__doc__, "published_unseen.json", optional=True)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--source", action="append", help="this source alone; may be repeated")
    parser.add_argument("--method", choices=METHODS, default="levels")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "published_runs",
        help="folder with the runs that were read before, a file for each source; remove it when"
        " shardlib or the files change",
    )
    parser.add_argument("--shipped", action="store_true", help="leave nothing out")
    args = parser.parse_args()
    runs, left_out = runs_of(args.files, args.keep)
    sources = args.source or sorted({run.sample.source for run in runs})
    result = {"shipped": figures(shipped([r for r in runs if r.sample.source in sources]))}
    show("under the figures that come with shardlib", result["shipped"])
    if args.shipped:
        found = shipped(runs)
    else:
        found = unseen(runs, sources, args.method)
        result["unseen"] = figures(found)
        show("each source under figures fitted to all others", result["unseen"])
    if args.out:
        names = " ".join(file.name for file in args.files)
        flag = " --shipped" if args.shipped else f" --method {args.method}"
        command = f"python -m benchmarks published_unseen {names}{flag} --out {args.out.name}"
        names = ("id", "source", "predicted_s", "measured_s", "error", "memory_error", "assumed")
        priced_rows = (result.to_json() for results in found.values() for result in results)
        ran = {run.sample.id: {"chip": run.chip, "stack": run.stack} for run in runs}
        rows = [{name: row[name] for name in names} | ran[row["id"]] for row in priced_rows]
        write(
            args.out,
            {
                "command": command,
                "method": "none" if args.shipped else args.method,
                "summary": result,
                "left_out": left_out,
                "rows": rows,
            },
        )
    return 0
