"""Error of the default framework profile on published runs on TPUs.

    python -m benchmarks default_profile FILE.yaml... --out

Rows of MaxText and the like on TPUs are the programs nearest to ours: XLA makes them, attention is a
fused kernel. They are priced as users' plans are, under the profile "xla" with a fused kernel of
attention, with what a row itself says of rematerialisation, products and the optimizer.

How much of the peak large matmuls reach is each generation's own, from the TPU compiler's cycles
(`benchmarks/matmul_cycles.py`). One figure is fitted to published runs: the factor, the same for all
generations, by which whole programs are slower than their matmuls alone. "vendor" is the error under
the vendor's figures, "unseen" that of every source under the factor fitted to all other sources,
"fitted" under the one fitted to all rows, which `--write` puts into
`shardlib/cost/curves/CHIP.xla.json`. More figures (memory, attention) predict
unseen sources no better. Of the collectives over tensor half is behind matmuls, as in the profile of
MaxText, which asks the compiler to take them apart; "tensor exposed" is "fitted" without, as users'
plans are priced, whose programs do not ask for it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shardlib.cost
from benchmarks.environment import RESULTS, command_line, show, write
from benchmarks.published.cases import Case
from benchmarks.published.unseen.levels import FAR
from benchmarks.published.unseen.runs import FIGURES, Default, Figures, Run, runs_of
from benchmarks.published.unseen.tallies import Tallied
from shardlib.cost.framework import XLA
from shardlib.cost.roofline import efficiency

VENDOR = "google"
CURVES = Path(shardlib.cost.__file__).parent / "curves"
#: Errors that a curve tells.
KINDS = ("vendor", "unseen", "fitted")
#: Facts that a row says of itself.
SAID = ("kept", "offloaded", "matmul_dtype", "scaling", "state_bytes")
#: Factors that are tried.
FACTORS = tuple(number / 200 for number in range(140, 201))
#: Share of collectives over tensor that the profile of MaxText hides.
HIDDEN = 0.5
#: Share of the peak of large matmuls on a chip, by its compiler.
SHARES: Mapping[str, float] = {
    chip: found["share"]
    for chip, found in json.loads((RESULTS / "matmul_cycles.json").read_text())["chips"].items()
}


def as_default(case: Case) -> Case:
    """The case under the profile that users plan with."""
    stack = case.software.stack
    facts = {name: getattr(stack, name) for name in SAID}
    own = replace(XLA, attention="fused", **facts)
    return replace(case, software=replace(case.software, stack=own))


def vendors_own(chip: str, vendor: str) -> tuple[Figures, Figures]:
    """The figures that the profile "xla" has: the vendor's."""
    base = efficiency(vendor)
    start = {name: getattr(base, name) for name in (*FIGURES, "attention_backward")}
    start["eight_bit"] = start["eight_bit"] or start["matmul"]
    return start, {}


def values(chip: str, factor: float) -> Figures:
    """The figures of a chip under a factor."""
    share = round(SHARES[chip] * factor, 4)
    return {"matmul": share, "eight_bit": share}


def fitted(runs: list[Run]) -> float:
    """The factor with the least mean over sources of the mean error; of what is beyond `FAR` a
    quarter counts.
    """

    def cost(factor: float) -> float:
        by: dict[str, list[float]] = {}
        for run in runs:
            error = abs(math.log(run.seconds(values(run.chip, factor)) / run.sample.measured_s))
            near = error if error < FAR else FAR + (error - FAR) / 4
            by.setdefault(run.sample.source, []).append(near)
        return statistics.mean(statistics.mean(own) for own in by.values())

    return min(FACTORS, key=cost)


def errors(runs: list[Run], factor: float | None) -> dict[str, float]:
    """The error of every run under a factor; None for the vendor's own figures."""
    return {
        run.sample.id: run.seconds({} if factor is None else values(run.chip, factor))
        / run.sample.measured_s
        - 1
        for run in runs
    }


def hidden(run: Run, share: float) -> Run:
    """The run with a share of its collectives over tensor hidden."""
    assert isinstance(run.priced, Tallied)
    stack = replace(run.priced.stack, tensor_overlap=share)
    return replace(run, priced=replace(run.priced, stack=stack))


def curve(chip: str, factor: float, runs: list[Run], found: dict[str, Any]) -> dict[str, Any]:
    """What comes with shardlib for a chip, as data."""
    return {
        "chip": chip,
        "stack": XLA.name,
        "values": {"matmul": values(chip, factor)["matmul"]},
        "sources": [
            f"matmul: fitted to published runs, see evidence: {SHARES[chip]}, which matmuls of"
            " layers reach by the compiler's own cycles (benchmarks/matmul_cycles.py,"
            f" benchmarks/results/matmul_cycles.json), times {factor}, one factor for all TPUs by"
            " which whole programs are slower than their matmuls alone",
            "benchmarks/default_profile.py: how it was fitted; sources never seen beside it",
        ],
        "evidence": {"rows": sorted(run.sample.id for run in runs), **found},
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


def main() -> None:
    parser = command_line(__doc__, "default_profile.json", optional=True)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()) / "default_profile_runs"
    )
    parser.add_argument("--write", action="store_true", help="write the curves")
    args = parser.parse_args()
    default = Default(VENDOR, as_default, vendors_own)
    read, refused = runs_of(args.files, args.keep, default)
    runs = [hidden(run, HIDDEN) for run in read if run.sample.measured_s]
    show("refused", refused)
    sources = sorted({run.sample.source for run in runs})
    vendor = errors(runs, None)
    unseen: dict[str, float] = {}
    by_source: dict[str, Any] = {}
    for source in sources:
        own = [run for run in runs if run.sample.source == source]
        others = [run for run in runs if run.sample.source != source]
        unseen |= (mine := errors(own, fitted(others)))
        before = {run.sample.id: vendor[run.sample.id] for run in own}
        by_source[source] = {"vendor": figures(before), "unseen": figures(mine)}
        show(source, by_source[source])
    factor = fitted(runs)
    seen = errors(runs, factor)
    exposed = errors([hidden(run, 0.0) for run in runs], factor)
    every = {"vendor": vendor, "unseen": unseen, "fitted": seen, "tensor exposed": exposed}
    for name, found in every.items():
        show(f"all rows, {name}", figures(found))
    show("factor", {"all": factor} | {chip: values(chip, factor)["matmul"] for chip in SHARES})
    if args.write:
        told = {f"median_error_{name}": round(figures(every[name])["median"], 4) for name in KINDS}
        for chip in SHARES:
            path = CURVES / f"{chip}.{XLA.name}.json"
            text = json.dumps(curve(chip, factor, runs, told), indent=1)
            path.write_text(text + "\n", encoding="utf-8")
    if args.out:
        names = " ".join(file.name for file in args.files)
        result = {
            "command": f"python -m benchmarks default_profile {names} --out {args.out.name}",
            **{name: figures(found) for name, found in every.items()},
            "by_source": by_source,
            "factor": factor,
            "compiler_shares": dict(SHARES),
            "rows": [
                {"id": name, **{kind: every[kind][name] for kind in every}} for name in vendor
            ],
        }
        write(args.out, result)
