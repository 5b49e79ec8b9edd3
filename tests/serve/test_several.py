"""Several models in one process: each answers as it would alone, over its own pages."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

import shardlib
from shardlib.errors import ArgumentError
from shardlib.serve.engine import Engine, Models
from shardlib.serve.requests import Capacity, GenerationRequest
from tests.serve.test_engine import AXES, POSITIONS, own, own_weights
from tests.serve.test_own_cache import Recurrent


def engines() -> dict[str, Engine]:
    run = own(POSITIONS["counted"])
    return {
        "one": Engine(
            shardlib.tree(own_weights, AXES),
            run,
            weights=1,
            capacity=Capacity(longest=24, slots=2, page=4, pages=9, budget=8),
        ),
        "../two": Engine(
            shardlib.tree(own_weights, AXES),
            run,
            weights=2,
            capacity=Capacity(longest=16, slots=3, page=4, pages=6, budget=8),
        ),
        "cell": Engine(
            Recurrent,
            lambda model, tokens: model(tokens),
            capacity=Capacity(longest=20, slots=2, budget=8),
        ),
    }


@pytest.fixture(scope="module")
def served() -> dict[str, Engine]:
    return engines()


@pytest.mark.long
def test_answers_are_those_of_each_model_alone(served: dict[str, Engine]):
    draw, models = np.random.default_rng(0), Models(served)
    asked = [
        (
            name,
            GenerationRequest(
                prompt=tuple(draw.integers(0, 50, int(draw.integers(1, 8))).tolist()), most=7
            ),
        )
        for _ in range(6)
        for name in models
    ]
    alone = [served[name].generate([one.prompt], one.most)[0] for name, one in asked]
    requests = [models.add(name, one) for name, one in asked]
    ended = [event.request for event in iter_steps(models) if event.request.ended is not None]
    assert [request.answer for request in requests] == alone
    assert {id(one) for one in ended} == {id(one) for one in requests}
    for engine in models.values():
        assert engine.schedule.pool.available == engine.capacity.all_pages
    with pytest.raises(ArgumentError, match="20 tokens of the prompt and 4 of the answer are more"):
        models.add(
            "../two", GenerationRequest(prompt=(1,) * 20, most=4)
        )  # the pages are those of one model
    assert models.add("one", GenerationRequest(prompt=(1,) * 20, most=4)).ended is None
    models.run()


def iter_steps(models: Models):
    while any(one.schedule.waiting or one.schedule.running for one in models.values()):
        yield from models.step()


def test_time_is_shared_by_shares_and_not_saved_up(served: dict[str, Engine]):
    models, clock = Models(served, shares={"one": 3.0}), itertools.count()
    models.clock = lambda: next(clock)  # every step takes as long
    for name in ("one", "cell"):
        for n in range(9):
            models.add(name, GenerationRequest(prompt=(n,), most=18))

    def steps(count: int) -> Counter[str]:
        before = {name: engine.steps for name, engine in models.items()}
        for _ in range(count):
            models.step()
        return Counter({name: models[name].steps - before[name] for name in models})

    assert steps(40) == Counter({"one": 30, "cell": 10})
    for n in range(9):
        models.add("../two", GenerationRequest(prompt=(n,), most=14))
    assert steps(20) == Counter({"one": 12, "cell": 4, "../two": 4})
    models.run()


def test_what_cannot_be_served_together_is_refused(served: dict[str, Engine]):
    models = Models(served)
    with pytest.raises(ArgumentError, match=r"no model 'three'; there are 'one', '\.\./two'"):
        models.add("three", GenerationRequest(prompt=(1,)))
    with pytest.raises(ArgumentError, match="there is none"):
        Models({})
    with pytest.raises(ArgumentError, match="one engine has two names"):
        Models({"a": served["one"], "b": served["one"]})
    with pytest.raises(ArgumentError, match="the share of 'one' is 0; it is a number above 0"):
        Models(served, shares={"one": 0})
    with pytest.raises(ArgumentError, match="the share of 'x' is of no model"):
        Models(served, shares={"x": 1.0})
