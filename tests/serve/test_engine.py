"""Forward passes that somebody might bring, requests, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib
from shardlib.annotation.model import read
from shardlib.errors import AnnotationError, ArgumentError, ModelError
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, GenerationRequest, Sampling

VOCAB = 61
AXES = {
    "embed": ("vocab", "embed"),
    "qkv": ("embed", None, "heads", None),
    "out": ("embed", "vocab"),
}


def own_weights(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, 16)),
        "qkv": jax.random.normal(keys[1], (16, 3, 2, 8)) / 4,
        "out": jax.random.normal(keys[2], (16, VOCAB)) / 4,
    }


def own(positions: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A forward pass that somebody might bring, with positions of its own, [seq, 16]."""

    def run(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens] + positions(tokens)
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, params["qkv"][:, part]) for part in range(3))
        mixed = shardlib.attention(q, k, v)
        return (x + mixed.reshape(*mixed.shape[:2], 16)) @ params["out"]

    return run


def waves(positions: Any) -> Any:
    return jnp.sin(positions[..., None] * 0.7 + jnp.arange(16.0))


TABLE = np.sin(np.arange(64)[:, None] * 0.7 + np.arange(16.0)).astype(np.float32)
POSITIONS = {
    "counted": lambda tokens: waves(jnp.arange(tokens.shape[1], dtype=jnp.float32)),
    "a table of NumPy's": lambda tokens: TABLE[: tokens.shape[1]],
    "rows of a table": lambda tokens: jnp.asarray(TABLE)[: tokens.shape[1]],
}


@pytest.mark.long
@pytest.mark.parametrize("how", POSITIONS)
def test_positions_are_found_however_they_are_made(how: str):
    init = shardlib.tree(own_weights, AXES)
    run = own(POSITIONS[how])
    engine = Engine(init, run, capacity=Capacity(longest=24, slots=2, page=4, budget=8))
    model = read(init)
    params, _ = model.init(0)
    whole = np.asarray([[5, 7, 11, 13, 17, 19, 23, 29]])
    (found,) = engine.generate([whole[0, :7].tolist()], 1)
    assert found == [int(np.argmax(run(params, whole)[0, 6]))]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            own(lambda tokens: waves(jnp.cumsum(jnp.ones_like(tokens), axis=1) - 1)),
            "with a cache the logits of token 1 are off",
        ),
        (
            lambda params, tokens: jnp.cumsum(params["embed"][tokens], axis=1) @ params["out"],
            "calls shardlib.attention nowhere",
        ),
        (
            lambda params, tokens: (
                shardlib.attention(*[params["embed"][tokens][:, :, None]] * 3, causal=False)[
                    :, :, 0
                ]
                @ params["out"]
            ),
            "is not causal",
        ),
        (
            lambda params, tokens: (
                jax.lax.cond(
                    tokens.sum() >= 0,
                    own(POSITIONS["counted"]),
                    lambda params, tokens: params["embed"][tokens] @ params["out"],
                    params,
                    tokens,
                )
                + own(POSITIONS["counted"])(params, tokens)
            ),
            "1 of 2 calls of shardlib.attention stand in a branch",
        ),
        (lambda params, tokens: params["embed"][tokens].sum(), "gives \\[\\]; logits are"),
        (
            lambda params, tokens: {"logits": own(POSITIONS["counted"])(params, tokens)},
            "gives a dict; logits are one array",
        ),
        (
            lambda params, tokens: (
                own(POSITIONS["counted"])(params, tokens)
                * (1 + params["embed"][tokens].mean(axis=(0, 1)).sum())
            ),
            "looks at other tokens",
        ),
        (
            lambda params, tokens: (
                own(POSITIONS["counted"])(params, tokens)
                - params["embed"][tokens].mean(axis=0, keepdims=True) @ params["out"]
            ),
            "looks at other tokens, other rows",
        ),
    ],
    ids=[
        "positions by sums",
        "no attention",
        "not causal",
        "in a branch",
        "no logits",
        "a tree",
        "a mean over tokens",
        "a mean over rows",
    ],
)
def test_what_a_cache_cannot_serve_is_refused(run: Callable[..., jax.Array], said: str):
    with pytest.raises(ModelError, match=said):
        Engine(
            shardlib.tree(own_weights, AXES), run, capacity=Capacity(longest=24, slots=2, page=4)
        )


def test_tokens_that_a_model_never_says_may_have_no_logits():
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        logits = own(POSITIONS["counted"])(params, tokens)
        return jnp.where(jnp.arange(logits.shape[-1]) % 2, logits, -jnp.inf)

    engine = Engine(
        shardlib.tree(own_weights, AXES), run, capacity=Capacity(longest=24, slots=2, page=4)
    )
    answers = engine.generate(np.asarray([[5, 2, 7], [1, 1, 1]]), 5)
    assert answers == engine.generate([[5, 2, 7], [1, 1, 1]], 5)
    assert all(token % 2 for answer in answers for token in answer)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Of a model of one call of attention."""
    return Engine(
        shardlib.tree(own_weights, AXES),
        own(POSITIONS["counted"]),
        capacity=Capacity(longest=24, slots=3, page=4, budget=8),
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (GenerationRequest(prompt=()), "the prompt is empty"),
        (
            GenerationRequest(prompt=(VOCAB,)),
            "the prompt has 61; tokens are whole numbers from 0 to 60",
        ),
        (GenerationRequest(prompt=(1,), stop=frozenset({-1})), "stop has -1"),
        (
            GenerationRequest(prompt=(1,) * 20, most=5),
            "20 tokens of the prompt and 5 of the answer are more",
        ),
        (GenerationRequest(prompt=(1,), most=-1), "most is -1"),
    ],
    ids=["empty", "unknown token", "unknown stop", "too long", "no answer"],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: Engine, asked: GenerationRequest, said: str
):
    with pytest.raises(ArgumentError, match=said):
        engine.add(asked)


def test_a_choice_depends_on_its_own_seed_alone(engine: Engine):
    how = Sampling(temperature=1.0, top_p=0.9, seed=11)
    (alone,) = engine.generate([[3, 1, 4]], 9, sampling=how)
    others = [
        engine.add(
            GenerationRequest(prompt=(n, 2), most=12, sampling=Sampling(temperature=2.0, seed=n))
        )
        for n in range(5)
    ]
    assert engine.generate([[3, 1, 4]], 9, sampling=how) == [alone]
    assert len({tuple(one.answer) for one in others}) > 1
    assert engine.generate([[3, 1, 4]], 9, sampling=replace(how, seed=12)) != [alone]


def test_tokens_that_are_left_out_are_never_chosen(engine: Engine):
    params, _ = read(shardlib.tree(own_weights, AXES)).init(0)
    prompt = [3, 1, 4]
    logits = np.asarray(own(POSITIONS["counted"])(params, np.asarray([prompt]))[0, -1]) / 1.5
    order = np.argsort(-logits)
    odds = np.exp(logits - logits.max())[order] / np.exp(logits - logits.max()).sum()
    before = np.cumsum(odds) - odds
    for settings, left in (
        ({"top_k": 3}, order[:3]),
        ({"top_p": 0.4}, order[before < 0.4]),
        ({"min_p": 0.3}, order[odds >= 0.3 * odds[0]]),
    ):
        found = {
            engine.generate([prompt], 1, sampling=Sampling(temperature=1.5, seed=seed, **settings))[
                0
            ][0]
            for seed in range(60)
        }
        assert found <= {*left.tolist()} and len(found) > 1


def test_a_stream_that_nobody_reads_on_gives_its_pages_back(engine: Engine):
    stream = engine.stream([3, 1, 4], 15)
    first = [next(stream), next(stream)]
    stream.close()
    engine.run()
    assert engine.schedule.pool.available == engine.schedule.pool.pages
    assert engine.generate([[3, 1, 4]], 2) == [first]


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it(engine: Engine):
    (answer,) = engine.generate([[3, 1, 4]], 6)
    stop = answer[2]
    request = engine.add(GenerationRequest(prompt=(3, 1, 4), most=6, stop=frozenset({stop})))
    engine.run()
    assert request.answer == answer[: answer.index(stop)] and request.ended == "stop"


def test_other_weights_wait_for_answers_that_have_begun(engine: Engine):
    first, second = (read(shardlib.tree(own_weights, AXES)).init(seed) for seed in (0, 5))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    old = engine.generate([prompt], 9)[0]
    begun = engine.add(GenerationRequest(prompt=tuple(prompt), most=9))
    while not begun.answer:
        engine.step()
    engine.replace(second)
    later = engine.add(GenerationRequest(prompt=tuple(prompt), most=9))
    assert engine.replacing
    engine.run()
    assert begun.answer == old and not engine.replacing
    assert later.answer != old and later.reused == 0, "pages of the old weights"
    assert engine.generate([prompt], 9)[0] == later.answer
    own_engine = Engine(
        shardlib.tree(own_weights, AXES),
        own(POSITIONS["counted"]),
        weights=second,
        capacity=engine.capacity,
    )
    assert own_engine.generate([prompt], 9)[0] == later.answer
    engine.replace(first)
    assert engine.generate([prompt], 9)[0] == old
    with pytest.raises(ArgumentError, match="not those of the model"):
        engine.replace((first[0] | {"embed": np.zeros((61, 8), np.float32)}, first[1]))


def test_prompts_have_logarithms_too(engine: Engine):
    params, _ = read(shardlib.tree(own_weights, AXES)).init(0)
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5)
    engine.generate([prompt], 1)  # its pages are kept, and are of no use to a prompt with scores
    others = [engine.add(GenerationRequest(prompt=(n, 2), most=12)) for n in range(2)]
    request = engine.add(GenerationRequest(prompt=prompt, most=2, top=3, scored=True))
    alone = engine.add(GenerationRequest(prompt=prompt, most=0, top=3, scored=True))
    engine.run()
    assert (alone.answer, alone.ended) == ([], "length")
    assert [one.logprob for one in alone.scores] == pytest.approx(
        [one.logprob for one in request.scores], abs=1e-5
    )
    assert engine.generate([prompt], 0) == [[]]
    right = np.asarray(
        jax.nn.log_softmax(
            own(POSITIONS["counted"])(params, np.asarray([request.tokens]))[0], axis=-1
        )
    )
    told = [*request.scores, *request.told]
    assert [one.token for one in told] == request.tokens[1:] and len(request.scores) == 8
    for at, one in enumerate(told):
        assert one.logprob == pytest.approx(right[at, one.token], abs=1e-5)
        order = np.argsort(-right[at])[:3]
        assert [token for token, _ in one.likeliest] == order.tolist()
        assert [each for _, each in one.likeliest] == pytest.approx(right[at, order], abs=1e-5)
    assert all(len(other.answer) == 12 for other in others)


def test_answers_to_one_prompt_share_what_it_fills(engine: Engine):
    prompt = tuple((7 * n + 3) % VOCAB for n in range(10))
    how = Sampling(temperature=1.5, seed=2**32 - 1)
    alone = [
        engine.generate([prompt], 5, sampling=replace(how, seed=seed))[0]
        for seed in (2**32 - 1, 0, 1)
    ]
    asked = GenerationRequest(prompt=(*prompt[1:], 5, 5), most=5, sampling=how)
    before = engine.steps
    requests = engine.add_several(asked, 3)
    shared = False
    while engine.schedule.waiting or engine.schedule.running:
        engine.step()
        held = [set(request.held[0].pages[:2]) for request in engine.schedule.running]
        shared |= len(held) == 3 and held[0] == held[1] == held[2]
    assert shared and [request.reused for request in requests] == [0, 8, 8]
    assert engine.steps > before and len({tuple(one.answer) for one in requests}) == 3
    asked = replace(asked, prompt=prompt)
    requests = engine.add_several(asked, 3)
    engine.run()
    assert [request.answer for request in requests] == alone


def test_penalties_and_least_tokens_are_those_of_the_answer_so_far(engine: Engine):
    params, _ = read(shardlib.tree(own_weights, AXES)).init(0)
    prompt, how = (3, 1, 4), Sampling(presence=2.0, repetition=1.3)
    (plain,) = engine.generate([prompt], 9)
    request = engine.add(
        GenerationRequest(prompt=prompt, most=9, least=5, stop=frozenset(plain), sampling=how)
    )
    engine.run()
    tokens = list(prompt)
    for at in range(9):
        logits = np.asarray(own(POSITIONS["counted"])(params, np.asarray([tokens]))[0, -1])
        said = list(set(tokens))
        logits = logits.copy()
        logits[said] = np.where(logits[said] < 0, logits[said] * 1.3, logits[said] / 1.3)
        logits[list(set(tokens[3:]))] -= 2.0
        if at < 5:
            logits[list(set(plain))] = -np.inf
        best = int(np.argmax(logits))
        if best in plain:
            break
        tokens.append(best)
    assert request.answer == tokens[3:] and len(request.answer) >= 5


def test_a_request_ends_when_its_time_is_over(engine: Engine):
    now = [100.0]
    engine.clock = lambda: now[0]
    running = engine.add(GenerationRequest(prompt=(3, 1, 4), most=20, seconds=5))
    waiting = [engine.add(GenerationRequest(prompt=(3, n), most=20, seconds=7)) for n in range(5)]
    for _ in range(4):
        engine.step()
    now[0] = 105.0
    events = engine.step()
    assert running.ended == "late" and len(running.answer) >= 2
    assert [event.token for event in events if event.request is running] == [None]
    now[0] = 107.5
    engine.step()
    assert {one.ended for one in waiting} == {"late"}
    assert engine.schedule.pool.available == engine.schedule.pool.pages
    with pytest.raises(ArgumentError, match="seconds is 0; it is a number above 0"):
        engine.add(GenerationRequest(prompt=(1,), seconds=0))


def reset_at(token: int):
    """The model of the docs, whose positions begin again at one token, as packed documents do."""

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        index = jnp.arange(tokens.shape[1])[None]
        begun = jax.lax.cummax(jnp.where(tokens == token, index, 0), axis=1)
        x = params["embed"][tokens] + jnp.sin((index - begun)[..., None] + jnp.arange(16.0))
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, params["qkv"][:, part]) for part in range(3))
        mixed = shardlib.attention(q, k, v)
        return (x + mixed.reshape(*mixed.shape[:2], 16)) @ params["out"]

    return run


@pytest.mark.parametrize("token", [0, 5, 4321])
def test_what_only_a_rare_token_does_is_refused(token: int):
    with pytest.raises(ModelError, match="looks at other tokens"):
        Engine(shardlib.tree(wide, AXES), reset_at(token), capacity=Capacity(longest=64))


def wide(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (5000, 16)),
        "qkv": jax.random.normal(keys[1], (16, 3, 2, 8)) / 4,
        "out": jax.random.normal(keys[2], (16, 5000)) / 4,
    }


def test_weights_of_another_model_are_refused():
    right = wide(jax.random.key(0))
    for wrong, said in (
        ({**right, "embed": right["embed"][:30]}, r"embed is \[30, 16\]; the model has"),
        ({**right, "more": right["out"]}, "more is not a parameter"),
        ({"embed": right["embed"]}, "is missing"),
    ):
        with pytest.raises(ArgumentError, match=said):
            Engine(shardlib.tree(wide, AXES), reset_at(0), weights=wrong)
    with pytest.raises(ModelError, match="not numbers"):
        broken = jax.tree.map(lambda leaf: leaf * jnp.nan, right)
        Engine(shardlib.tree(wide, AXES), reset_at(0), weights=broken)


def _with_sink(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Every token looks at one row more, that of the first token of the vocabulary."""
    x = params["embed"][tokens]
    first = jnp.broadcast_to(params["embed"][:1], (len(tokens), 1, 16))
    rows = jnp.concatenate([first, x], 1)[:, :, None]
    return (x + shardlib.attention(x[:, :, None], rows, rows)[:, :, 0]) @ params["out"]


@pytest.mark.long
def test_attention_sinks_and_constants_among_the_params_are_refused():
    sizes = Capacity(longest=16, slots=1)
    with pytest.raises(ModelError, match="looks at other tokens"):
        Engine(shardlib.tree(own_weights, AXES), _with_sink, capacity=sizes)
    even = jnp.arange(16) % 2 == 0
    run = own(POSITIONS["counted"])

    def masked(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        shown = params.get("even", even)
        return run({**params, "embed": jnp.where(shown, params["embed"], 0)}, tokens)

    def with_mask(key: jax.Array) -> dict[str, jax.Array]:
        return {**own_weights(key), "even": even}

    with pytest.raises(AnnotationError, match="even has dtype bool\nTry: keep constants out of"):
        Engine(shardlib.tree(with_mask), masked, capacity=sizes)
    params, _ = read(shardlib.tree(own_weights)).init(0)
    found = Engine(shardlib.tree(own_weights, AXES), masked, capacity=sizes).generate([[5, 2]], 1)
    logits = masked(params, jnp.asarray([[5, 2]]))
    assert found == [[int(jnp.argmax(logits[0, -1]))]]
