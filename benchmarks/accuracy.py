"""Fills the tables of docs/accuracy.md from stored results.

    python -m benchmarks accuracy [--check]

Every figure is of a result in `benchmarks/results`, whose command stands in it. `--check` writes
nothing and exits with 1 where the page is old, or where an error on groups that no price had seen is
worse by more than a tenth than when it was last accepted (`benchmarks/tables/accuracy.yaml`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.environment import RESULTS, ROOT, command_line, stored, table
from shardlib.machines.topology import topology

PAGE = ROOT / "docs" / "accuracy.md"
#: How much worse a figure may become.
WORSE = 1.1
FEASIBILITY = ("configurations", "ran", "precision", "precision_of_memory", "recall")
#: Heads of tables of groups of published runs, and versions of JAX whose programs were compiled.
OF_EACH = "runs | sources | median | 90th percentile | signed | memory"
VERSIONS = ("0.10.2", "0.12.0.1")


def result(name: str) -> dict[str, Any]:
    """A stored result."""
    return stored(RESULTS / f"{name}.json")


def figures() -> dict[str, float]:
    """Figures on groups that no price had seen, by their names in `tables/accuracy.yaml`."""
    published = result("published_unseen")["summary"]["unseen"]["pooled"]
    plans = result("measured_plans")
    unseen, fits = plans["unseen"], plans["feasibility"]["unseen"]
    return {
        "published, source left out, median": published["step_time_median_error"],
        "published, source left out, 90th percentile": published["step_time_p90_error"],
        "published, memory, median": published["memory_median_error"],
        "published, source left out, pairs in order": published["rank_right"],
        "measured plans, median": unseen["median_error"],
        "measured plans, 90th percentile": unseen["p90_error"],
        "measured plans, rank correlation": unseen["spearman"],
        "measured plans, regret, median": unseen["regret"]["median"],
        "measured plans, regret, worst": unseen["regret"]["worst"],
        "measured plans, best of the first five, worst": unseen["first_five_worst"],
        "measured plans, precision of what does not fit": fits["precision"],
        "measured plans, recall of what does not fit": fits["recall"],
        "JAX on TPUs, median": result("default_profile")["unseen"]["median"],
        "JAX on GPUs, median": result("default_profile_nvidia")["unseen"]["median"],
    }


def worse(now: Mapping[str, float], accepted: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The figures that are worse by more than a tenth than when they were accepted."""
    over = {name: now[name] / limit for name, limit in accepted["at most"].items()}
    under = {
        name: (1 - now[name]) / max(1 - limit, 0.01) for name, limit in accepted["at least"].items()
    }
    return [
        f"{name}: {now[name]:.4f}, {times:.2f} times as far off as when it was accepted"
        for name, times in {**over, **under}.items()
        if times > WORSE
    ]


def rows_of(head: str, rows: list[tuple[object, ...]]) -> str:
    """A table of the page; numbers below 10 are shares, given in per cent."""
    columns = head.split(" | ")

    def cell(value: object) -> str:
        return f"{value:.1%}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [columns, ["---"] * len(columns), *([*map(cell, row)] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def errors(rows: list[dict[str, Any]], field: str) -> tuple[float | None, ...]:
    """Median, 90th percentile and signed median of an error; None where no row has one."""
    known = [row[field] for row in rows if row[field] is not None]
    if not known:
        return (None, None, None)
    sizes = np.abs(known)
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(np.median(known))


def tables() -> dict[str, str]:
    """The tables of the page, by the names of their marks."""
    unseen, third = result("published_unseen")["summary"], result("published_third")["summary"]
    plans, sure = result("measured_plans"), result("intervals")

    def published(name: str, pooled: Mapping[str, Any]) -> tuple[object, ...]:
        right, pairs = pooled["counts"]["rank"]
        return (
            name,
            pooled["counts"]["times"],
            pooled["step_time_median_error"],
            pooled["step_time_p90_error"],
            pooled["step_time_signed_median"],
            pooled["memory_median_error"],
            f"{right} of {pairs}",
        )

    def measured(name: str, found: Mapping[str, Any]) -> tuple[object, ...]:
        regret = found["regret"]
        return (
            name,
            found["runs"],
            found["median_error"],
            found["p90_error"],
            f"{found['spearman']:.2f}",
            regret["median"],
            regret["mean"],
            regret["worst"],
            found["first_five_worst"],
        )

    def of_jax(name: str, found: Mapping[str, Any]) -> list[tuple[object, ...]]:
        return [
            (f"{name}, {kind}", *(row[figure] for figure in ("rows", "median", "p90", "signed")))
            for kind, row in (("fitted", found["fitted"]), ("source left out", found["unseen"]))
        ]

    def of_each(field: str) -> list[tuple[object, ...]]:
        rows = [row for row in result("published_unseen")["rows"] if row["error"] is not None]
        groups = {row[field]: [one for one in rows if one[field] == row[field]] for row in rows}
        return [
            (
                *(name, len(group), len({row["source"] for row in group})),
                *(*errors(group, "error"), errors(group, "memory_error")[0]),
            )
            for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]

    def by_chip(version: str) -> list[tuple[object, ...]]:
        rows = result(f"compiled_more_programs_jax-{version}")["rows"]
        rows = [row for row in rows if row.get("memory")]
        chips = {row["case"]["topology"]: topology(row["case"]["topology"]).chip for row in rows}
        groups: dict[str, list[float]] = {}
        for row in rows:
            name = chips[row["case"]["topology"]].name
            groups.setdefault(name, []).append(abs(row["memory"]["error"]))
        return [
            (name, version, len(group), float(np.median(group)), max(group))
            for name, group in sorted(groups.items())
        ]

    by_source = unseen["unseen"]["by_source"]
    return {
        "chips": rows_of(f"chip | {OF_EACH}", of_each("chip")),
        "frameworks": rows_of(f"framework profile | {OF_EACH}", of_each("stack")),
        "compilers by chip": rows_of(
            "chip | JAX | programs | memory, median | memory, worst",
            [row for version in VERSIONS for row in by_chip(version)],
        ),
        "published": rows_of(
            "what | runs | median | 90th percentile | signed | memory | pairs in order",
            [
                published("fitted", unseen["shipped"]["pooled"]),
                published("a source left out", unseen["unseen"]["pooled"]),
                published("sources never seen", third["shipped"]["pooled"]),
            ],
        ),
        "measured plans": rows_of(
            "what | runs | median | 90th percentile | rank correlation | regret, median | mean |"
            " worst | best of the first five, worst",
            [
                measured("groups that were fitted to", plans["fitted"]),
                measured("groups never seen", plans["unseen"]),
                measured("the same by a roofline of six constants", plans["roofline"]),
            ],
        ),
        "feasible plans": rows_of(
            "what | configurations | ran | of those said to fit, ran | without failures under 45 GB"
            " | of those that ran, said to fit",
            [
                (name, *(plans["feasibility"][kind][figure] for figure in FEASIBILITY))
                for name, kind in (
                    ("groups that were fitted to", "fitted"),
                    ("groups never seen", "unseen"),
                )
            ],
        ),
        "programs of JAX": rows_of(
            "what | runs | median | 90th percentile | signed",
            [
                *of_jax("TPUs", result("default_profile")),
                *of_jax("NVIDIA's GPUs", result("default_profile_nvidia")),
            ],
        ),
        "compilers": rows_of(
            "JAX | programs | memory, median | memory, worst | bytes of collectives as planned",
            [
                (
                    version,
                    found["cases"] - found["failed"],
                    found["memory_median_error"],
                    found["memory_worst_error"],
                    found["collective_bytes_matched"],
                )
                for version in VERSIONS
                for found in [result(f"compiled_more_programs_jax-{version}")["summary"]]
            ],
        ),
        "whole runs": rows_of(
            "run | published device-hours | predicted over published",
            [
                (run["model"], f"{run['published_device_hours']:,}", f"{run['ratio']:.2f}")
                for run in result("booked_runs")["runs"]
            ],
        ),
        "intervals": rows_of(
            "framework profile, chips | measured over predicted, 80% of runs | runs | sources",
            [
                (
                    f"{entry['profile'] or 'all others'}, {entry['vendor']}",
                    f"{entry['low']:.2f} to {entry['high']:.2f}",
                    entry["runs"],
                    entry["sources"],
                )
                for entry in sure["intervals"]
            ],
        )
        + f"\n\nOf runs whose source is left out {sure['coverage']['runs']:.0%} lie in the interval"
        f" that the other sources give, {sure['coverage']['sources']:.0%} in the mean over sources.",
        "pairs": rows_of(
            "predicted apart by | pairs | measured in the predicted order",
            [
                (
                    f"{pair['from']:.0%} to {pair['to']:.0%}"
                    if pair["to"] < 10
                    else f"more than {pair['from']:.0%}",
                    pair["pairs"],
                    f"{pair['right'] / pair['pairs']:.0%}",
                )
                for pair in sure["pairs"]
            ],
        ),
        "sources": rows_of(
            "source | runs | median | 90th percentile | signed | memory",
            [
                (
                    source,
                    found["rows"],
                    found["step_time_median_error"],
                    found["step_time_p90_error"],
                    found["step_time_signed_median"],
                    found["memory_median_error"],
                )
                for source, found in sorted(by_source.items(), key=lambda item: -item[1]["rows"])
            ],
        ),
    }


def page(text: str) -> str:
    """The page with its tables made anew: what stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, rows in tables().items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda match, rows=rows: f"{match[1]}{rows}\n{match[2]}", text, flags=re.DOTALL
        )
        assert count == 1, f"the page has no place for the table {name!r}"
    return text


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    text, found = PAGE.read_text(encoding="utf-8"), worse(figures(), table("accuracy"))
    new = page(text)
    for line in found:
        print(line)
    if not args.check:
        PAGE.write_text(new, encoding="utf-8")
    return int(bool(found) or (args.check and new != text))
