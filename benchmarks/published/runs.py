"""All measured runs of some files as tallies, for fits that ask for their prices over and over."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.fitting import FIGURES, Sample
from benchmarks.published.machines import PRODUCTS
from benchmarks.published.pricing import Bench
from benchmarks.published.summary import Result, compare
from benchmarks.published.tallies import Priced, Tallied, tallied
from shardlib.cost.machine.efficiency import efficiency
from shardlib.cost.machine.efficiency_curves import curves
from shardlib.errors import ShardlibError
from shardlib.processes.lifetime.kin import end_with_parent

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row, to be priced under any figures.

    Attributes:
        sample: what was measured; 0 seconds where the time was not.
        chip, stack: what it ran on and under.
        start: the sourced figures of the chip, where a fit starts.
        fixed: figures of the chip that are never fitted.
        priced: its price.
        result: the row beside its prediction under the figures that come with shardlib.
    """

    sample: Sample
    chip: str
    stack: str
    start: Figures
    fixed: Figures
    priced: Priced
    result: Result

    @property
    def group(self) -> str:
        """Name of the curve that prices it."""
        return f"{self.chip}.{self.stack}"

    @property
    def vendor(self) -> str:
        """Of the chip."""
        return "google" if self.stack == "maxtext-tpu" else "nvidia"

    def seconds(self, values: Figures) -> float:
        """Predicted seconds of a step with some figures in place of the chip's."""
        return self.priced.seconds({**self.start, **self.fixed, **complete(values, self.start)})

    def many(self, settings: Sequence[Figures]) -> list[float]:
        """The same under several settings."""
        full = [{**self.start, **self.fixed, **complete(one, self.start)} for one in settings]
        if isinstance(self.priced, Tallied):
            return [float(seconds) for seconds in self.priced.many(full)]
        return [self.priced.seconds(one) for one in full]

    def beside(self, values: Figures) -> Result:
        """The row beside its prediction under some figures; memory depends on none."""
        return replace(self.result, predicted_s=self.seconds(values))


def complete(values: Figures, start: Figures) -> Figures:
    """The figures of a curve; attention backward keeps its proportion to attention forward."""
    found = dict(values)
    if "attention" in found:
        found["attention_backward"] = round(
            found["attention"] * start["attention_backward"] / start["attention"], 4
        )
    return found


def sourced(chip: str, vendor: str) -> tuple[Figures, Figures]:
    """The sourced figures of a chip, those that are fitted and the others: where it is a variant of
    a product and has no curve of its own, the product's.
    """
    product = PRODUCTS.get(chip, chip)
    known = next((name for name in (chip, product) if (name, "") in curves()), None)
    own = dict(curves()[known, ""].values) if known and not chip.startswith("v100") else {}
    base = efficiency(vendor).with_values(own)
    start = {name: getattr(base, name) for name in (*FIGURES, "attention_backward")}
    start["eight_bit"] = start["eight_bit"] or start["matmul"]
    return start, {name: value for name, value in own.items() if name not in start}


def runs_of(files: Sequence[Path], processes: int) -> tuple[list[Run], dict[str, str]]:
    """The runs of some files, and why other rows are left out; rows of one source, which share
    their models, are read by one process.
    """
    cases: list[tuple[Case, str]] = []
    left_out: dict[str, str] = {}
    for file in files:
        document = read(file)
        for row in document.rows:
            case = case_of(document, row)
            if isinstance(case, str):
                left_out[row["id"]] = case
            else:
                cases.append((case, str(row.get("split_group") or row["id"])))
    counts = Counter(case.source for case, _ in cases)
    shares: list[list[tuple[Case, str]]] = [[] for _ in range(processes)]
    for source, _ in counts.most_common():
        min(shares, key=len).extend(one for one in cases if one[0].source == source)
    with ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    ) as pool:
        found = list(pool.map(_runs, shares))
    order = {case.id: number for number, (case, _) in enumerate(cases)}
    runs = sorted((run for some, _ in found for run in some), key=lambda r: order[r.sample.id])
    return runs, left_out | {name: why for _, refused in found for name, why in refused.items()}


def _runs(cases: list[tuple[Case, str]]) -> tuple[list[Run], dict[str, str]]:
    bench, runs, refused = Bench(), list[Run](), dict[str, str]()
    for case, split in cases:
        chip = case.topology.chip
        start, fixed = sourced(chip.name, chip.vendor)
        try:
            runs.append(
                Run(
                    sample=Sample(
                        id=case.id, source=case.source, split=split, measured_s=case.step_s or 0.0
                    ),
                    chip=chip.name,
                    stack=case.software.stack.name,
                    start=start,
                    fixed=fixed,
                    priced=tallied(bench.quote(case), {**start, **fixed}),
                    result=_result(case, bench),
                )
            )
        except ShardlibError as error:
            refused[case.id] = str(error)
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            refused[case.id] = f"fault: {type(error).__name__}: {error}"
    return runs, refused


def _result(case: Case, bench: Bench) -> Result:
    """The row beside its memory; without it where none was measured."""
    if case.peak_bytes or case.out_of_memory:
        return compare(case, bench.predict(case))
    return Result(
        id=case.id,
        source=case.source,
        group=case.group,
        predicted_s=0.0,
        measured_s=case.step_s,
        predicted_bytes=0.0,
        measured_bytes=None,
        predicted_fits=True,
        measured_fits=True,
        parts={},
        memory={},
        assumed=case.assumed,
    )
