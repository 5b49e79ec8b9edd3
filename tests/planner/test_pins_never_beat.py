"""Pins restrict the space: no pinned plan is faster than the free one."""

from __future__ import annotations

import pytest

from tests.planner.pinned_jobs import beaten


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2000, 2006))
def test_no_pinned_plan_is_faster_than_the_free_one(seed: int) -> None:
    assert [row for row in beaten(seed) if row["beaten"]] == []


@pytest.mark.long
def test_pins_for_which_a_space_has_no_mesh_are_answered() -> None:
    """Of several spaces, or of one, none may have a mesh; what is asked is answered or refused."""
    answered = [row["pinned_seconds"] is not None for seed in (1, 3, 5) for row in beaten(seed)]
    assert any(answered) and not all(answered)
