"""How well does the profile that users plan with by default predict published runs on TPUs?

    python benchmarks/default_profile.py FILE.yaml... --out

Rows of MaxText and the like on TPUs are the programs nearest to ours: XLA makes them, attention is a
fused kernel. They are priced as users' plans are, under the profile "xla" with the vendor's figures
and a fused kernel of attention, with what a row itself says of rematerialisation, products and the
optimizer. Beside that stand the same rows under one figure that is fitted to the rows of all other
sources (leave one source out): the share of the peak of large matmuls, one for chips with matrix
units of 128 columns and one for those of 256; and under the figure that is fitted to all rows, named
as such. More figures (memory, attention, links, grouped matmuls) predict unseen sources no better.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import RESULTS, write
from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.pricing import Bench
from benchmarks.published.unseen import runs as reading
from benchmarks.published.unseen.runs import Figures, Run
from shardlib.cost.machine.efficiency import efficiency
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.errors import ShardlibError

VENDOR = "google"
#: Facts that a row says of itself.
SAID = ("kept", "offloaded", "matmul_dtype", "scaling", "state_bytes")
#: Chips with matrix units of 256 columns (jax-ml/scaling-book, tpus.md); the others have 128.
WIDE = ("v6e", "tpu7x")
#: Shares of the peak that are tried: half of what the largest matmuls reach, to all of the peak.
SHARES = tuple(number / 100 for number in range(40, 101))


def as_default(case: Case) -> Case:
    """The case under the profile that users plan with."""
    stack = case.software.stack
    facts = {name: getattr(stack, name) for name in SAID}
    own = replace(XLA, attention="fused", **facts)
    return replace(case, software=replace(case.software, stack=own))


def vendors_own(chip: str, vendor: str) -> tuple[Figures, Figures]:
    """The figures that the profile "xla" has: the vendor's."""
    base = efficiency(vendor)
    start = {name: getattr(base, name) for name in (*reading.FIGURES, "attention_backward")}
    start["eight_bit"] = start["eight_bit"] or start["matmul"]
    return start, {}


def runs_of(files: list[Path], keep: Path) -> list[Run]:
    """The runs on TPUs, those read before from `keep`."""
    keep.mkdir(parents=True, exist_ok=True)
    reading.sourced = vendors_own
    found: list[Run] = []
    for file in files:
        document = read(file)
        for source in dict.fromkeys(row["source"] for row in document.rows):
            path = keep / f"{source}.pickle"
            if not path.exists():
                bench, own = Bench(), list[Run]()
                gc.disable()  # tracing makes many objects that live as long as the bench
                for row in document.rows:
                    case = case_of(document, row) if row["source"] == source else ""
                    if isinstance(case, str) or case.topology.chip.vendor != VENDOR:
                        continue
                    try:
                        split = str(row.get("split_group") or row["id"])
                        own.append(reading._run(as_default(case), split, bench))
                    except (ShardlibError, AssertionError, ValueError, KeyError, IndexError) as why:
                        print(f"{case.id}: {why}", file=sys.stderr)
                gc.enable()
                path.write_bytes(pickle.dumps(own))
            found += pickle.loads(path.read_bytes())
    return [run for run in found if run.sample.measured_s]


def best(runs: list[Run]) -> float:
    """The share of the peak with the least mean over sources of the median error."""

    def cost(share: float) -> float:
        by: dict[str, list[float]] = {}
        for run in runs:
            error = abs(math.log(run.seconds({"matmul": share}) / run.sample.measured_s))
            by.setdefault(run.sample.source, []).append(error)
        return statistics.mean(statistics.median(own) for own in by.values())

    return min(SHARES, key=cost)


def fitted(runs: list[Run]) -> dict[bool, float]:
    """The share of the peak of wide and of narrow matrix units."""
    return {
        wide: best([run for run in runs if (run.chip in WIDE) is wide]) for wide in (True, False)
    }


def errors(runs: list[Run], shares: Mapping[bool, float] | None) -> dict[str, float]:
    """The error of every run under shares of the peak; None for the vendor's own figures."""
    return {
        run.sample.id: run.seconds({"matmul": shares[run.chip in WIDE]} if shares else {})
        / run.sample.measured_s
        - 1
        for run in runs
    }


def figures(found: Mapping[str, float]) -> dict[str, Any]:
    """Median, 90th percentile and signed median of errors."""
    sizes = sorted(map(abs, found.values()))
    return {
        "rows": len(sizes),
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "signed": statistics.median(found.values()),
    }


def line(name: str, found: Mapping[str, float]) -> str:
    one = figures(found)
    return (
        f"{name:34} rows {one['rows']:3}  time {100 * one['median']:5.1f}%  p90"
        f" {100 * one['p90']:5.1f}%  signed {100 * one['signed']:+6.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()) / "default_profile_runs"
    )
    parser.add_argument(
        "--out", type=Path, nargs="?", const=RESULTS / "default_profile.json", help="write JSON"
    )
    args = parser.parse_args()
    runs = runs_of(args.files, args.keep)
    sources = sorted({run.sample.source for run in runs})
    as_is = errors(runs, None)
    unseen: dict[str, float] = {}
    by_source: dict[str, Any] = {}
    for source in sources:
        own = [run for run in runs if run.sample.source == source]
        others = [run for run in runs if run.sample.source != source]
        unseen |= (mine := errors(own, fitted(others)))
        before = {run.sample.id: as_is[run.sample.id] for run in own}
        by_source[source] = {"as is": figures(before), "unseen": figures(mine)}
        print(line(f"{source}, as is", before))
        print(line(f"{source}, unseen", mine))
    every = fitted(runs)
    seen = errors(runs, every)
    for name, found in (("as is", as_is), ("unseen", unseen), ("fitted", seen)):
        print(line(f"all rows, {name}", found))
    print(f"share of the peak, fitted: 256 columns {every[True]}, 128 columns {every[False]}")
    if args.out:
        names = " ".join(file.name for file in args.files)
        result = {
            "command": f"python benchmarks/default_profile.py {names} --out {args.out.name}",
            "as_is": figures(as_is),
            "unseen": figures(unseen),
            "fitted": figures(seen),
            "by_source": by_source,
            "fitted_shares": {"256": every[True], "128": every[False]},
            "rows": [{"id": name, "as_is": as_is[name], "unseen": unseen[name]} for name in as_is],
        }
        write(args.out, result)


if __name__ == "__main__":
    main()
