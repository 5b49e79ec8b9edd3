"""How sure estimates are: shipped intervals beside their evidence, and what a plan says of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.environment import RESULTS, stored
from benchmarks.intervals import SHARE, Residual, between, coverage
from shardlib.cost.framework import INDISTINGUISHABLE, interval, intervals
from shardlib.cost.pricing import Estimate
from shardlib.planner.plan import Rejected
from shardlib.report.text import next_rows, reasons
from tests.planner.worlds import planned

EVIDENCE = stored(RESULTS / "intervals.json")


def test_shipped_intervals_are_those_of_the_stored_result() -> None:
    assert [entry.to_json() for entry in intervals().values()] == EVIDENCE["intervals"]
    assert all(entry.low < 1 < entry.high for entry in intervals().values())


def test_sources_left_out_lie_in_the_intervals_of_the_others() -> None:
    assert 0.75 <= EVIDENCE["coverage"]["runs"] <= 0.9
    assert 0.75 <= EVIDENCE["coverage"]["sources"] <= 0.9
    assert sum(all_runs for _, all_runs in EVIDENCE["coverage"]["by_source"].values()) > 800


def test_plans_that_are_predicted_nearer_than_even_are_in_order_by_chance_alone() -> None:
    near, *others = EVIDENCE["pairs"]
    assert near["to"] == INDISTINGUISHABLE and near["right"] < 0.6 * near["pairs"]
    assert all(pair["right"] > 0.75 * pair["pairs"] for pair in others)


def residuals(spread: float, sources: int, runs: int) -> list[Residual]:
    """Runs whose sources differ by `spread`, and by a tenth of it within."""
    rng = np.random.default_rng(0)
    rows = list[Residual]()
    for number in range(sources):
        middle = rng.normal(0, spread)
        for log in rng.normal(middle, spread / 10, runs):
            row = Residual(
                source=str(number), profile="x", vendor="y", log=log, job="", predicted_s=1.0
            )
            rows.append(row)
    return rows


def test_an_interval_covers_its_share_of_sources_that_it_has_not_seen() -> None:
    rows = residuals(0.2, 60, 5)
    known = between(rows, "x", "y")
    assert np.log(known.high) == pytest.approx(
        0.2 * 1.2816, rel=0.35
    )  # the normal's 90th percentile
    assert coverage(rows)["sources"] == pytest.approx(SHARE, abs=0.06)
    many = [row for row in rows for _ in range(50 if row.source == "0" else 1)]
    assert between(many, "x", "y") == replace(known, runs=len(many)), "each source counts alike"


def test_a_plan_says_how_sure_it_is() -> None:
    plan = planned("h100:8", {"mesh": {"fsdp": 8}, "remat": "full", "offload": []})
    estimate, known = plan.estimate, interval("xla", "nvidia")
    assert known is not None and estimate.interval == known
    assert estimate.step_interval == (
        pytest.approx(known.low * estimate.step_seconds),
        pytest.approx(known.high * estimate.step_seconds),
    )
    data = json.loads(json.dumps(estimate.to_json()))
    assert data["step_interval"] == list(estimate.step_interval or ())
    assert Estimate.from_json(data) == estimate
    older = {name: value for name, value in data.items() if "interval" not in name}
    assert Estimate.from_json(older) == replace(estimate, interval=None)
    (line,) = (line for line in reasons(plan) if "no price had seen" in line)
    assert f"{known.runs} published runs of {known.sources} sources" in line
    assert planned("cpu:8").estimate.step_interval is None, "nobody publishes runs of those"


def test_even_plans_come_with_the_least_memory_first() -> None:
    plan = planned("h100:8", {"mesh": {"fsdp": 8}, "remat": "full", "offload": []})

    def shown(*others: tuple[float, int]) -> list[tuple[str, ...]]:
        """Times and GiB of others than the plan -> rows, which name others by their numbers."""
        rejected = tuple(
            Rejected(
                mesh=plan.mesh,
                reason="slower",
                step_seconds=ratio * plan.estimate.step_seconds,
                peak_bytes=gib << 30,
                summary=str(number),
            )
            for number, (ratio, gib) in enumerate(others)
        )
        beside = replace(plan, search=replace(plan.search, rejected=rejected))
        return [(speed, size, with_) for speed, size, _, with_ in next_rows(beside)]

    assert shown((1.01, 30), (1.04, 20), (1.06, 10)) == [
        ("1.04x, even", "20.0 GiB", "1"),
        ("1.01x, even", "30.0 GiB", "0"),
        ("1.06x", "10.0 GiB", "2"),
    ]
    assert shown((1.2, 30)) == [("1.20x", "30.0 GiB", "0")]
