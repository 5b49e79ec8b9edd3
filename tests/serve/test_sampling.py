"""Choices follow the published formulas, written once more in NumPy, and their distributions.

Penalties: `RepetitionPenaltyLogitsProcessor` of transformers; frequency and presence as OpenAI's
documentation has them, "mu[j] -= c[j] * alpha_frequency + float(c[j] > 0) * alpha_presence".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

from shardlib.errors import ArgumentError
from shardlib.serve.requests import GenerationRequest, Request, Sampling
from shardlib.serve.sampling import Chosen, Row, choices, choose, edited, left

VOCAB, LONGEST = 37, 16
CHOOSE, EDITED, LEFT = jax.jit(choose), jax.jit(edited), jax.jit(left)


def row(prompt: Sequence[int], answer: Sequence[int], drafted: Sequence[int] = (), **asked: Any):
    request = Request(number=0, asked=GenerationRequest(prompt=tuple(prompt), **asked))
    request.answer = list(answer)
    return Row(request=request, drafted=tuple(drafted))


def arrays(*rows: Row | None):
    return choices(rows, vocab=VOCAB, longest=LONGEST)


def penalised(logits: np.ndarray, row: Row) -> np.ndarray:
    """One row of logits, as the publications say."""
    asked, found = row.request.asked, logits.astype(np.float64).copy()
    how = asked.sampling
    for token, bias in how.bias.items():
        found[token] += bias
    said = [*asked.prompt, *row.request.answer, *row.drafted]
    for token in set(said):
        found[token] = (
            found[token] * how.repetition if found[token] < 0 else found[token] / how.repetition
        )
    answer = said[len(asked.prompt) :]
    for token in range(VOCAB):
        times = answer.count(token)
        found[token] -= times * how.frequency + float(times > 0) * how.presence
    for token in [*how.barred, *(asked.stop if len(answer) < asked.least else ())]:
        found[token] = -np.inf
    return found


def warped(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, one after the other, each over what
    the one before has left, as `transformers` runs its warpers.
    """
    scores = logits / how.temperature
    if how.top_k:
        scores = np.where(scores < np.sort(scores)[-min(how.top_k, VOCAB)], -np.inf, scores)
    order = np.argsort(scores)  # TopPLogitsWarper: rising; the tail of 1 - top_p is left out
    tail = np.cumsum(softmax(scores)[order])
    out = order[tail <= 1 - how.top_p]
    scores[[token for token in out if token != order[-1]]] = -np.inf
    odds = softmax(scores)
    return softmax(np.where(odds < how.min_p * odds.max(), -np.inf, scores))


TOKENS = st.integers(0, VOCAB - 1)
ROWS = st.builds(
    lambda prompt, answer, drafted, how, stop, least: row(
        prompt, answer, drafted, sampling=how, stop=frozenset(stop), least=least, most=9
    ),
    st.lists(TOKENS, min_size=1, max_size=6),
    st.lists(TOKENS, max_size=6),
    st.lists(TOKENS, max_size=3),
    st.builds(
        Sampling,
        frequency=st.floats(-2, 2),
        presence=st.floats(-2, 2),
        repetition=st.floats(0.1, 4),
        bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
        barred=st.frozensets(TOKENS, max_size=4),
    ),
    st.lists(TOKENS, max_size=3),
    st.integers(0, 8),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=3, max_size=3), st.integers(0, 99))
def test_logits_change_as_published(rows: list[Row], seed: int):
    logits = np.random.default_rng(seed).normal(size=(3, VOCAB)).astype(np.float32) * 4
    found = np.asarray(EDITED(logits, arrays(*rows).edits))
    for at, one in enumerate(rows):
        np.testing.assert_allclose(found[at], penalised(logits[at], one), rtol=2e-5, atol=2e-5)
    best = np.asarray(CHOOSE(logits, arrays(*rows)).token)
    assert all(found[at, best[at]] == found[at].max() for at in range(3))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.2, 3),
    st.integers(0, VOCAB),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
    st.integers(0, 99),
)
def test_what_is_left_to_choose_from_is_what_transformers_leaves(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
):
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.random.default_rng(seed).normal(size=(1, VOCAB)).astype(np.float32)
    right = warped(logits[0].astype(np.float64), how)
    found = softmax(np.asarray(LEFT(logits, arrays(row([1], [], sampling=how))), np.float64)[0])
    if ((right > 0) == (found > 0)).all():
        np.testing.assert_allclose(found, right, atol=2e-5)
    else:  # a sum of probabilities that rounding puts on the other side of a limit
        edge = np.flatnonzero((right > 0) != (found > 0))
        odds = softmax(logits[0] / temperature)
        assert (
            len(edge) == 1
            and min(
                abs(odds[odds >= odds[edge[0]]].sum() / scale - top_p)
                for scale in (1.0, np.sort(odds)[::-1][: top_k or VOCAB].sum())
            )
            < odds[edge[0]] + 1e-5
        )


def test_tokens_are_drawn_as_often_as_they_are_likely():
    how = Sampling(temperature=0.8, top_k=12, frequency=0.7, bias={3: 1.5}, barred=frozenset({5}))
    logits = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32)
    one = row([4, 4, 9], [9, 3, 3], sampling=how)
    right = warped(penalised(logits, one), how)
    counts, draws, rows = np.zeros(VOCAB), 4000, 200
    for first in range(0, draws, rows):
        given_rows = [
            row([4, 4, 9], [9, 3, 3], sampling=Sampling(**{**vars(how), "seed": first + n}))
            for n in range(rows)
        ]
        tokens = np.asarray(CHOOSE(np.tile(logits, (rows, 1)), arrays(*given_rows)).token)
        counts += np.bincount(tokens, minlength=VOCAB)
    assert not counts[right == 0].any()
    assert chisquare(counts[right > 0], draws * right[right > 0]).pvalue > 1e-3


def test_logarithms_are_those_of_the_model_itself():
    logits = np.random.default_rng(1).normal(size=(2, VOCAB)).astype(np.float32)
    how = Sampling(temperature=2.0, bias={7: 50.0})
    found: Chosen = CHOOSE(logits, arrays(row([1], [], sampling=how, top=20), None))
    right = log_softmax(logits.astype(np.float64), axis=-1)
    assert int(found.token[0]) == 7
    assert np.asarray(found.logprob)[0] == pytest.approx(right[0, 7], abs=1e-5)
    order = np.argsort(-right[0])[:20]
    assert np.asarray(found.likeliest)[0].tolist() == order.tolist()
    assert np.asarray(found.logprobs)[0] == pytest.approx(right[0, order], abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"frequency": 2.5}, "frequency is 2.5; it is a number from -2 to 2"),
        ({"presence": float("nan")}, "presence is nan"),
        ({"repetition": 0}, "repetition is 0; it is a number above 0"),
        ({"bias": {3: 101}}, "bias of token 3 is 101; it is a number from -100 to 100"),
        ({"bias": dict.fromkeys(range(301), 1.0)}, "301 tokens have a bias; at most 300 may"),
        ({"seed": True}, "seed is True"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_settings_that_are_not_usable_are_refused(wrong: dict[str, Any], said: str):
    with pytest.raises(ArgumentError, match=said):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (GenerationRequest(prompt=(1,), top=21), "top is 21; from 0 to 20"),
        (
            GenerationRequest(prompt=(1,), least=17),
            "least is 17; it is a whole number from 0 to most",
        ),
        (GenerationRequest(prompt=(1,), sampling=Sampling(bias={VOCAB: 1.0})), "bias has 37"),
        (
            GenerationRequest(prompt=(1,), sampling=Sampling(barred=frozenset({-1}))),
            "barred has -1",
        ),
        (
            GenerationRequest(prompt=(1,), sampling=Sampling(barred=frozenset(range(VOCAB)))),
            "no token is left to choose from",
        ),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_requests_for_what_there_is_not_are_refused(asked: GenerationRequest, said: str):
    assert said in "\n".join(asked.failures(vocab=VOCAB, room=64))
