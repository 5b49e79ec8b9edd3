"""Guesses change how many steps an answer takes, and nothing of the answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from shardlib import models
from shardlib.errors import ArgumentError
from shardlib.serve.computing import Ngrams
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, GenerationRequest, Request, Sampling
from tests.serve.test_meshes import DENSE, VOCAB, forward, whole_pass

SIZES = Capacity(longest=48, slots=4, page=4, pages=48, budget=24)
INIT = models.build(DENSE)[0]
SMALL = models.build(replace(DENSE, layers=1, embed=16, heads=2, kv_heads=1))[0]


def asked(count: int) -> list[GenerationRequest]:
    """Requests of all kinds; prompts repeat themselves, as do answers of models without training."""
    draw = np.random.default_rng(3)
    found: list[GenerationRequest] = []
    for number in range(count):
        part = draw.integers(0, VOCAB, int(draw.integers(1, 5))).tolist()
        how = Sampling(
            temperature=(0.0, 0.7)[number % 2],
            top_p=0.9,
            seed=number,
            repetition=(1.0, 1.1)[number % 3 == 1],
            presence=0.5 * (number % 5 == 2),
        )
        found.append(
            GenerationRequest(
                prompt=tuple((part * 9)[: int(draw.integers(2, 14))]),
                most=int(draw.integers(1, 24)) * (number != 9),
                sampling=how,
                stop=frozenset({number % VOCAB}),
                top=number % 3,
                scored=number == 7,
            )
        )
    return found


def answers(engine: Engine, count: int = 14) -> list[Request]:
    requests = [engine.add(one) for one in asked(count)]
    requests[5].cancelled = True
    engine.run()
    assert engine.schedule.pool.available == engine.schedule.pool.pages
    return requests


@pytest.fixture(scope="module")
def plain() -> tuple[list[Request], int]:
    """Requests that were served without guesses, and steps that it took."""
    engine = Engine(INIT, forward, weights=3, capacity=SIZES)
    return answers(engine), engine.steps


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("draft", "pages"),
    [("n-grams", 48), ("n-grams", 14), ("itself", 48), ("itself", 14), ("another", 14)],
)
def test_answers_are_those_without_guesses(
    draft: str, pages: int, plain: tuple[list[Request], int]
):
    sizes = replace(SIZES, drafts=3, pages=pages)
    engine = Engine(INIT, forward, weights=3, capacity=sizes, check=False)
    if draft == "itself":
        engine.draft_with(INIT, forward, weights=3)
    if draft == "another":
        engine.draft_with(SMALL, forward, weights=4)
    engine.warm_up()
    compiled = engine.compute.compiled
    for _ in range(2):  # the second time over pages that are kept
        steps = engine.steps
        for found, right in zip(answers(engine), plain[0], strict=True):
            assert (found.answer, found.ended) == (right.answer, right.ended)
            assert found.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            assert [[token for token, _ in one.likeliest] for one in found.told] == [
                [token for token, _ in one.likeliest] for one in right.told
            ]
            assert len(found.scores) == len(right.scores)
        if draft == "itself" and pages == 48:
            assert engine.steps - steps < 0.5 * plain[1], "all guesses are right"
    assert engine.compute.compiled == compiled
    assert (engine.schedule.preempted > 0) == (pages < 48)


@pytest.mark.long
def test_tokens_are_as_likely_as_the_model_says():
    sizes = replace(SIZES, slots=16, drafts=2, pages=192, budget=64)
    engine = Engine(INIT, forward, weights=3, capacity=sizes, check=False)
    engine.draft_with(SMALL, forward, weights=4)
    prompt, draws, how = (5, 2, 7), 1500, Sampling(temperature=0.5, top_k=4)
    requests = [
        engine.add(GenerationRequest(prompt=prompt, most=3, sampling=replace(how, seed=seed)))
        for seed in range(draws)
    ]
    engine.run()
    counts = Counter(tuple(request.answer) for request in requests)
    logits = whole_pass(INIT)

    def odds(tokens: tuple[int, ...]) -> dict[int, float]:
        row = np.zeros((1, 8), np.int32)
        row[0, : len(tokens)] = tokens
        found = np.asarray(logits(row))[0, len(tokens) - 1].astype(np.float64) / 0.5
        best = np.argsort(-found)[:4]
        parts = np.exp(found[best] - found.max())
        return dict(zip(best.tolist(), (parts / parts.sum()).tolist(), strict=True))

    right = {
        (a, b, c): p * q * r
        for a, p in odds(prompt).items()
        for b, q in odds((*prompt, a)).items()
        for c, r in odds((*prompt, a, b)).items()
    }
    assert set(counts) <= set(right)
    often = [one for one in right if draws * right[one] >= 5]
    rest = draws - sum(counts[one] for one in often), draws * (1 - sum(right[o] for o in often))
    seen = [*(counts[one] for one in often), *([rest[0]] if rest[1] >= 5 else [])]
    wanted = np.asarray(
        [*(draws * right[one] for one in often), *([rest[1]] if rest[1] >= 5 else [])]
    )
    assert chisquare(seen, wanted * sum(seen) / wanted.sum()).pvalue > 1e-3


def test_what_followed_is_guessed():
    def after(tokens: list[int], most: int = 4) -> list[int]:
        request = Request(number=0, asked=GenerationRequest(prompt=tuple(tokens)))
        request.computed = len(tokens) - 1
        return list(Ngrams().guessed([request], most)[0])

    assert after([1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3]) == [9, 8, 7, 6]
    assert after([1, 2, 3, 4]) == []
    assert after([5, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert after([1, 2, 3, 4, 0, 9, 3, 4, 1, 7, 2, 3, 4]) == [0, 9, 3, 4]
    assert after([7]) == []


@pytest.mark.long
def test_what_cannot_guess_is_refused():
    engine = Engine(INIT, forward, weights=3, capacity=SIZES, check=False)
    with pytest.raises(ArgumentError, match="drafts of the capacity is 0"):
        engine.draft_with(SMALL, forward)
    engine = Engine(INIT, forward, weights=3, capacity=replace(SIZES, drafts=2), check=False)
    other = models.build(replace(DENSE, vocab_size=VOCAB + 3))[0]
    with pytest.raises(ArgumentError, match="it knows 64 tokens, and the model that is served 61"):
        engine.draft_with(other, forward)
    engine.add(GenerationRequest(prompt=(1, 2)))
    engine.step()
    with pytest.raises(ArgumentError, match="requests have a slot"):
        engine.draft_with(SMALL, forward)
