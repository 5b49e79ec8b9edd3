"""Fits what chips reach under software stacks to published training runs, and writes
`shardlib/cost/framework_profiles/curves/CHIP.STACK.json`.

    python benchmarks/fit_stacks.py FILE.yaml [--only h100.torchtitan] [--write]

One set of figures per chip and stack, none per row; `benchmarks/published/fitting.py` says how.
Every file has the rows that were used, and the error before, after and held out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shardlib.cost
from benchmarks.published.cases import Case, case_of
from benchmarks.published.document import read
from benchmarks.published.fitting import (
    FIGURES,
    Sample,
    evidence,
    figures_for,
    fit,
    halves,
    median_error,
    source_error,
)
from benchmarks.published.machines import PRODUCTS
from benchmarks.published.pricing import Bench, Quote
from shardlib.cost.machine.efficiency import efficiency
from shardlib.cost.machine.efficiency_curves import curves
from shardlib.errors import ShardlibError

CURVES = Path(shardlib.cost.__file__).parent / "framework_profiles" / "curves"
#: Physical meaning of each figure that is fitted, for the files.
MEANING: Mapping[str, str] = {
    "matmul": (
        "share of the peak that the largest matmuls of this stack sustain at the clock that the"
        " chip's power allows"
    ),
    "eight_bit": "the same for float8 matmuls, with the casts that are not fused",
    "memory": (
        "share of HBM bandwidth of kernels between the matmuls, gaps between launches included"
    ),
    "unfused": (
        "bytes that kernels between the matmuls move over those of perfectly fused chains: one"
        " kernel for every op where nothing compiles them"
    ),
    "attention": (
        "share of the peak of the fused attention kernels of the stack's releases;"
        " attention_backward in the proportion of the chip's"
    ),
    "grouped": "share of matmul of the experts' grouped matmuls",
    "gap_s": (
        "seconds between two kernels that are launched one by one: the launch, and waiting for what"
        " goes before"
    ),
    "dispatch_s": (
        "seconds of the host for each launch of a kernel, where it launches them one by one"
    ),
    "microbatch_s": "launches that the device waits for, and work of the host between microbatches",
    "fast": "share of the link efficiency that the stack's collectives reach inside a domain",
    "slow": "the same between domains: congestion and shared ports",
    "misaligned": "speed of matmuls whose dims are no multiple of 16 bytes",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cases of one chip and stack."""

    chip: str
    vendor: str
    stack: str
    samples: tuple[Sample, ...]
    quotes: tuple[Quote, ...]

    @property
    def name(self) -> str:
        """Name of the curve."""
        return f"{self.chip}.{self.stack}"

    def predict(
        self, values: Mapping[str, float], which: Sequence[int] | None = None
    ) -> list[float]:
        """Seconds of the cases with some figures in place of the curve's."""
        start = self.start()  # also for what is not fitted: the curve that is there says nothing
        figures = {**start, **self.missing(), **complete(values, start)}
        return [
            self.quotes[i].seconds(figures)
            for i in (range(len(self.quotes)) if which is None else which)
        ]

    def figures(self) -> set[str]:
        """Figures that the prices of the cases depend on; where there are experts without
        `misaligned`, since the weights of a token's experts are no matmul in these stacks.
        """
        found = [set(quote.figures()) for quote in self.quotes]
        every = set[str]().union(*found)
        return every if all("misaligned" in one for one in found) else every - {"misaligned"}

    def base(self) -> dict[str, Any]:
        """Sourced figures of the chip, or of the product that a variant of it is made after."""
        product = next(
            (product for name, product in PRODUCTS.items() if name == self.chip), self.chip
        )
        return (
            dict(curves()[product, ""].values)
            if (product, "") in curves() and not self.chip.startswith("v100")
            else {}
        )

    def missing(self) -> dict[str, Any]:
        """Figures that a variant of a product has no curve of its own for."""
        return {} if (self.chip, "") in curves() else self.base()

    def start(self) -> dict[str, float]:
        """The sourced figures of the chip, without what was fitted before."""
        base = efficiency(self.vendor).with_values(self.base())
        found = {name: getattr(base, name) for name in (*FIGURES, "attention_backward")}
        return found | {"eight_bit": found["eight_bit"] or found["matmul"]}


def complete(values: Mapping[str, float], start: Mapping[str, float]) -> dict[str, float]:
    """The figures of a curve; attention backward keeps its proportion to attention forward."""
    found = dict(values)
    if "attention" in found:
        found["attention_backward"] = round(
            found["attention"] * start["attention_backward"] / start["attention"], 4
        )
    return found


def groups(document: Any, only: Sequence[str] | None, most: int) -> list[Group]:
    """Groups of the usable rows that have a measured time, at most so many rows of each, spread
    over the runs that are not alike.
    """
    chosen: dict[tuple[str, str, str], list[tuple[Sample, Case]]] = defaultdict(list)
    for row in document.rows:
        case = case_of(document, row)
        if isinstance(case, Case) and case.step_s:
            key = (case.topology.chip.name, case.topology.chip.vendor, case.software.stack.name)
            if not only or f"{key[0]}.{key[2]}" in only:
                chosen[key].append(
                    (
                        Sample(
                            id=case.id,
                            source=case.source,
                            split=str(row.get("split_group") or case.id),
                            measured_s=case.step_s,
                        ),
                        case,
                    )
                )
    bench = Bench()
    return [_group(bench, key, spread(cases, most)) for key, cases in chosen.items()]


def spread(cases: list[tuple[Sample, Case]], most: int) -> list[tuple[Sample, Case]]:
    """At most so many cases, one of each split in turn."""
    by_split: dict[str, list[tuple[Sample, Case]]] = defaultdict(list)
    for one in cases:
        by_split[one[0].split].append(one)
    ordered = [
        entries[turn]
        for turn in range(max(map(len, by_split.values())))
        for entries in by_split.values()
        if turn < len(entries)
    ]
    return ordered[:most]


def _group(bench: Bench, key: tuple[str, str, str], cases: list[tuple[Sample, Case]]) -> Group:
    samples: list[Sample] = []
    quotes: list[Quote] = []
    for sample, case in cases:
        try:
            quotes.append(bench.quote(case))
            samples.append(sample)
        except ShardlibError as error:
            print(f"{sample.id}: {str(error).splitlines()[0]}", file=sys.stderr)
    return Group(
        chip=key[0], vendor=key[1], stack=key[2], samples=tuple(samples), quotes=tuple(quotes)
    )


def learn(group: Group) -> dict[str, Any]:
    """Fits one group: the content of its file, and whether it is "better" than the sourced figures
    of the chip.
    """
    start = group.start()
    names = figures_for(group.samples, group.figures())
    before = group.predict({name: start[name] for name in names})
    values = fit(group.samples, group.predict, start, names)
    after = group.predict(values)
    data = {
        "chip": group.chip,
        "stack": group.stack,
        "values": {**group.missing(), **complete(values, start)},
        "sources": [
            *(
                f"{name}: fitted to published runs, see evidence; {MEANING[name]}"
                for name in values
            ),
            "benchmarks/fit_stacks.py: figures of the chip alone are where the fit starts",
        ],
        "better": source_error(group.samples, after) < source_error(group.samples, before),
        "evidence": evidence(group.samples, before, after, held_out(group, start, names)),
    }
    if group.missing():
        data["sources"].append(
            f"{', '.join(sorted(group.missing()))}: where nothing else is said, as"
            f" {PRODUCTS[group.chip]}, the product of which {group.chip} is a variant"
        )
    if "attention" in values:
        data["sources"].append("attention_backward: in the proportion of the chip's own figures")
    return data


def held_out(group: Group, start: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Median error of runs that were not fitted to; None with one run, or where all are alike."""
    one, other = halves(group.samples)
    if not one or not other:
        return None
    found: dict[int, float] = {}
    for mine, rest in ((one, other), (other, one)):
        values = fit(
            [group.samples[i] for i in mine],
            lambda values, mine=mine: group.predict(values, mine),
            start,
            figures_for(mine, names),
        )
        found |= dict(zip(rest, group.predict(values, rest), strict=True))
    return median_error(group.samples, [found[i] for i in range(len(group.samples))])


def main() -> int:
    """Fits all groups of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", help="CHIP.STACK; may be repeated")
    parser.add_argument(
        "--most", type=int, default=16, help="most rows of a group that are fitted to"
    )
    parser.add_argument("--write", action="store_true", help="write the files")
    args = parser.parse_args()
    for group in groups(read(args.file), args.only, args.most):
        if not group.samples:
            continue
        started = time.perf_counter()
        data = learn(group)
        better = data.pop("better")
        print(
            f"{group.name}: {'' if better else 'NOT better, not written; '}{data['values']}"
            f" { ({k: v for k, v in data['evidence'].items() if k != 'rows'}) }, {len(group.samples)}"
            f" rows, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if args.write and better:
            (CURVES / f"{group.name}.json").write_text(
                json.dumps(data, indent=1) + "\n", encoding="utf-8"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
