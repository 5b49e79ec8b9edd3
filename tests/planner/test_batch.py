"""Batches that do not divide over the devices: what is said of them, against plans of others."""

from __future__ import annotations

import re

import pytest

from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.search import nearby_batches
from tests.planner import worlds


def planned(rows: int, pin: dict[str, object] | None = None) -> Plan:
    world = worlds.layers(batch=rows, seq=256, embed=512, hidden=2048, heads=8, vocab=512)
    return planner.search(world, "v5e:4x4", pin)


@pytest.mark.long
def test_a_batch_that_divides_badly_is_said_first_with_one_that_is_faster() -> None:
    odd, even = planned(63), planned(64)
    first = odd.findings[0]
    assert (first.code, first.severity) == ("batch-divides-badly", "warning")
    assert f"chose the mesh {odd.mesh}" in first.message and "batch of 64 rows" in first.hint
    said = float(re.findall(r"about ([0-9.]+)x the time per row", first.message)[0])
    per_row = even.estimate.step_seconds / 64 / (odd.estimate.step_seconds / 63)
    assert said == pytest.approx(per_row, rel=0.05) and per_row < 0.9
    assert f"({even.mesh})" in first.message
    assert "batch-divides-badly" not in {one.code for one in even.findings}


def test_a_mesh_that_the_user_chose_is_no_matter_of_rows() -> None:
    pinned = planned(63, {"mesh": {"context": 16}})
    assert "batch-divides-badly" not in {one.code for one in pinned.findings}


def test_nearby_batches_divide_over_more_devices_the_nearest_first() -> None:
    assert nearby_batches(255, 256) == (256,)
    assert nearby_batches(60, 64) == (56, 64) or nearby_batches(60, 64) == (64,)
    for rows in range(2, 80):
        for other in nearby_batches(rows, 48):
            assert abs(other - rows) <= rows / 4
            nearer = range(min(rows, other) + 1, max(rows, other))
            assert all(_ways(n) < _ways(other) for n in (rows, *nearer))


def _ways(rows: int) -> int:
    return max(n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48) if rows % n == 0)
