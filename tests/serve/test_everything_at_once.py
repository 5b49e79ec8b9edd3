"""Cancelled, late, preempted, guessed, scored and formed: answers are those of each request alone, or
a beginning of them, and all pages and slots come back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardlib
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, Form, GenerationRequest, Request, Sampling
from tests.serve.test_engine import AXES, POSITIONS, VOCAB, own, own_weights

pytest.importorskip("llguidance", reason="needs the extra `structured`")

TOKENS = [bytes([48 + token]) for token in range(VOCAB - 1)] + [b""]
SIZES = Capacity(longest=24, slots=3, page=4, pages=9, budget=14, drafts=2, tenants={"b": 2.0})


def made(sizes: Capacity) -> Engine:
    engine = Engine(
        shardlib.tree(own_weights, AXES), own(POSITIONS["counted"]), capacity=sizes, check=False
    )
    engine.spell(TOKENS, {VOCAB - 1})
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    """With few pages and guesses."""
    return made(SIZES)


@pytest.fixture(scope="module")
def plain() -> Engine:
    """One request at a time, without any of it."""
    return made(Capacity(longest=24, slots=1, page=4, pages=6, budget=24, prefixes=False))


@dataclass(frozen=True)
class Act:
    """What a user does with a request: after so many steps it comes, and is cancelled."""

    asked: GenerationRequest
    comes: int
    cancelled: int | None


ASKED = st.builds(
    lambda begin, own, most, how, kind, more: GenerationRequest(
        prompt=(*(5, 2, 7, 5, 2, 7, 5, 2)[:begin], *own),
        most=most,
        sampling=how,
        form=Form.regex("[0-9]{2,9}") if kind == "form" else None,
        scored=kind == "scored",
        stop=frozenset({3}) if kind == "stop" else frozenset(),
        salt="ab"[more % 2],
        priority=more % 3 - 1,
        seconds=(None, None, 4.0, 9.0)[more % 4],
        top=more % 3,
    ),
    st.integers(0, 8),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 10),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        seed=st.integers(0, 3),
        frequency=st.sampled_from([0.0, 1.0]),
    ),
    st.sampled_from(["plain", "form", "scored", "stop"]),
    st.integers(0, 11),
)
ACTS = st.lists(
    st.builds(Act, ASKED, st.integers(0, 12), st.sampled_from([None, None, 0, 2, 5])),
    min_size=1,
    max_size=10,
)


@pytest.mark.long
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ACTS)
def test_answers_are_those_alone_and_everything_comes_back(
    engine: Engine, plain: Engine, acts: list[Act]
):
    now, requests, heard = [0.0], dict[int, Request](), dict[int, list[int]]()
    engine.clock = lambda: now[0]
    for step in range(600):
        for number, act in enumerate(acts):
            if act.comes == step:
                requests[number] = engine.add(act.asked)
            if act.cancelled is not None and number in requests:
                requests[number].cancelled |= step >= act.comes + act.cancelled
        numbers = {id(request): number for number, request in requests.items()}
        for event in engine.step():
            if event.token is not None:
                heard.setdefault(numbers[id(event.request)], []).append(event.token)
        now[0] += 1.0
        schedule = engine.schedule
        held = [page for one in schedule.running for page in set(one.held[0].pages)]
        assert schedule.pool.used == len(set(held))
        if len(requests) == len(acts) and all(one.ended for one in requests.values()):
            break
    assert not engine.schedule.running and not engine.schedule.waiting
    assert engine.schedule.pool.available == SIZES.pages
    for number, act in enumerate(acts):
        found, right = requests[number], alone(plain, act.asked)
        assert heard.get(number, []) == found.answer, "every token is told, once"
        if found.ended in ("cancelled", "late"):
            assert found.answer == right.answer[: len(found.answer)]
            assert act.cancelled is not None or act.asked.seconds is not None
        else:
            assert (found.answer, found.ended) == (right.answer, right.ended)
            assert found.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            assert [one.token for one in found.scores] == [one.token for one in right.scores]


@cache
def alone(plain: Engine, asked: GenerationRequest) -> Request:
    """A request that is served by itself."""
    request = plain.add(replace(asked, seconds=None))
    plain.run()
    return request
