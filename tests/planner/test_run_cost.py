"""What a run costs, beside failures drawn at random and published formulas."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shardlib.errors import ArgumentError
from shardlib.machines.topology import topology
from shardlib.planner.answers import best_interval, expected_seconds, run_cost, save_seconds
from tests.planner.fixture_plan import PLAN

MACHINE = topology(PLAN.topology)


def test_the_best_interval_is_the_least_of_many():
    for save, mtbf in ((5.0, 3600.0), (60.0, 10800.0), (0.1, 1e6), (300.0, 900.0)):
        found = best_interval(save, mtbf)
        tried = np.geomspace(mtbf / 1e4, 3 * mtbf, 4000)
        times = [expected_seconds(1e6, float(t), save, mtbf, 100.0) for t in tried]
        assert expected_seconds(1e6, found, save, mtbf, 100.0) <= min(times) * (1 + 1e-9)
        if save < mtbf / 1000:  # Young (1974)
            assert found == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.03)


def test_expected_time_is_that_of_drawn_failures():
    save, mtbf, restart, every, work = 60.0, 7200.0, 600.0, 900.0, 90_000.0
    draw = np.random.default_rng(0)
    times: list[float] = []
    for _ in range(300):
        now, done = 0.0, 0.0
        left = draw.exponential(mtbf)
        while done < work:
            if left >= every + save:
                left -= every + save
                now, done = now + every + save, done + every
                continue
            now += left
            left = draw.exponential(mtbf)
            while left < restart:  # it may fail again while it starts
                now += left
                left = draw.exponential(mtbf)
            now, left = now + restart, left - restart
        times.append(now)
    assert float(np.mean(times)) == pytest.approx(
        expected_seconds(work, every, save, mtbf, restart), rel=0.02
    )


def test_a_run_is_its_steps_and_what_failures_add():
    plain = run_cost(PLAN, MACHINE, tokens=1e12)
    estimate = PLAN.estimate
    assert plain.wall_seconds == pytest.approx(1e12 / estimate.tokens_per_second)
    assert plain.steps * estimate.step_seconds == pytest.approx(plain.work_seconds)
    assert plain.goodput == 1 and plain.money is None
    assert plain.kilowatt_hours == pytest.approx(0.7 * plain.device_hours)  # 700 W
    failing = run_cost(PLAN, MACHINE, tokens=1e12, price=2.4, mtbf=3 * 3600.0)
    assert 0.9 < failing.goodput < 1 and failing.every_seconds is not None
    assert failing.money == pytest.approx(2.4 * 16 * failing.wall_seconds / 3600)
    held = estimate.device_bytes
    assert save_seconds(PLAN, MACHINE) == pytest.approx((held.parameters + held.optimizer) / 55e9)
    text = str(failing)
    assert "2.4 per device and hour" in text and "every 3 hours" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert json.loads(json.dumps(failing.to_json()))["goodput"] == failing.goodput
    assert run_cost(PLAN, topology("v5e:4x4"), tokens=1.0).kilowatt_hours is None


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 0},
        {"tokens": math.nan},
        {"tokens": 1e9, "price": -1.0},
        {"tokens": 1e9, "mtbf": 0.0},
        {"tokens": True},
        {"tokens": 1e9, "mtbf": 60.0, "restart": 6000.0},
    ],
)
def test_runs_that_have_no_cost_are_errors(given: dict[str, float]):
    with pytest.raises(ArgumentError):
        run_cost(PLAN, MACHINE, **given)
