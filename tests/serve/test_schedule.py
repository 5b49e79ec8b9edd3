"""Any requests, any sizes: every token is computed over exactly the tokens before it.

In place of keys and values an entry of the cache holds the tokens up to its own. What a step would
read is looked at before it is written.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ArgumentError
from shardlib.serve.requests import Capacity, GenerationRequest, Request
from shardlib.serve.scheduling import Schedule, digests

PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 9),  # tokens of a beginning that requests share
        st.integers(1, 9),  # tokens of its own
        st.integers(1, 8),  # tokens of the answer
        st.integers(0, 1),  # salt
        st.integers(-1, 1),  # priority
        st.sampled_from([None, 0, 3, 7]),  # steps after which it is cancelled
        st.integers(0, 5),  # steps after which it arrives
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    PROMPTS,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 3),
    st.sets(st.sampled_from([0, 0, 1, 3, 6]), min_size=1),
    st.booleans(),
    st.integers(),
)
def test_every_token_is_computed_over_the_tokens_before_it(
    prompts: list[tuple[int, int, int, int, int, int | None, int]],
    slots: int,
    page: int,
    spare: int,
    prefixes: bool,
    drafts: int,
    windows: set[int],
    ample: bool,
    seed: int,
):
    draw = random.Random(seed)
    shared = [draw.randrange(3) for _ in range(9)]
    longest = max(a + b + c for a, b, c, *_ in prompts)
    capacity = Capacity(
        longest=max(longest, 2),
        slots=slots,
        page=page,
        budget=slots + draw.randrange(6),
        prefixes=prefixes,
        drafts=drafts,
    ).within(windows)
    pages = capacity.slots * capacity.table if ample else capacity.most_pages + spare
    capacity = replace(capacity, pages=pages)
    assert capacity.room == capacity.longest
    schedule = Schedule(capacity)
    pool, groups = schedule.pool, capacity.groups
    entries: dict[tuple[int, int, int], tuple[str, tuple[int, ...]]] = {}
    requests = [
        Request(
            number=number,
            asked=GenerationRequest(
                prompt=(*shared[:begin], *(draw.randrange(3) for _ in range(own))),
                most=most,
                salt=f"tenant {salt}",
                priority=priority,
            ),
        )
        for number, (begin, own, most, salt, priority, *_) in enumerate(prompts)
    ]
    for step in range(2000):
        for request, (*_, cancelled, arrives) in zip(requests, prompts, strict=True):
            if arrives == step:
                schedule.add(request)
            request.cancelled |= cancelled is not None and step == arrives + cancelled
        guesses = {
            request.number: [draw.randrange(3) for _ in range(draw.randint(0, drafts))]
            for request in schedule.running
        }
        shares = schedule.next(guesses)
        assert sum(share.count for share in shares) <= capacity.most_tokens
        assert sum(share.rows for share in shares) <= capacity.rows
        parts = sum(-(-one.count // capacity.chunk_size) for one in shares if one.count > 1)
        assert parts <= capacity.chunks or all(one.count <= 1 + drafts for one in shares)
        for share in shares:
            request, tokens = share.request, (*share.request.tokens, *share.drafted)
            assert not share.drafted or share.ends
            assert share.count >= 1 and share.first + share.count <= len(tokens)
            for number, (group, one) in enumerate(zip(groups, request.held, strict=True)):
                assert len(one.pages) <= group.table, "a table has a column for each"
                window = group.window
                for at in range(max(share.first - window + 1, 0) if window else 0, share.first):
                    found = entries[number, one.at(at // page), at % page]
                    assert found == (request.asked.salt, tokens[: at + 1])
                for at in range(share.first, share.first + share.count):
                    written, users = one.at(at // page), pool.pools[number].users
                    assert users(written) == 1, "nobody writes to a page that another uses"
                    entries[number, written, at % page] = request.asked.salt, tokens[: at + 1]
        kept = {share.request.number: 0 for share in shares}
        for share in [share for share in shares if share.ends]:
            for guess in (*share.drafted, None):
                chosen = draw.randrange(3)
                share.request.took(chosen, -1.0)
                if share.request.ended is not None or chosen != guess:
                    break
                kept[share.request.number] += 1
        schedule.done(shares, kept)
        for share in shares:
            if share.request.ended is not None:
                schedule.release(share.request)
        for number, one in enumerate(pool.pools):
            used = {page for request in schedule.running for page in request.held[number].pages}
            assert one.used == len(used)
        if all(request.ended is not None for request in requests):
            break
    assert all(request.ended is not None for request in requests), "somebody is never served"
    assert pool.available == pool.pages
    if ample and len({one[4] for one in prompts}) == 1 and len({one[3] for one in prompts}) == 1:
        assert not schedule.preempted, "windowed layers have the pages that all slots need"
    for request in requests:
        if request.ended == "length":
            assert len(request.answer) == request.asked.most


def test_the_next_tokens_of_running_requests_come_before_prompts():
    schedule = Schedule(Capacity(longest=32, slots=3, page=4, pages=32, budget=6))
    requests = [
        Request(number=n, asked=GenerationRequest(prompt=(n,) * 9, most=4)) for n in range(3)
    ]
    for request in requests[:2]:
        schedule.add(request)
    counts: list[list[tuple[int, int]]] = []
    for _ in range(4):
        shares = schedule.next()
        counts.append([(share.request.number, share.count) for share in shares])
        schedule.done(shares)
        for share in shares:
            if share.first + share.count == share.request.count:
                share.request.took(1, 0.0)
        if len(counts) == 2:
            schedule.add(requests[2])
    assert counts == [[(0, 6)], [(0, 3), (1, 3)], [(0, 1), (1, 5)], [(0, 1), (1, 1), (2, 4)]]


def test_higher_priority_is_served_first_and_loses_its_pages_last():
    capacity = Capacity(longest=8, slots=2, page=2, pages=5, budget=8)
    schedule = Schedule(capacity)
    low = Request(number=0, asked=GenerationRequest(prompt=(1, 2, 3), most=5))
    high = Request(number=1, asked=GenerationRequest(prompt=(4, 5, 6), most=5, priority=1))
    schedule.add(low)
    schedule.add(high)
    ended: list[int] = []
    for _ in range(40):
        shares = schedule.next()
        schedule.done(shares)
        for share in shares:
            if share.first + share.count == share.request.count:
                share.request.took(1, 0.0)
                if share.request.ended:
                    ended.append(share.request.number)
                    schedule.release(share.request)
    assert ended == [1, 0] and schedule.preempted == 1


def test_tenants_and_prompts_have_their_own_digests():
    tokens = [1, 2, 3, 4, 5, 6]
    ours = digests(tokens, size=2, salt="a")
    assert len({*ours, *digests(tokens, size=2, salt="b")}) == 6
    assert digests([9, *tokens[1:]], size=2, salt="a")[1:] != ours[1:]
    assert digests(tokens, size=2, salt="a", before=ours[:1]) == ours


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 0}, "slots is 0; it is a whole number from 1 on"),
        ({"page": True}, "page is True; it is a whole number from 1 on"),
        ({"longest": 1}, "longest is 1; it is a whole number from 2 on"),
        ({"slots": 8, "budget": 4}, "budget is 4; each of 8 slots has a token in a step"),
        ({"pages": -1}, "pages is -1; it is a whole number from 1 on"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_sizes_that_are_not_usable_are_refused(wrong: dict[str, int], said: str):
    with pytest.raises(ArgumentError, match=said):
        Capacity(**wrong)


# A tenant that floods does not starve others; bounds are those of the publication.


class Served:
    """A schedule whose steps compute nothing."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.schedule = Schedule(capacity)
        self.numbers, self.tokens = itertools.count(), Counter[str]()

    def add(self, tenant: str, prompt: int, most: int, priority: int = 0) -> Request:
        number = next(self.numbers)
        asked = GenerationRequest(
            prompt=(number,) * prompt, most=most, salt=tenant, priority=priority
        )
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


@pytest.mark.long
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
