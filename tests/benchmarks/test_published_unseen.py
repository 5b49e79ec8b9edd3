"""Prices as arrays, fits level by level, and sources that nothing was fitted to; on rows written
here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.published.cases import Case
from benchmarks.published.pricing import Bench
from benchmarks.published.summary import Result
from benchmarks.published.unseen import levels
from benchmarks.published.unseen.levels import (
    RANGES,
    SOURCED,
    figures_of,
    fitted,
    names_for,
)
from benchmarks.published.unseen.runs import Run, Sample, sourced
from benchmarks.published.unseen.tallies import Tallied, tallied
from benchmarks.published_unseen import priced
from tests.benchmarks.test_published_plans import sparse
from tests.benchmarks.test_published_runs import the_case


@dataclass(frozen=True)
class Machine:
    """A price of two parts, whose shares are figures: matmuls, and links."""

    flops_s: float = 1.0
    links_s: float = 0.2

    def many(self, settings: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        return [self.flops_s / one["matmul"] + self.links_s / one["slow"] for one in settings]

    def figures(self) -> tuple[str, ...]:
        return ("matmul", "slow")


def run(number: int, source: str, measured_s: float, **changes: Any) -> Run:
    """A run of the machine, larger with its number."""
    name = f"{source}-{number}"
    start, _ = sourced("a100", "nvidia")
    result = Result(
        id=name,
        source=source,
        group=source,
        predicted_s=0.0,
        measured_s=measured_s,
        predicted_bytes=0.0,
        measured_bytes=None,
        predicted_fits=True,
        measured_fits=True,
        parts={},
        memory={},
    )
    given: dict[str, Any] = {
        "sample": Sample(id=name, source=source, split=name, measured_s=measured_s),
        "chip": "a100",
        "stack": "one",
        "start": start,
        "fixed": {},
        "priced": Machine(1.0 + number),
        "result": result,
    }
    return Run(**{**given, **changes})


def true_runs(source: str, share: float, count: int = 6, **changes: Any) -> list[Run]:
    """Runs whose matmuls reach a share of what the chip's do."""
    found: list[Run] = []
    for number in range(count):
        one = run(number, source, 1.0, **changes)
        found.append(with_time(one, one.seconds({"matmul": one.start["matmul"] * share})))
    return found


def with_time(one: Run, seconds: float) -> Run:
    """The run with another measured time."""
    return replace(
        one,
        sample=replace(one.sample, measured_s=seconds),
        result=replace(one.result, measured_s=seconds),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"precision": "bf16", "framework": "Megatron-Core", "zero_group": 2},
        {**sparse(etp=2), "framework": "NeMo 25.02", "precision": "fp8"},
    ),
    ids=("stages", "groups of ranks", "experts"),
)
def test_a_price_as_arrays_is_the_price(changes: dict[str, Any]) -> None:
    case = the_case(**changes)
    assert isinstance(case, Case)
    chip = case.topology.chip
    quote = Bench().quote(case)
    start, fixed = sourced(chip.name, chip.vendor)
    found, drawn = tallied(quote, {**start, **fixed}), random.Random(7)
    assert isinstance(found, Tallied) and found.figures() == quote.figures()
    settings = [{**start, **fixed}]
    for _ in range(4):
        values = {name: low + drawn.random() * (high - low) for name, (low, high) in RANGES.items()}
        settings.append({**start, **fixed, **values, "attention_backward": drawn.uniform(0.2, 0.8)})
    expected = [quote.seconds(values) for values in settings]
    assert [found.seconds(values) for values in settings] == pytest.approx(expected, rel=1e-12)
    assert found.many(settings).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_level_finds_the_share_that_runs_show() -> None:
    fit = fitted(true_runs("paper", 0.7), SOURCED)
    assert fit.level["matmul"] == pytest.approx(0.7, rel=0.04) and fit.rows == 6
    assert fit.level["unfused"] == 1.0, "no run depends on it"


def test_a_figure_takes_three_rows() -> None:
    assert [names_for(true_runs("paper", 1.0, count=n)) for n in (2, 3, 5, 6, 40)] == [
        [],
        ["matmul"],
        ["matmul"],
        ["matmul", "slow"],
        ["matmul", "slow"],
    ]


def test_figures_stay_in_their_ranges() -> None:
    one = run(0, "paper", 1.0)
    found = figures_of({**SOURCED, "matmul": 0.01, "slow": 50.0}, one)
    assert found == {"matmul": RANGES["matmul"][0], "slow": RANGES["slow"][1]}
    assert figures_of({**SOURCED, "matmul": 1.5}, one)["matmul"] == one.start["matmul"]
    for name, (low, high) in RANGES.items():
        values = [*levels.around(name, high), *levels.around(name, low)]
        assert name not in levels.ABSOLUTE or all(low <= one <= high for one in values), name


@pytest.mark.parametrize("method", ("levels", "pairs"))
def test_what_is_left_out_changes_no_figure(method: str) -> None:
    """Predictions of a source do not depend on what it measured."""
    others = true_runs("other", 0.7)
    own = true_runs("own", 0.4)
    found = priced(own, others, method)
    again = priced([with_time(one, 99.0) for one in own], others, method)
    assert [one.predicted_s for one in found] == [one.predicted_s for one in again]
    assert [one.predicted_s for one in found] == pytest.approx(
        [one.seconds({"matmul": 0.7 * one.start["matmul"]}) for one in own], rel=0.05
    )


def test_a_pair_without_other_runs_is_as_the_framework_elsewhere() -> None:
    """Pairs alone fall back to the chip; levels to the framework on other chips, and to all."""
    others = true_runs("other", 0.7, chip="h100")
    own = true_runs("own", 0.7)
    by_level, alone = (priced(own, others, method) for method in ("levels", "pairs"))
    assert max(abs(one.time_error or 0.0) for one in by_level) < 0.05
    assert min(abs(one.time_error or 0.0) for one in alone) > 0.2
    other = [replace(one, stack="two") for one in own]
    more = [run for name in ("three", "four") for run in true_runs(name, 0.7, stack=name)]
    general = priced(other, [*others, *more], "levels")
    assert max(abs(one.time_error or 0.0) for one in general) < 0.05
