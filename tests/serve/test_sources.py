"""A decoder looks at what an encoder made of the source of each request, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from shardlib.annotation.model import read
from shardlib.errors import ArgumentError, ModelError
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, GenerationRequest, Sampling

VOCAB, WIDTH, SOURCE, LONGEST = 47, 16, 10, 24
SIZES = Capacity(longest=LONGEST, slots=3, page=4, pages=9, budget=9)


class Model(nnx.Module):
    """An encoder that sees its source in both directions, and a decoder that looks at it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, VOCAB, rngs=rngs)
        self.memory = nnx.Variable(jnp.zeros((1, SOURCE, WIDTH)))
        self.seen = nnx.Variable(jnp.ones((1, SOURCE), bool))

    def encode(self, source: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        seen = jnp.arange(source.shape[1])[None] < count
        x = self.embed(source) + self.waves(source)
        return {"memory": x + self.encoder(x, mask=seen[:, None, None]), "seen": seen}

    def decode(self, tokens: jax.Array, memory: jax.Array, seen: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.waves(tokens)
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 6, WIDTH // 2), 3, axis=2)
        x = x + shardlib.attention(q, k, v).reshape(x.shape)
        memory, seen = (
            jnp.broadcast_to(one, (len(tokens), *one.shape[1:])) for one in (memory, seen)
        )
        found = self.cross(x, memory, mask=seen[:, None, None])
        return self.head(jnp.concatenate([x, 3 * found], axis=-1))

    def waves(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.float32)[:, None]
        return jnp.sin(positions * jnp.arange(1.0, WIDTH + 1) / 3)


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model.decode(tokens, model.memory[...], model.seen[...])


def encode(model: Any, source: jax.Array, count: jax.Array) -> Mapping[str, jax.Array]:
    return model.encode(source, count)


def asked(number: int) -> GenerationRequest:
    draw = np.random.default_rng(number // 2)  # two requests in turn have one source
    source = draw.integers(0, VOCAB, int(draw.integers(1, SOURCE + 1))).tolist()
    return GenerationRequest(
        prompt=(1, 2, 3, 4, 5, 6)[: 5 + number % 2],
        source=tuple(source),
        most=9,
        priority=int(number == 6),
        sampling=Sampling(frequency=0.5 * (number % 2)),
    )


@cache
def module() -> Any:
    model = read(Model)
    return model.rebuild(*model.init(0))


@jax.jit
def decoded(tokens: jax.Array, made: Any) -> jax.Array:
    return module().decode(tokens, made["memory"], made["seen"])[0]


@cache
def right(number: int) -> tuple[list[int], list[float]]:
    """The answer by the whole model, without a cache, from a source of its own length."""
    one = asked(number)
    made = module().encode(np.asarray([one.source], np.int32), np.int32(len(one.source)))
    tokens, logprobs = list(one.prompt), list[float]()
    for _ in range(one.most):
        row = np.pad(np.asarray([tokens], np.int32), ((0, 0), (0, LONGEST - len(tokens))))
        logits = np.asarray(decoded(row, made))[len(tokens) - 1]
        answer = tokens[len(one.prompt) :]
        best = logits - one.sampling.frequency * np.bincount(
            np.asarray(answer, np.int64), minlength=VOCAB
        )
        tokens.append(int(best.argmax()))
        logprobs.append(float(jax.nn.log_softmax(logits)[tokens[-1]]))
    return tokens[len(one.prompt) :], logprobs


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("drafts", "tensor", "data"), [(0, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_answers_are_those_of_the_whole_model(drafts: int, tensor: int, data: int):
    sizes = replace(SIZES, drafts=drafts, slots=3 if data == 1 else 2)
    engine = Engine(Model, forward, capacity=sizes, tensor=tensor, data=data)
    engine.encode_with(encode, longest=SOURCE)
    engine.warm_up()
    compiled = engine.compute.compiled
    requests = [engine.add(asked(number)) for number in range(6)]
    for _ in range(5):
        engine.step()
    requests.append(engine.add(asked(6)))  # takes a slot of another
    engine.run()
    assert engine.schedule.preempted or data > 1
    wanted = [right(number) for number in range(7)]
    for request, (answer, logprobs) in zip(requests, wanted, strict=True):
        assert request.answer == answer
        assert request.logprobs == pytest.approx(logprobs, abs=2e-4)
    assert len({tuple(one[0]) for one in wanted}) > 3, "sources matter"
    for _ in range(2):
        again = engine.add(asked(1))
        engine.run()
    assert again.answer == wanted[1][0] and again.reused in ((4,) if data == 1 else (0, 4))
    other = engine.add(replace(asked(1), source=(9, 9)))
    engine.run()
    assert other.reused == 0 and other.logprobs != pytest.approx(again.logprobs, abs=1e-3)
    assert engine.compute.compiled == compiled
    assert engine.schedule.pool.available == data * sizes.all_pages


class Looped(Model):
    """Looks at a whole source by the same function as at its own tokens, in a loop over layers."""

    def decode(self, tokens: jax.Array, memory: jax.Array, seen: jax.Array) -> jax.Array:
        x, shape = self.embed(tokens) + self.waves(tokens), (*tokens.shape, WIDTH)
        memory = jnp.broadcast_to(memory, (len(tokens), *memory.shape[1:]))
        memory = memory.reshape(*memory.shape[:2], 2, WIDTH // 2)

        def layer(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            q, k, v = jnp.split((scale * self.qkv(x)).reshape(*shape[:2], 6, -1), 3, axis=2)
            x = x + shardlib.attention(q, k, v).reshape(shape)
            found = shardlib.attention(2 * q, memory, scale * memory, causal=False)
            return x + found.reshape(shape), None

        x, _ = jax.lax.scan(layer, x, jnp.asarray([1.0, 0.7]))
        return self.head(jnp.concatenate([x, x], axis=-1))


@pytest.mark.long
def test_a_source_is_looked_at_by_the_same_function_as_tokens():
    engine = Engine(Looped, forward, capacity=SIZES)
    engine.encode_with(encode, longest=SOURCE)
    draw, model = np.random.default_rng(7), read(Looped)
    module = model.rebuild(*model.init(0))
    given = [
        GenerationRequest(
            prompt=(1, 2, 3), source=tuple(draw.integers(0, VOCAB, SOURCE).tolist()), most=8
        )
        for _ in range(5)
    ]
    requests = [engine.add(one) for one in given]
    engine.run()
    for request in requests:
        made = module.encode(np.asarray([request.asked.source]), np.int32(SOURCE))
        logits = module.decode(np.asarray([request.tokens]), made["memory"], made["seen"])
        right = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))
        assert request.answer == right.argmax(-1)[2:-1].tolist()
        picked = [right[2 + at, token] for at, token in enumerate(request.answer)]
        assert request.logprobs == pytest.approx(picked, abs=2e-4)
    assert len({tuple(one.answer) for one in requests}) > 2


@pytest.mark.long
def test_other_weights_encode_anew():
    engine = Engine(Model, forward, capacity=SIZES, check=False)
    engine.encode_with(encode, longest=SOURCE)
    engine.replace(1)
    (found,) = [engine.add(asked(0))]
    engine.run()
    engine.replace(0)
    again = engine.add(asked(0))
    engine.run()
    assert again.answer == right(0)[0] and found.logprobs != again.logprobs


def test_what_does_not_fit_is_refused():
    engine = Engine(Model, forward, capacity=SIZES, check=False)
    with pytest.raises(ArgumentError, match="the model has no encoder"):
        engine.add(asked(0))
    with pytest.raises(ModelError, match="the model has no variable nothing"):
        engine.encode_with(lambda *given: {"nothing": jnp.zeros(3)}, longest=SOURCE)
    with pytest.raises(ModelError, match=r"memory is float32\[1, 4, 16\]; that of the model is"):
        engine.encode_with(encode, longest=4)
    with pytest.raises(ArgumentError, match="a source has at least one token"):
        engine.encode_with(encode, longest=0)
    engine.encode_with(encode, longest=SOURCE)
    for source in ((), (1,) * (SOURCE + 1)):
        with pytest.raises(ArgumentError, match=f"the source has {len(source)} tokens"):
            engine.add(replace(asked(0), source=source))
    with pytest.raises(ArgumentError, match="not a token; tokens are whole numbers"):
        engine.add(replace(asked(0), source=(-1,)))
    engine.add(asked(0))
    with pytest.raises(ArgumentError, match="requests wait that have no source"):
        engine.encode_with(encode, longest=SOURCE)
