"""Models of Flax with a cache of their own are served, several requests at a time.

What comes out is compared with the same module without a cache, over the whole sequence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import shardlib
from shardlib.errors import ArgumentError, ModelError
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, GenerationRequest, Sampling

VOCAB, WIDTH, LONGEST = 53, 16, 24
SIZES = Capacity(longest=LONGEST, slots=3, budget=12)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mix = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, decode: bool) -> jax.Array:
        x = x + self.mix(self.norm(x), mask=mask, decode=decode)
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    """A decoder as Flax's documentation has them."""

    def __init__(self, rngs: nnx.Rngs, room: int = LONGEST) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        for block in self.blocks:
            block.mix.init_cache((1, room, WIDTH))

    def __call__(self, tokens: jax.Array, decode: bool = False) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, None if decode else nnx.make_causal_mask(tokens), decode)
        return self.head(x)


class Recurrent(nnx.Module):
    """A state without positions: one token after another."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.carry = nnx.Cache(jnp.zeros((1, WIDTH)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        logits: list[jax.Array] = []
        for at in range(tokens.shape[1]):
            self.carry[...], y = self.cell(self.carry[...], self.embed(tokens[:, at]))
            logits.append(self.head(y))
        return jnp.stack(logits, axis=1)


class Linen(nn.Module):
    """The same in Linen, whose cache is a collection."""

    decode: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        mixed = nn.MultiHeadDotProductAttention(2, decode=self.decode)(nn.LayerNorm()(x), mask=mask)
        return nn.Dense(VOCAB)(x + mixed)


def nnx_case() -> tuple[Any, Any, Any]:
    module = Model(nnx.Rngs(jax.random.key(4)))
    graph, state = nnx.split(module)
    return (
        Model,
        lambda model, tokens: model(tokens, decode=True),
        lambda tokens: nnx.merge(graph, state, copy=True)(tokens),
    )


def recurrent_case() -> tuple[Any, Any, Any]:
    graph, state = nnx.split(Recurrent(nnx.Rngs(jax.random.key(4))))
    return (
        Recurrent,
        lambda model, tokens: model(tokens),
        lambda tokens: nnx.merge(graph, state, copy=True)(tokens),
    )


def linen_case() -> tuple[Any, Any, Any]:
    whole = np.zeros((1, LONGEST), np.int32)
    params = Linen().init(jax.random.key(4), whole)["params"]
    return (
        shardlib.linen(Linen(), whole),
        lambda variables, tokens: Linen().apply(variables, tokens, mutable=["cache"]),
        lambda tokens: Linen(decode=False).apply({"params": params}, tokens),
    )


CASES = {"nnx": nnx_case, "linen": linen_case, "recurrent": recurrent_case}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_a_cache(case: str):
    init, forward, plain = CASES[case]()
    engine = Engine(init, forward, weights=4, capacity=SIZES)
    engine.warm_up()
    compiled = engine.compute.compiled
    logits = jax.jit(plain)
    draw = np.random.default_rng(0)
    asked = [
        GenerationRequest(
            prompt=tuple(draw.integers(0, VOCAB, int(draw.integers(1, 12))).tolist()),
            most=int(draw.integers(1, 12)),
            priority=int(number > 5),
            top=2,
            scored=number == 3,
        )
        for number in range(9)
    ]
    requests = [engine.add(one) for one in asked[:5]]
    engine.step()
    requests[1].cancelled = True
    requests += [engine.add(one) for one in asked[5:]]
    engine.run()
    assert engine.compute.compiled == compiled == 2
    assert engine.schedule.preempted, "a higher priority takes a slot"
    for number, request in enumerate(requests):
        if number == 1:
            assert request.ended == "cancelled"
            continue
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : request.count] = request.tokens
        right = np.asarray(jax.nn.log_softmax(logits(tokens)[0], axis=-1))
        start = len(request.asked.prompt)
        assert request.answer == right.argmax(-1)[start - 1 : request.count - 1].tolist()
        picked = [right[at - 1, tokens[0, at]] for at in range(start, request.count)]
        assert request.logprobs == pytest.approx(picked, abs=2e-5)
        for at, one in enumerate(request.scores):
            assert one.logprob == pytest.approx(right[at, tokens[0, at + 1]], abs=2e-5)
        assert len(request.scores) == (start - 1 if request.asked.scored else 0)
    assert engine.schedule.pool.available == SIZES.slots


@pytest.mark.long
def test_other_weights_and_seeds_are_served_as_over_pages():
    init, forward, _ = nnx_case()
    engine = Engine(init, forward, weights=4, capacity=SIZES)
    how = Sampling(temperature=1.0, seed=3)
    first = engine.generate([[1, 2, 3]], 6, sampling=how)
    others = [engine.add(GenerationRequest(prompt=(n, n), most=5)) for n in range(4)]
    assert engine.generate([[1, 2, 3]], 6, sampling=how) == first
    engine.replace(5)
    assert engine.generate([[1, 2, 3]], 6, sampling=how) != first
    engine.replace(4)
    assert engine.generate([[1, 2, 3]], 6, sampling=how) == first
    assert all(len(one.answer) == 5 for one in others)


def test_what_such_a_cache_cannot_do_is_said():
    init, forward, _ = nnx_case()
    with pytest.raises(
        ModelError, match="cached_key has room for 8 tokens, and a request may have"
    ):
        Engine(lambda rngs: Model(rngs, room=8), forward, capacity=SIZES)
    with pytest.raises(ArgumentError, match="served by one device"):
        Engine(init, forward, capacity=SIZES, tensor=2)
    with pytest.raises(ArgumentError, match="takes no token back"):
        Engine(init, forward, capacity=Capacity(longest=LONGEST, slots=2, drafts=2))
    with pytest.raises(ModelError, match=r"calls shardlib\.attention nowhere"):
        Engine(init, lambda model, tokens: model(tokens), capacity=SIZES)
    with pytest.raises(ModelError, match=r"gives \[1, 53\]; logits are"):
        Engine(init, lambda model, tokens: model(tokens, decode=True)[0], capacity=SIZES)
