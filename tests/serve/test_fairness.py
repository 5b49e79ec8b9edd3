"""A tenant that floods does not starve others; bounds are those of the publication.

Sheng et al., arXiv:2401.00588, theorem 4.4: of two tenants that always have requests waiting, the
tokens served over their shares differ by at most twice the larger of a prompt and of what fits in a
batch.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ArgumentError
from shardlib.serve.requests import Asked, Capacity, Request
from shardlib.serve.scheduling import Schedule


class Served:
    """A schedule whose steps compute nothing."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.schedule = Schedule(capacity)
        self.numbers, self.tokens = itertools.count(), Counter[str]()

    def add(self, tenant: str, prompt: int, most: int, priority: int = 0) -> Request:
        number = next(self.numbers)
        asked = Asked(prompt=(number,) * prompt, most=most, salt=tenant, priority=priority)
        request = Request(number=number, asked=asked)
        self.schedule.add(request)
        return request

    def step(self) -> None:
        shares = self.schedule.next()
        for share in shares:
            if share.ends:
                if not share.request.answer:
                    self.tokens[share.request.asked.salt] += len(share.request.asked.prompt)
                share.request.took(1, -1.0)
                self.tokens[share.request.asked.salt] += 1
        self.schedule.done(shares)
        for share in shares:
            if share.request.ended is not None:
                self.schedule.release(share.request)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.25, 4), min_size=2, max_size=4),
    st.integers(2, 5),
    st.integers(0, 20),
    st.integers(),
)
def test_tenants_that_always_wait_are_served_by_their_shares(
    shares: list[float], slots: int, spare: int, seed: int
):
    draw, longest, page = random.Random(seed), 24, 4
    capacity = Capacity(
        longest=longest,
        slots=slots,
        page=page,
        pages=slots * longest // page // 2 + 6 + spare,
        budget=slots + 6,
        tenants={str(tenant): share for tenant, share in enumerate(shares)},
    )
    served = Served(capacity)
    for _ in range(300):
        waiting = Counter(one.asked.salt for one in served.schedule.waiting)
        for tenant in map(str, range(len(shares))):
            for _ in range(2 - waiting[tenant]):
                # one of them asks for much more at a time, which gains it nothing
                most = 16 if tenant == "0" else draw.randint(1, 6)
                served.add(tenant, draw.randint(1, 8), most)
        served.step()
    least = min(shares)
    found = [served.tokens[str(tenant)] / share for tenant, share in enumerate(shares)]
    bound = 2 * max(8 + 1, slots * longest) / least
    assert max(found) - min(found) <= bound, (found, bound)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(0, 9)
)
def test_a_flood_keeps_nobody_waiting(slots: int, prompt: int, most: int, before: int, spare: int):
    longest, page = 32, 4
    served = Served(
        Capacity(
            longest=longest,
            slots=slots,
            page=page,
            pages=longest // page * slots + spare,
            budget=slots + 8,
        )
    )
    for _ in range(before):
        for _ in range(4):
            served.add("flood", 8, 24)
        served.step()
    mine = served.add("mine", prompt, most)
    steps = 0
    while mine.ended is None:
        served.add("flood", 8, 24)
        served.step()
        assert mine in served.schedule.running or mine.ended is not None, "no slot at once"
        steps += 1
    # its prompt, after those that have a slot, beside one token of each; then a token a step
    assert steps <= -(-(prompt + 8 * (slots - 1)) // 8) + most


def test_one_that_was_away_has_saved_nothing_up():
    capacity = Capacity(longest=16, slots=1, page=4, pages=8, budget=8)
    served = Served(capacity)
    for _ in range(60):
        served.add("here", 4, 4)
    for _ in range(60):
        served.step()
    for _ in range(20):
        served.add("back", 4, 4)
    start = dict(served.tokens)
    for _ in range(60):
        served.step()
    assert abs(served.tokens["back"] - (served.tokens["here"] - start["here"])) <= 16


def test_a_higher_priority_takes_a_slot_and_gives_it_back():
    served = Served(Capacity(longest=16, slots=2, page=4, pages=16, budget=8))
    low = [served.add("a", 3, 8) for _ in range(2)]
    for _ in range(3):
        served.step()
    high = served.add("a", 3, 4, priority=1)
    served.step()
    assert high in served.schedule.running and low[1] in served.schedule.waiting
    for _ in range(30):
        served.step()
    assert [one.ended for one in (*low, high)] == ["length"] * 3
    assert served.schedule.preempted == 1
    assert served.schedule.pool.available == 16


def test_shares_that_are_not_usable_are_refused():
    for wrong in (0, -1.0, True, float("nan")):
        with pytest.raises(ArgumentError, match=r"the share of 'a' is .*; it is a number above 0"):
            Capacity(tenants={"a": wrong})
