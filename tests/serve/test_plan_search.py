"""The chosen plan beside all others, priced one by one and simulated request by request."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardlib.errors import ArgumentError, InfeasibleError, PinError
from shardlib.serve.cost import StepWork
from shardlib.serve.plan import ServingPlan
from shardlib.serve.requests import Capacity, Request
from shardlib.serve.scheduling import Schedule
from shardlib.serve.search import all_choices, plan_served, search
from shardlib.serve.space import BUSY, ServingProblem
from tests.serve.small_jobs import asked


def one_by_one(given: ServingProblem) -> list[tuple[float, float, float]]:
    """(tokens a second and chip, seconds a token, seconds to the first) of every choice."""
    load, found = given.workload, []
    for tensor, chunk in itertools.product(given.tensors(), given.chunks()):
        replica = given.replica(tensor)
        assert replica is not None
        for batch in itertools.count(1):
            if batch > 4096 or replica.short(batch, chunk) > 0:
                break
            share = batch * load.prompt / load.output / chunk
            if share > BUSY:
                break
            without = replica.pricing.seconds(StepWork(rows=float(batch), context=load.context))
            full = StepWork(
                rows=float(batch),
                context=load.context,
                prompt=float(chunk),
                before=load.prompt / 2,
                ended=chunk / load.prompt,
            )
            beside = float(replica.pricing.seconds(full))
            tpot = (1 - share) * float(without) + share * beside
            service = math.ceil(load.prompt / chunk) * beside
            ttft = tpot / 2 + service + service * share / (2 * (1 - share))
            found.append((batch / tpot / tensor, tpot, ttft))
    return found


@pytest.mark.parametrize(
    ("limits", "objective"),
    [
        ({}, "throughput"),
        ({"tpot": 0.02}, "throughput"),
        ({"tpot": 0.03, "ttft": 0.2}, "throughput"),
        ({}, "latency"),
        ({"ttft": 0.1}, "latency"),
    ],
)
def test_no_choice_is_better(limits: dict[str, float], objective: str):
    given = asked("llama3-8b", "v5e:2x4", objective=objective, **limits)
    all_choices = [
        one
        for one in one_by_one(given)
        if one[1] <= limits.get("tpot", math.inf) and one[2] <= limits.get("ttft", math.inf)
    ]
    plan = plan_served(given)
    estimate = plan.estimate
    if objective == "latency":
        assert estimate.tpot_seconds == pytest.approx(min(one[1] for one in all_choices))
    else:
        assert estimate.output_tokens_per_second_per_chip == pytest.approx(
            max(one[0] for one in all_choices)
        )
    assert plan.search.kept == len(all_choices) and plan.search.gap == 0
    # and the curve is the undominated part of them
    front = {
        (round(rate, 9), round(tpot, 12))
        for rate, tpot, _ in all_choices
        if not any(a >= rate and b <= tpot and (a > rate or b < tpot) for a, b, _ in all_choices)
    }
    assert {
        (round(one.output_tokens_per_second_per_chip, 9), round(one.tpot_seconds, 12))
        for one in plan.pareto()
    } == front


def simulated(plan: ServingPlan, *, rate: float | None, count: int) -> dict[str, float]:
    """Requests through the schedule of the engine, with the seconds of each step as priced."""
    load, choice = plan.workload, plan.choice
    assert plan.source is not None
    replica = plan.source.replica(choice.tensor)
    assert replica is not None
    sizes = Capacity(
        longest=load.tokens,
        slots=choice.batch,
        page=choice.page,
        pages=choice.pages,
        budget=choice.batch + choice.chunk,
        prefixes=False,
    )
    draw, schedule = np.random.default_rng(1), Schedule(sizes)
    gaps = draw.exponential(1 / rate, count) if rate else np.zeros(count)
    arrivals = np.cumsum(gaps)
    tokens = tuple([1] * load.prompt)
    now, came, first, gone = 0.0, 0, dict[int, float](), dict[int, float]()
    requests: dict[int, Request] = {}
    while len(gone) < count:
        while came < count and arrivals[came] <= now:
            requests[came] = Request(number=came, asked=_asked(tokens, load.output))
            schedule.add(requests[came])
            came += 1
        shares = schedule.next()
        if not shares:
            now = float(arrivals[came])
            continue
        rows = sum(one.count == 1 and one.request.answer != [] for one in shares)
        prompt = sum(one.count for one in shares) - rows
        alone = StepWork(rows=float(rows), context=load.context)
        if prompt:
            alone = StepWork(
                rows=float(rows),
                context=load.context,
                prompt=float(choice.chunk),
                before=load.prompt / 2,
                ended=prompt / load.prompt,
            )
        now += float(replica.pricing.seconds(alone))
        schedule.done(shares)
        for share in shares:
            if share.ends:
                request = share.request
                request.took(2, 0.0)
                first.setdefault(request.number, now)
                if request.ended is not None:
                    gone[request.number] = now
                    schedule.release(request)
    kept = range(count // 5, count - count // 5)
    spent = [(gone[n] - first[n]) / (load.output - 1) for n in kept]
    window = sorted(gone.values())
    middle = window[count // 5 : count - count // 5]
    return {
        "tpot": float(np.mean(spent)),
        "ttft": float(np.mean([first[n] - arrivals[n] for n in kept])),
        "requests": (len(middle) - 1) / (middle[-1] - middle[0]),
    }


def _asked(tokens: tuple[int, ...], most: int):
    from shardlib.serve.requests import GenerationRequest as Request_

    return Request_(prompt=tokens, most=most)


def test_a_server_at_its_limit_does_what_was_planned():
    plan = plan_served(asked("llama3-8b", "h100:1", prompt=256, output=64, pins={"batch": 48}))
    found = simulated(plan, rate=None, count=600)
    assert found["requests"] == pytest.approx(plan.estimate.requests_per_second, rel=0.1)
    assert found["tpot"] == pytest.approx(plan.estimate.tpot_seconds, rel=0.15)


def test_a_server_with_a_rate_does_what_was_planned():
    plan = plan_served(asked("llama3-8b", "h100:1", prompt=256, output=64, rate=20.0))
    found = simulated(plan, rate=20.0, count=800)
    assert found["requests"] == pytest.approx(20.0, rel=0.1)
    assert found["tpot"] == pytest.approx(plan.estimate.tpot_seconds, rel=0.2)
    assert found["ttft"] == pytest.approx(plan.estimate.ttft_seconds, rel=0.4)


def test_a_rate_takes_the_fewest_chips():
    few = plan_served(asked("llama3-8b", "v5e:4x4", rate=2.0))
    more = plan_served(asked("llama3-8b", "v5e:4x4", rate=60.0))
    assert few.estimate.chips < more.estimate.chips <= 16
    used = few.choice.tensor * few.choice.replicas
    assert few.estimate.chips == used
    given = asked("llama3-8b", "v5e:4x4", rate=2.0)
    assert min(all_choices(given).choices.chips) == used


def test_pins_are_kept_and_never_better():
    free = search(asked("llama3-8b", "v5e:4x4")).best()
    for pins in ({"tensor": 4}, {"batch": 8}, {"chunk": 256}, {"page": 64}, {"replicas": 2}):
        point = search(asked("llama3-8b", "v5e:4x4", pins)).best()
        assert all(getattr(point, name, value) == value for name, value in pins.items())
        assert point.output_tokens_per_second_per_chip <= (
            free.output_tokens_per_second_per_chip * (1 + 1e-9)
        )


@pytest.mark.parametrize(
    ("machine", "pins", "load", "said"),
    [
        ("v5e:2x2", {}, {}, "a device lacks"),
        ("v5e:16x16", {}, {"tpot": 1e-4}, "tpot 100 µs is asked for"),
        ("v5e:16x16", {}, {"ttft": 1e-4}, "ttft 100 µs is asked for"),
        ("v5e:16x16", {}, {"rate": 1e6}, "requests a second at most"),
    ],
)
def test_what_cannot_be_served_says_what_can(
    machine: str, pins: dict[str, int], load: dict[str, float], said: str
):
    with pytest.raises(InfeasibleError, match=said):
        plan_served(asked("llama3-70b", machine, pins, **load))


@pytest.mark.parametrize(
    "pins", [{"tensor": 3}, {"batch": 4096, "chunk": 64}, {"replicas": 99, "tensor": 4}]
)
def test_pins_that_leave_nothing_are_errors(pins: dict[str, int]):
    with pytest.raises((PinError, InfeasibleError)):
        plan_served(asked("llama3-8b", "v5e:4x4", pins))


@pytest.mark.parametrize(
    "load",
    [
        {"prompt": 0},
        {"prompt": True},
        {"output": -1},
        {"output": 2.5},
        {"rate": math.nan},
        {"rate": -1.0},
        {"ttft": 0.0},
        {"tpot": math.inf},
        {"tpot": "30ms"},
        {"objective": "speed"},
        {"weights": "int3"},
        {"cache": "float64"},
    ],
)
def test_requests_that_ask_for_nothing_are_errors(load: dict[str, object]):
    with pytest.raises(ArgumentError):
        asked("llama3-8b", "v5e:4x4", **load)


@pytest.mark.parametrize("lengths", [(512, 8), (64, 32), (2048, 1), (1, 512)])
def test_no_pinned_chunk_of_the_space_is_better(lengths: tuple[int, int]):
    prompt, output = lengths
    free = search(asked("llama3-8b", "v6e:2x2", prompt=prompt, output=output)).best()
    for chunk in (64, 96, 512, 2048, 4096, 6144, 8192):
        try:
            pins = {"chunk": chunk}
            point = search(asked("llama3-8b", "v6e:2x2", pins, prompt=prompt, output=output)).best()
        except (PinError, InfeasibleError):
            continue
        assert point.output_tokens_per_second_per_chip <= (
            free.output_tokens_per_second_per_chip * (1 + 1e-9)
        )
