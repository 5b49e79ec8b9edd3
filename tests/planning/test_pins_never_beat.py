"""Pins restrict the space: no pinned plan is faster than the free one."""

from __future__ import annotations

import pytest

from tests.planning.pinned_jobs import beaten


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2000, 2006))
def test_no_pinned_plan_is_faster_than_the_free_one(seed: int) -> None:
    assert [row for row in beaten(seed) if row["beaten"]] == []
