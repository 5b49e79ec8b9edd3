"""The largest model in time, beside its neighbours planned one by one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import optax
import pytest

import shardlib
from shardlib.errors import ArgumentError
from shardlib.launch import booking
from shardlib.launch.booking import _largest, family
from shardlib.models import build, example_batch
from shardlib.models.config import TransformerConfig
from shardlib.models.presets import PRESETS, load

SMALL = TransformerConfig(
    name="small",
    vocab_size=512,
    layers=2,
    embed=256,
    heads=2,
    kv_heads=2,
    head_dim=128,
    mlp=1024,
    max_seq=512,
)


def _days(config: TransformerConfig, topology: str, tokens: float) -> float:
    init, loss = build(config)
    batch = example_batch(config, 64, 512)
    plan = shardlib.plan(init, loss, optax.adamw(3e-4), batch, topology=topology)
    return plan.run_cost(tokens).wall_seconds / booking.DAY


@pytest.mark.long
def test_the_largest_is_in_time_and_the_next_is_not():
    budget = booking.Budget(deadline=60.0)
    found = booking.fit_model(SMALL, topology="h100:1", budget=budget, batch=64, seq=512)
    best = found.best.config
    assert found.best.tokens == 20 * best.parameter_count() and found.proven
    assert 86400 * _days(best, "h100:1", found.best.tokens) <= 60
    (following,) = family(SMALL, best.parameter_count() + 1, best.parameter_count() * 8)[:1]
    assert 86400 * _days(following, "h100:1", 20 * following.parameter_count()) > 60
    text, data = str(found), json.loads(json.dumps(found.to_json()))
    assert "the largest of the family, proven" in text and data["proven"]
    assert data["best"]["parameters"] == best.parameter_count()
    assert all(len(line) <= 100 for line in text.splitlines())


def test_known_models_are_of_their_own_families():
    for name in ("llama2-7b", "llama2-70b", "llama3-8b", "llama3-405b", "gpt2-small"):
        known = PRESETS[name]
        assert isinstance(known, TransformerConfig)
        count = known.parameter_count()
        (same,) = (one for one in family(known, 0.97 * count, 1.03 * count) if _same(one, known))
        assert same.parameter_count() == count


def _same(one: TransformerConfig, known: TransformerConfig) -> bool:
    return replace(one, name=known.name) == known


def test_the_search_finds_the_last_that_meets():
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randint(1, 60)
        last, start = draw.randint(-1, count - 1), draw.randrange(count)
        asked: list[int] = []

        def meets(at: int, last: int = last, asked: list[int] = asked, count: int = count) -> bool:
            assert 0 <= at < count
            asked.append(at)
            return at <= last

        assert _largest(count, start, meets) == (None if last < 0 else last)
        assert len(asked) <= 14


@pytest.mark.parametrize("name", ["mixtral-8x7b", "tests.cli.perceptron:make"])
def test_what_names_no_family_is_said(name: str):
    with pytest.raises(ArgumentError, match="names no family"):
        family(load(name), 1e6, 1e9)


def test_a_machine_that_trains_nothing_in_time_is_said():
    budget = booking.Budget(deadline=1e-6)
    with pytest.raises(ArgumentError, match="no model of the family of llama3-8b is as small"):
        booking.fit_model("llama3-8b", topology="h100:1", budget=budget, batch=8, seq=128)


def test_tokens_and_tokens_a_parameter_contradict(capsys: pytest.CaptureFixture[str]):
    from shardlib.cli import main

    words = "fit-model -t h100:8 -b 8 -s 64 --deadline 1d --tokens 1T --tokens-per-parameter 20"
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2 and "contradict each other" in capsys.readouterr().err
