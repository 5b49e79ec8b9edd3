"""No plan is faster or smaller than the bounds say that exclude it."""

from __future__ import annotations

import numpy as np

from shardlib.planner.bounds import Pairs, Tick, mixed, step_seconds


def test_a_mixture_lies_on_the_line_between_policies() -> None:
    none = (np.array([1.0, 1.0, 1.0, 2.0]), np.array([10.0, 10.0, 4.0, 10.0]))
    full = (
        np.array([2.0, 2.0, 2.0, 1.0]),
        np.array([2.0, 6.0, 2.0, 2.0]),
    )
    np.testing.assert_allclose(mixed([none, full], 5.0), [1 + 5 / 8, np.inf, 1.0, 1.0])


def test_the_fullest_stage_has_whole_layers() -> None:
    busy, layers = np.array([7.0]), np.array([6.0])  # six layers, and a second outside of them
    none = np.zeros(1)
    tick = Tick(np.stack([busy, busy, busy, none, none, none, layers]))
    stages, micro = np.array([4]), np.array([8])
    seconds = step_seconds(tick, stages, micro, stages - 1, 6)
    np.testing.assert_allclose(seconds, (8 + 3) * (2 + 1 / 4))


def test_pairs_come_in_the_order_of_their_bounds() -> None:
    pairs = Pairs.joined(
        [
            Pairs(entries=np.array([3, 1]), choices=np.array([0, 1]), least=np.array([2.0, 5.0])),
            Pairs(entries=np.array([3, 2]), choices=np.array([2, 2]), least=np.array([1.0, 4.0])),
        ]
    )
    below = pairs.below(5.0)
    assert list(below.entries) == [3, 3, 2] and list(below.choices) == [2, 0, 2]
    assert list(below.firsts().choices) == [2, 2]
    assert list(below.first(1).entries) == [3]
    assert list(below.after(1).entries) == [3, 2]
    assert len(below.after(7)) == 0
