"""Fits what chips reach under frameworks to published training runs, level by level, and writes
`shardlib/frameworks/curves/CHIP.FRAMEWORK.json`.

    python -m benchmarks fit_levels FILE.yaml... [--unseen published_unseen.json] [--write]

`benchmarks/published/unseen/levels.py` says how: figures are fitted to all frameworks on a vendor's
chips, to a framework on all chips, and to a pair, each pulled to the one above, in physical ranges,
and no level moves more figures than it has three runs for each. A file says of every figure which
level it is from and how many runs that rests on, and has the median error of the pair's runs under
the chip's sourced figures ("before"), under its own ("after"), and as rows of sources that nothing
was fitted to ("unseen", of `benchmarks/published_unseen.py --method levels`).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import RESULTS, command_line, table
from benchmarks.published.unseen.levels import SOURCED, Fit, Level, by_level, figures_of
from benchmarks.published.unseen.runs import PRODUCTS, Figures, Run, complete, runs_of
from shardlib import frameworks
from shardlib.cost.roofline import curves, vendor_efficiency

CURVES = Path(frameworks.__file__).parent / "curves"
#: Physical meaning of each figure that is fitted, for the files.
MEANING: Mapping[str, str] = table("fit_levels")
#: Levels from the widest on, as files call them.
NAMES: tuple[str, ...] = (
    "all frameworks on the vendor's chips",
    "this framework on all chips",
    "this framework on this chip",
)


def origin(name: str, steps: Sequence[Fit]) -> int | None:
    """The deepest level that moved a figure; None where none did."""
    above: Level = SOURCED
    found: int | None = None
    for number, step in enumerate(steps):
        if step.level[name] != above[name]:
            found = number
        above = step.level
    return found


def curve(runs: Sequence[Run], steps: Sequence[Fit], unseen: Mapping[str, float]) -> dict[str, Any]:
    """The file of a pair, as data, from all of its runs, the fits of its vendor, its framework and
    its own, and the errors of rows of sources that nothing was fitted to, by id.
    """
    first = runs[0]
    figures: Figures = {}
    for run in runs:
        figures |= figures_of(steps[-1].level, run)
    moved = {name: at for name in figures if (at := origin(name, steps)) is not None}
    values: Figures = {} if (first.chip, "") in curves() else missing(first)
    values |= {name: figures[name] for name in MEANING if name in moved}
    values = complete(values, first.start) if "attention" in moved else values
    timed = [run for run in runs if run.sample.measured_s]
    return {
        "chip": first.chip,
        "profile": first.stack,
        "values": values,
        "sources": [
            *(source(name, moved[name], steps) for name in MEANING if name in moved),
            *(["attention_backward: in the proportion of the chip's"] * ("attention" in moved)),
            *others(first, [name for name in values if name not in moved]),
            "benchmarks/fit_levels.py: sourced figures are where the fits start",
        ],
        "evidence": {
            "rows": list(steps[-1].ids) if 2 in moved.values() else [],
            "levels": [
                {"of": of, "rows": step.rows, "figures": list(step.fitted)}
                for of, step in zip(NAMES, steps, strict=True)
            ],
            "median_error_before": median(
                one.seconds({}) / one.sample.measured_s - 1 for one in timed
            ),
            "median_error_after": median(
                one.seconds(figures_of(steps[-1].level, one)) / one.sample.measured_s - 1
                for one in timed
            ),
            "median_error_unseen": median(
                unseen[one.sample.id] for one in timed if one.sample.id in unseen
            ),
        },
    }


def source(name: str, level: int, steps: Sequence[Fit]) -> str:
    """Where a moved figure is from."""
    if level == len(steps) - 1:
        return f"{name}: fitted to published runs, see evidence; {MEANING[name]}"
    return (
        f"{name}: pooled, fitted to {steps[level].rows} published runs of {NAMES[level]} as a part"
        f" of what chips are sourced with; {MEANING[name]}"
    )


def missing(run: Run) -> Figures:
    """Figures that a variant of a product has no curve of its own for: the product's."""
    product = PRODUCTS.get(run.chip, run.chip)
    known = curves().get((product, ""))
    return dict(known.values) if known and not run.chip.startswith("v100") else {}


def others(run: Run, names: Sequence[str]) -> list[str]:
    """Sources of figures that are not fitted."""
    like = ", ".join(sorted(set(names) & missing(run).keys())).replace(
        "eight_bit", "eight_bit (float8)"
    )
    product = PRODUCTS.get(run.chip, run.chip)
    return [f"{like}: as {product}, the product of which {run.chip} is a variant"] if like else []


def median(values: Any) -> float | None:
    """Median of absolute values, rounded; None of none."""
    sizes = [abs(value) for value in values]
    return round(statistics.median(sizes), 4) if sizes else None


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "published_runs")
    parser.add_argument("--unseen", type=Path, default=RESULTS / "published_unseen.json")
    parser.add_argument("--only", action="append", help="this framework; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the files")
    args = parser.parse_args()
    runs, _ = runs_of(args.files, args.keep)
    stored = json.loads(args.unseen.read_text(encoding="utf-8"))["rows"]
    unseen = {row["id"]: row["error"] for row in stored if row["error"] is not None}
    wanted = {run.group for run in runs} - {
        f"{chip}.{stack}"
        for (chip, stack), one in {**curves(), **frameworks.curves()}.items()
        if not one.fitted
    }
    if args.only:
        wanted = {name for name in wanted if name.split(".", 1)[1] in args.only}
    for name, steps in by_level(runs, wanted).items():
        data = curve([run for run in runs if run.group == name], steps, unseen)
        told = {key: value for key, value in data["evidence"].items() if key != "rows"}
        print(f"{name}: {data['values']} {told}", flush=True)
        vendor = "google" if data["profile"] == "maxtext-tpu" else "nvidia"
        vendor_efficiency(vendor).with_values(data["values"])  # refuses what is not usable
        if args.write:
            path = CURVES / f"{name}.json"
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
