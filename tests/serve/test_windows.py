"""Layers with a window keep the tokens of the window and no more, beside layers that keep all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.serve.engine import Engine
from shardlib.serve.program import TracedForward, traced_forward
from shardlib.serve.requests import Capacity, GenerationRequest, Request, Storage
from shardlib.serve.scheduling import Schedule, digests
from tests.serve.test_meshes import (
    FAMILIES,
    LONGEST,
    VOCAB,
    forward,
    greedy,
    prompts,
    reference,
    whole_pass,
)

SOME = "window in some layers"
SIZES = Capacity(longest=LONGEST, slots=3, page=2, budget=6)
WIDE = 16


class Layer(nnx.Module):
    """Attention that keeps a window, of a user's own."""

    def __init__(self, window: int, rngs: nnx.Rngs):
        self.window = window
        self.made = nnx.Linear(WIDE, 3 * WIDE, rngs=rngs)
        self.out = nnx.Linear(WIDE, WIDE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.made(x), 3, axis=-1)

        def heads(one: jax.Array) -> jax.Array:
            return one.reshape(*one.shape[:2], 2, WIDE // 2)

        mixed = shardlib.attention(heads(query), heads(key), heads(value), window=self.window)
        return x + self.out(mixed.reshape(x.shape))


class Written(nnx.Module):
    """Layers that are written out, with windows of several widths."""

    def __init__(self, windows: tuple[int, ...], rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDE, rngs=rngs)
        self.layers = nnx.List([Layer(window, rngs) for window in windows])
        self.head = nnx.Linear(WIDE, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + jnp.sin(jnp.arange(tokens.shape[1])[:, None] * jnp.arange(1.0, WIDE + 1.0))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def three(rngs: nnx.Rngs) -> Written:
    return Written((3, 0, 7, 3), rngs)


def long_prompts() -> list[tuple[int, ...]]:
    return [(*one, *one, *one)[:22] for one in prompts()[:5]]


@pytest.mark.long
def test_pages_are_those_of_what_each_layer_sees():
    engine = Engine(models.build(FAMILIES[SOME])[0], forward, weights=3, capacity=SIZES, tensor=2)
    windows = [(group.window, group.pages, group.table) for group in engine.capacity.groups]
    # 3 requests of 16 pages, by default half of it; 3 windows of 5 tokens and 6 more at a time
    assert windows == [(0, 24, 16), (5, (3 * 2 + 6) // 2 + 6, 6)]
    for page in jax.tree.leaves(engine.compute.pages):
        assert page.shape[:3] == (1, 2 * 24 + 2 * 12, 2), "two layers of each kind"
    given = long_prompts()
    assert engine.generate(given, 7) == [reference(SOME)(one, 7) for one in given]
    # and where a request is no longer than the window there is nothing to give back
    assert SIZES.within({0, LONGEST}).windows == (0,)


@pytest.mark.long
def test_layers_of_a_loop_find_their_pages(monkeypatch: pytest.MonkeyPatch):
    """Engines on accelerators run a loop over the layers, whose number is known as it runs."""
    monkeypatch.setattr(TracedForward, "scanned", frozenset[int]())
    monkeypatch.setattr(TracedForward, "factors", dict[int, tuple[int, ...]]())
    sizes, given = replace(SIZES, pages=17, drafts=2, budget=9), long_prompts()
    engine = Engine(models.build(FAMILIES[SOME])[0], forward, weights=3, capacity=sizes)
    assert engine.generate(given, 7) == [reference(SOME)(one, 7) for one in given]
    assert engine.schedule.preempted, "pages are scarce"
    assert engine.schedule.pool.available == engine.schedule.pool.pages


@pytest.mark.long
@pytest.mark.parametrize("smaller", [False, True], ids=["n-grams", "model"])
def test_windows_of_several_widths_with_drafts(smaller: bool):
    sizes, given = replace(SIZES, drafts=2, budget=12), long_prompts()
    engine = Engine(three, forward, weights=3, capacity=sizes)
    assert [one.window for one in engine.capacity.groups] == [0, 7, 3]
    if smaller:  # its windows are others than those of the model: it looks at the nearest group
        engine.draft_with(lambda rngs: Written((5, 3), rngs), forward, weights=3)
    found = [engine.add(GenerationRequest(prompt=one, most=8)) for one in given]
    engine.run()
    logits = whole_pass(three)
    assert [one.answer for one in found] == [greedy(logits, prompt, 8) for prompt in given]
    assert engine.schedule.pool.available == engine.schedule.pool.pages


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize("family", [SOME, "latent, window in some layers"])
def test_eight_bits_and_windows_give_what_eight_bits_give(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    sizes = replace(SIZES, storage=Storage(cache="int8"))
    init, given = models.build(FAMILIES[family])[0], long_prompts()[:3]

    def answers() -> list[list[int]]:
        return Engine(init, forward, weights=3, capacity=sizes, check=False).generate(given, 6)

    found = answers()
    monkeypatch.setattr(TracedForward, "windows", frozenset({0}))
    assert found == answers()


def computed(schedule: Schedule, number: int, prompt: tuple[int, ...]) -> Request:
    """A request that a schedule has served; every token of its answer is 1."""
    request = Request(number=number, asked=GenerationRequest(prompt=prompt, most=4))
    schedule.add(request)
    while request.ended is None:
        shares = schedule.next()
        for share in shares:
            if share.ends:
                share.request.took(1, 0.0)
        schedule.done(shares)
    schedule.release(request)
    return request


def test_a_prefix_is_found_while_its_last_window_is_there():
    capacity = replace(SIZES, pages=48).within({0, 5})
    schedule, prompt = Schedule(capacity), tuple(range(22))
    assert [computed(schedule, number, prompt).reused for number in range(2)] == [0, 20]
    # a longer one goes on behind the window that is there
    assert computed(schedule, 2, (*prompt, 1, 1, 7, 8)).reused == 24
    # 12 pages of the windowed layers go to others; of the layers that keep all there are plenty
    others = [computed(schedule, 3 + n, tuple(range(30 + 20 * n, 52 + 20 * n))) for n in range(2)]
    assert [one.reused for one in others] == [0, 0]
    whole, windowed = schedule.pool.pools
    known = digests(prompt[:20], size=2)
    assert len(whole.held(known)) == 10 and not any(windowed.has(known))
    assert computed(schedule, 9, prompt).reused == 0
    assert schedule.pool.available == schedule.pool.pages


FLAGS = np.asarray([True, False, False, True, False, False])


def call(x: jax.Array, everywhere: jax.Array) -> jax.Array:
    return x + shardlib.attention(x, x, x, window=3, global_layer=everywhere)


def loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, flag: (call(x, flag), None), x, jnp.asarray(FLAGS))[0]


def backwards(x: jax.Array) -> jax.Array:
    flags = jnp.asarray(FLAGS[::-1])
    return jax.lax.scan(lambda x, flag: (call(x, flag), None), x, flags, reverse=True)[0]


def counted(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 6, lambda n, x: call(x, n % 3 == 0), x)


def nested(x: jax.Array) -> jax.Array:
    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        again = jax.checkpoint(lambda x, n: (call(x, n == 0), None))
        return jax.lax.scan(again, x, jnp.arange(3))

    def body(x: jax.Array, row: None) -> tuple[jax.Array, None]:
        return outer(x, row)[0], None

    return jax.lax.scan(body, x, None, length=2)[0]


def unknown(x: jax.Array) -> jax.Array:
    def body(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
        return call(x, flag & (x.sum() > 0)), None  # it depends on what is computed

    return jax.lax.scan(body, x, jnp.asarray(FLAGS))[0]


@pytest.mark.parametrize("stack", [loop, backwards, counted, nested, unknown])
def test_which_layers_keep_all_is_found_in_the_program(stack: Callable[[jax.Array], jax.Array]):
    def own(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens].reshape(*tokens.shape, 2, 4)
        return stack(x).reshape(*tokens.shape, 8) @ params["embed"].T

    init = shardlib.tree(
        lambda key: {"embed": jax.random.normal(key, (11, 8))}, {"embed": ("vocab", "embed")}
    )
    traced = traced_forward(read(init), own, longest=16)
    (found,) = [one.windows for one in traced.calls]
    assert found == ((0,) * 6 if stack is unknown else (0, 3, 3, 0, 3, 3))
