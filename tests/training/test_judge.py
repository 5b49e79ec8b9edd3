from __future__ import annotations

import math

import numpy as np
import pytest

from shardlib.errors import ModelError
from shardlib.training.measures import Judge, Policy


def falling(steps: int, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    return [3 + 2 * math.exp(-step / 100) + noise[step] for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_with_noise_has_no_spikes(seed: int):
    judge = Judge(Policy())
    assert {judge.see(loss) for loss in falling(1000, seed)} == {"go"}


def test_a_spike_is_seen_and_not_remembered():
    judge = Judge(Policy(window=32, spike=10.0))
    for loss in falling(200):
        judge.see(loss)
    before = judge.limit()
    assert judge.see(9.0) == judge.see(30.0) == "roll-back" and judge.limit() == before
    assert judge.see(before) == "go"


def test_nothing_is_a_spike_before_the_window_is_full():
    judge = Judge(Policy(window=4))
    assert [judge.see(loss) for loss in (1.0, 100.0, 1.0, 1e6)] == ["go"] * 4


def test_actions():
    for action, bad, jump in (
        ("warn", "roll-back", "warn"),
        ("roll-back", "roll-back", "roll-back"),
        ("stop", "stop", "stop"),
    ):
        judge = Judge(Policy(window=2, action=action), seen=[1.0, 1.1])
        assert (judge.see(math.inf), judge.see(50.0), judge.see(1.05)) == (bad, jump, "go")
    assert Judge(Policy(window=2, spike=0), seen=[1.0, 1.1]).see(50.0) == "go"


def test_what_was_seen_is_all_its_memory():
    one, losses = Judge(Policy(window=16)), falling(100)
    for loss in losses[:50]:
        one.see(loss)
    other = Judge(Policy(window=16), seen=[*one.seen])
    for loss in [*losses[50:], 40.0]:
        assert one.see(loss) == other.see(loss) and one.limit() == other.limit()


def test_policies_that_make_no_sense():
    with pytest.raises(ModelError) as caught:
        Policy(window=1, spike=-1.0, action="pray")
    assert (
        str(caught.value)
        == "the policy for bad losses is not usable:\n  - window is 1; it must be at least 2\n  -"
        " spike is -1.0; it must be at least 0\n  - action is 'pray'; it is one of warn, skip,"
        " roll-back, stop"
    )


def test_steps_left_out_in_a_row():
    judge = Judge(Policy(skips=2))
    assert [
        judge.skip(),
        judge.skip(),
        judge.see(1.0),
        judge.skip(),
        judge.skip(),
        judge.skip(),
    ] == ["go", "go", "go", "go", "go", "roll-back"]
