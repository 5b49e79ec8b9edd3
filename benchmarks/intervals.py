"""How far measured steps are from predicted ones, for programs that no price had seen.

    python -m benchmarks intervals FILE.yaml... [--write] --out

Ratios of measured to predicted step time are those of `published_unseen` (each source priced with
figures that are fitted to all others) and of `default_profile` for plans of JAX. An interval holds
80% of them, each source counting alike, for a framework profile with at least eight sources, and
otherwise for all profiles on the chips of a vendor. Coverage is measured by leaving each source
out: how many of its runs lie in the interval that the others give.

Pairs are published plans of one job: how often the order that was predicted was measured, by how
far apart the two were predicted. `--write` puts the intervals into `shardlib/cost/intervals.json`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shardlib.cost
from benchmarks.environment import RESULTS, command_line, show, stored, write
from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.summary import TIE
from shardlib.cost.framework import INDISTINGUISHABLE, XLA, Interval

SHARE = 0.8
#: Sources that an interval of one profile rests on, at least.
SOURCES = 8
#: Borders of the predicted distance of two plans, as a share of the faster.
DISTANCES = (0.0, INDISTINGUISHABLE, 0.1, 0.2, 0.5)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A run whose source no price had seen.

    Attributes:
        log: logarithm of measured over predicted seconds.
        job: what competing plans share; "" without any.
    """

    source: str
    profile: str
    vendor: str
    log: float
    job: str
    predicted_s: float


def cases(files: Sequence[Path]) -> dict[str, Case]:
    """The rows of files that are priced, by name."""
    read_rows = [(document, row) for document in map(read, files) for row in document.rows]
    every = {row["id"]: case_of(document, row) for document, row in read_rows}
    return {name: case for name, case in every.items() if isinstance(case, Case)}


def residuals(known: dict[str, Case]) -> list[Residual]:
    """All runs of the stored results that price unseen sources."""

    def residual(name: str, error: float, profile: str = "", predicted_s: float = 0.0) -> Residual:
        case = known[name]
        return Residual(
            source=case.source,
            profile=profile or case.software.stack.name,
            vendor=case.topology.chip.vendor,
            log=-math.log1p(error),
            job=(case.group or "") if predicted_s else "",
            predicted_s=predicted_s,
        )

    found = [
        residual(row["id"], row["error"], predicted_s=row["predicted_s"])
        for row in stored(RESULTS / "published_unseen.json")["rows"]
        if row["error"] is not None
    ]
    for name in ("default_profile.json", "default_profile_nvidia.json"):
        rows = stored(RESULTS / name)["rows"]
        found += [residual(row["id"], row["unseen"], XLA.name) for row in rows]
    return found


def between(rows: Sequence[Residual], profile: str, vendor: str) -> Interval:
    """The interval of some runs, each source counting alike."""
    counts = Counter(row.source for row in rows)
    ordered = sorted(rows, key=lambda row: row.log)
    reached = np.cumsum([1 / counts[row.source] for row in ordered]) / len(counts)
    tail = (1 - SHARE) / 2
    low, high = (ordered[int(np.searchsorted(reached, q))].log for q in (tail, 1 - tail))
    return Interval(
        low=round(math.exp(low), 3),
        high=round(math.exp(high), 3),
        share=SHARE,
        runs=len(rows),
        sources=len(counts),
        profile=profile,
        vendor=vendor,
    )


def every_interval(rows: Sequence[Residual]) -> dict[tuple[str, str], Interval]:
    """The intervals of vendors, and those of profiles with enough sources."""
    found: dict[tuple[str, str], Interval] = {}
    for vendor in sorted({row.vendor for row in rows}):
        here = [row for row in rows if row.vendor == vendor]
        found["", vendor] = between(here, "", vendor)
        for profile in sorted({row.profile for row in here}):
            own = [row for row in here if row.profile == profile]
            if len({row.source for row in own}) >= SOURCES:
                found[profile, vendor] = between(own, profile, vendor)
    return found


def coverage(rows: Sequence[Residual]) -> dict[str, Any]:
    """The share of the runs of each source that lie in the interval of all others."""
    by_source: dict[str, list[bool]] = {}
    for source in sorted({row.source for row in rows}):
        known = every_interval([row for row in rows if row.source != source])
        for row in (row for row in rows if row.source == source):
            entry = known.get((row.profile, row.vendor)) or known["", row.vendor]
            inside = math.log(entry.low) <= row.log <= math.log(entry.high)
            by_source.setdefault(source, []).append(inside)
    return {
        "runs": float(np.mean(list(itertools.chain(*by_source.values())))),
        "sources": float(np.mean([np.mean(inside) for inside in by_source.values()])),
        "by_source": {name: [sum(inside), len(inside)] for name, inside in by_source.items()},
    }


def ordered_pairs(rows: Sequence[Residual]) -> list[dict[str, Any]]:
    """Pairs of plans of one job that were measured apart, by how far apart they were predicted."""
    jobs: dict[tuple[str, str], list[Residual]] = {}
    for row in rows:
        if row.job:
            jobs.setdefault((row.source, row.job), []).append(row)
    pairs: list[tuple[float, bool]] = []
    for plans in jobs.values():
        for one, other in itertools.combinations(plans, 2):
            predicted = math.log(one.predicted_s / other.predicted_s)
            measured = predicted + one.log - other.log
            if abs(math.expm1(measured)) > TIE:
                pairs.append((math.expm1(abs(predicted)), predicted * measured > 0))
    return [
        {"from": low, "to": high, "pairs": len(right), "right": sum(right)}
        for low, high in itertools.pairwise((*DISTANCES, math.inf))
        if (right := [flag for distance, flag in pairs if low <= distance < high])
    ]


def main() -> None:
    parser = command_line(__doc__, "intervals.json", optional=True)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write the intervals of shardlib")
    args = parser.parse_args()
    rows = residuals(cases(args.files))
    known = [entry.to_json() for entry in every_interval(rows).values()]
    covered, pairs = coverage(rows), ordered_pairs(rows)
    for entry in known:
        show(f"{entry['profile'] or 'all'} on {entry['vendor']}", entry)
    show("coverage of sources left out", covered, "runs", "sources")
    for pair in pairs:
        show("pairs", pair)
    if args.write:
        path = Path(shardlib.cost.__file__).parent / "intervals.json"
        source = "benchmarks/intervals.py: published runs priced without their sources"
        path.write_text(json.dumps({"source": source, "intervals": known}, indent=1) + "\n")
    if args.out:
        names = " ".join(file.name for file in args.files)
        command = f"python -m benchmarks intervals {names} --out {args.out.name}"
        result = {"command": command, "intervals": known, "coverage": covered, "pairs": pairs}
        write(args.out, result)
