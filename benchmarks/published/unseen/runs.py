"""All measured runs of some files as tallies, for fits that ask for their prices over and over."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import Document, Entry, read
from benchmarks.published.machines import PRODUCTS
from benchmarks.published.pricing import Bench
from benchmarks.published.software import memory_of
from benchmarks.published.summary import Result
from benchmarks.published.unseen.tallies import tallied
from shardlib.cost.roofline import curves, vendor_efficiency
from shardlib.errors import ShardlibError
from shardlib.planner.assembly import price

#: Figures of a chip that are fitted.
FIGURES: tuple[str, ...] = (
    "matmul",
    "eight_bit",
    "unfused",
    "memory",
    "attention",
    "microbatch_s",
    "dispatch_s",
    "gap_s",
    "fast",
    "slow",
    "misaligned",
    "grouped",
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a group.

    Attributes:
        id, source, split: of the row; runs of one `split` are alike.
        measured_s: seconds of a step.
    """

    id: str
    source: str
    split: str
    measured_s: float


Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row, to be priced under any figures.

    Attributes:
        sample: what was measured; 0 seconds where the time was not.
        chip, stack: what it ran on and under.
        start: the sourced figures of the chip, where a fit starts.
        fixed: figures of the chip that are never fitted.
        priced: its price under figures, a `Tallied`.
        result: the row beside its prediction under the figures that come with shardlib.
    """

    sample: Sample
    chip: str
    stack: str
    start: Figures
    fixed: Figures
    priced: Any
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
        return self.many([values])[0]

    def many(self, settings: Sequence[Figures]) -> list[float]:
        """The same under several settings."""
        full = [{**self.start, **self.fixed, **complete(one, self.start)} for one in settings]
        return [float(seconds) for seconds in self.priced.many(full)]

    def beside(self, values: Figures) -> Result:
        """The row beside its prediction under some figures; memory depends on none."""
        return replace(self.result, predicted_s=self.seconds(values))


@dataclass(frozen=True)
class Default:
    """How a vendor's runs are priced under the profile that users plan with: what becomes of a
    case, and the figures of a chip.
    """

    vendor: str
    case: Callable[[Case], Case]
    sourced: Callable[[str, str], tuple[Figures, Figures]]


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
    base = vendor_efficiency(vendor).with_values(own)
    start = {name: getattr(base, name) for name in (*FIGURES, "attention_backward")}
    start["eight_bit"] = start["eight_bit"] or start["matmul"]
    return start, {name: value for name, value in own.items() if name not in start}


def runs_of(
    files: Sequence[Path], keep: Path, default: Default | None = None
) -> tuple[list[Run], dict[str, str]]:
    """The runs of some files, and why other rows are left out.

    The folder `keep` has the runs of every source that was read before, and is written to. With a
    `default` the runs are those of one vendor under the profile that users plan with.
    """
    keep.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    left_out: dict[str, str] = {}
    for file in files:
        document = read(file)
        for source in dict.fromkeys(row["source"] for row in document.rows):
            path = keep / f"{source}.pickle"
            if not path.exists():
                own = [row for row in document.rows if row["source"] == source]
                path.write_bytes(pickle.dumps(_read(document, own, default)))
            some, refused = pickle.loads(path.read_bytes())
            runs += some if default else [_current(run) for run in some]
            left_out |= refused
    return runs, left_out


def _current(run: Run) -> Run:
    """The run with the figures of chips that are sourced now."""
    start, fixed = sourced(run.chip, run.vendor)
    return replace(run, start=start, fixed=fixed)


def _read(
    document: Document, rows: Sequence[Entry], default: Default | None
) -> tuple[list[Run], dict[str, str]]:
    bench, runs, refused = Bench(), list[Run](), dict[str, str]()
    gc.disable()  # tracing makes many objects that live as long as the bench
    for row in rows:
        case = case_of(document, row)
        if isinstance(case, str):
            refused[row["id"]] = case
            continue
        if default and case.topology.chip.vendor != default.vendor:
            continue
        try:
            split = str(row.get("split_group") or row["id"])
            runs.append(_run(default.case(case) if default else case, split, bench, default))
        except ShardlibError as error:
            refused[case.id] = str(error)
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            refused[case.id] = f"fault: {type(error).__name__}: {error}"
    gc.enable()
    return runs, refused


def _run(case: Case, split: str, bench: Bench, default: Default | None) -> Run:
    chip, quote = case.topology.chip, bench.quote(case)
    start, fixed = (default.sourced if default else sourced)(chip.name, chip.vendor)
    found = price(quote.load, quote.topology, quote.candidate)
    arrays = float(found.peak_bytes[0])
    needed = memory_of(arrays, case.software.runtime, "nvidia-smi")
    return Run(
        sample=Sample(id=case.id, source=case.source, split=split, measured_s=case.step_s or 0.0),
        chip=chip.name,
        stack=case.software.stack.name,
        start=start,
        fixed=fixed,
        priced=tallied(quote, {**start, **fixed}),
        result=Result(
            id=case.id,
            source=case.source,
            group=case.group,
            predicted_s=float(found.step_seconds[0]),
            measured_s=case.step_s,
            predicted_bytes=memory_of(arrays, case.software.runtime, case.peak_kind),
            measured_bytes=case.peak_bytes,
            predicted_fits=needed <= chip.hbm_bytes,
            measured_fits=not case.out_of_memory,
            parts={},
            memory={},
            assumed=case.assumed,
        ),
    )
