"""The order of first use, replayed, against all other orders."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.islands.transfers import CROSSING, Load, at_once, replay

_TIMES = st.integers(0, 6).map(float)
_LOADS = st.builds(Load, forward=_TIMES, backward=_TIMES, wire=_TIMES)


def _shortest_without_rules(loads: list[Load], order: tuple[int, ...]) -> float:
    """A step whose buckets cross strictly in an order, the link idle where the next is not made."""
    made, clock = dict[int, float](), 0.0
    for number in range(len(loads) - 1, -1, -1):
        clock += loads[number].backward
        made[number] = clock
    there, free = dict[int, float](), 0.0
    for number in order:
        free = max(free, made[number]) + loads[number].wire
        there[number] = free
    for number, load in enumerate(loads):
        clock = max(clock, there[number]) + load.forward
    return clock


@settings(max_examples=150, deadline=None)
@given(st.lists(_LOADS, min_size=1, max_size=5))
def test_the_order_of_use_is_the_shortest_of_all(loads: list[Load]) -> None:
    ours = replay(loads)
    assert max(ours.compute, ours.wire) <= ours.seconds <= at_once(loads).seconds
    for order in itertools.permutations(range(len(loads))):
        assert ours.seconds <= _shortest_without_rules(loads, order)
        assert ours.seconds <= replay(loads, order).seconds
        assert ours.seconds <= replay(loads, order, preempt=False).seconds


@settings(max_examples=100, deadline=None)
@given(st.lists(_LOADS, min_size=6, max_size=40), st.randoms(use_true_random=False))
def test_no_shuffled_order_of_many_is_shorter(loads: list[Load], rng: random.Random) -> None:
    order = rng.sample(range(len(loads)), len(loads))
    ours = replay(loads)
    for preempt in (True, False):
        assert ours.seconds <= replay(loads, order, preempt=preempt).seconds
    assert ours.seconds <= _shortest_without_rules(loads, tuple(order))


@settings(max_examples=100, deadline=None)
@given(st.lists(_LOADS, min_size=1, max_size=12), st.booleans())
def test_the_link_carries_all_of_each_bucket_one_at_a_time(
    loads: list[Load], preempt: bool
) -> None:
    found = [span for span in replay(loads, preempt=preempt).spans if span.kind == CROSSING]
    for one, other in itertools.pairwise(found):
        assert one.stop <= other.start
    for number, load in enumerate(loads):
        carried = sum(span.stop - span.start for span in found if span.bucket == number)
        assert abs(carried - load.wire) < 1e-9


def test_where_all_is_there_at_first_the_order_is_the_shortest_without_preemption() -> None:
    rng = random.Random(0)
    for _ in range(50):
        loads = [Load(forward=rng.randint(0, 5), backward=0.0, wire=rng.random()) for _ in range(5)]
        ours = replay(loads, preempt=False).seconds
        orders = itertools.permutations(range(5))
        assert ours <= min(_shortest_without_rules(loads, order) for order in orders) + 1e-9


def test_a_model_whose_wire_takes_as_long_as_its_compute_gains_more_than_a_tenth() -> None:
    loads = [Load(forward=1.0, backward=2.0, wire=3.0)] * 24
    rng, ours = random.Random(0), replay(loads)
    others = [replay(loads, rng.sample(range(24), 24)).seconds for _ in range(200)]
    assert ours.seconds < 0.9 * sum(others) / len(others)
    assert ours.seconds < 0.6 * at_once(loads).seconds
    assert ours.efficiency > 0.9
