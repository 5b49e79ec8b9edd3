"""Tokens of models whose attention has a bias by distances are those of the forward pass without a
cache, of decoders alone and beside an encoder.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from shardlib.annotation.model import read
from shardlib.functions.attention import RelativeBias
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Capacity, GenerationRequest
from tests.functions.biased import Biased
from tests.serve.test_meshes import LONGEST, greedy, whole_pass
from tests.serve.test_sources import SOURCE, VOCAB, WIDTH, Model, encode, forward


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 4), (2, 2), (1, 8)])
@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_tokens_are_those_of_the_whole_forward_pass(kind: str, data: int, tensor: int, window: int):
    def init(rngs: nnx.Rngs) -> Biased:
        return Biased(kind, rngs, window=window)

    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 61, size).tolist() for size in (3, 20, 11, 1, 24)]
    engine = Engine(
        init,
        lambda model, tokens: model(tokens),
        weights=3,
        capacity=Capacity(longest=LONGEST, slots=3, page=4, pages=24, budget=8),
        data=data,
        tensor=tensor,
    )
    logits = whole_pass(init)
    wanted = [greedy(logits, prompt, 7) for prompt in prompts]
    assert engine.generate(prompts, 7) == wanted
    assert len({*map(tuple, wanted)}) > 2, "answers differ"


class Seq2Seq(Model):
    """With the biases of T5, in encoder and decoder, in place of positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.tables = nnx.Param(jax.random.normal(rngs.params(), (2, 8, 2)))
        self.mixed = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)

    def encode(self, source: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        seen = jnp.arange(source.shape[1])[None] < count
        x = self.embed(source)
        q, k, v = jnp.split(self.mixed(x).reshape(*x.shape[:2], 6, WIDTH // 2), 3, axis=2)
        bias = RelativeBias(self.tables[...][0], max_distance=12)
        told = seen.astype(jnp.int32)
        found = shardlib.attention(q, k, v, causal=False, segments=told, bias=bias)
        return {"memory": x + found.reshape(x.shape), "seen": seen}

    def decode(self, tokens: jax.Array, memory: jax.Array, seen: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 6, WIDTH // 2), 3, axis=2)
        bias = RelativeBias(self.tables[...][1], max_distance=12)
        x = x + shardlib.attention(q, k, v, bias=bias).reshape(x.shape)
        memory, seen = (
            jnp.broadcast_to(one, (len(tokens), *one.shape[1:])) for one in (memory, seen)
        )
        found = self.cross(x, memory, mask=seen[:, None, None])
        return self.head(jnp.concatenate([x, 3 * found], axis=-1))


@pytest.mark.long
def test_a_decoder_with_biases_looks_at_an_encoder_with_biases():
    sizes = Capacity(longest=24, slots=3, page=4, pages=18, budget=9)
    engine = Engine(Seq2Seq, forward, capacity=sizes, tensor=2)
    engine.encode_with(encode, longest=SOURCE)
    model = read(Seq2Seq)
    module, draw = model.rebuild(*model.init(0)), np.random.default_rng(1)
    encoded, decoded = jax.jit(module.encode), jax.jit(module.decode)
    requests, wanted = [], []
    for size in (10, 3, 7):
        source, prompt = draw.integers(0, VOCAB, size), draw.integers(0, VOCAB, size).tolist()
        requests.append(
            engine.add(
                GenerationRequest(prompt=tuple(prompt), source=tuple(source.tolist()), most=6)
            )
        )
        padded = np.pad(source, (0, SOURCE - size))[None].astype(np.int32)
        made = encoded(padded, np.int32(size))
        wanted.append(greedy(lambda tokens, made=made: decoded(tokens, **made), prompt, 6))
    engine.run()
    assert [one.answer for one in requests] == wanted
    assert len({*map(tuple, wanted)}) == 3, "sources matter"
