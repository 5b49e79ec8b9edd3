"""Tokens with a cache are those of the model's own forward pass, on any mesh, whatever else is
served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import models
from shardlib.annotation.model import read
from shardlib.errors import ArgumentError
from shardlib.models.config import Experts, LatentAttention, TransformerConfig
from shardlib.serve.cache import CacheGroup, TokenPlacement
from shardlib.serve.engine import Engine
from shardlib.serve.program import traced_forward
from shardlib.serve.requests import Capacity, GenerationRequest

VOCAB, LONGEST = 61, 32
DENSE = TransformerConfig(
    name="served",
    vocab_size=VOCAB,
    layers=2,
    embed=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=48,
    max_seq=64,
    compute_dtype="float32",
)
EXPERTS = Experts(count=4, per_token=2, mlp=24)
FAMILIES = {
    "grouped": DENSE,
    "multi-query": replace(DENSE, kv_heads=1),
    "learned positions": replace(DENSE, learned_positions=True, tied=True),
    "window": replace(DENSE, sliding_window=5, attention_softcap=4.0),
    "window in some layers": replace(
        DENSE, layers=4, sliding_window=5, global_every=2, rope_local_theta=500.0
    ),
    "experts and windows in some layers": replace(
        DENSE, layers=4, experts=replace(EXPERTS, every=2), sliding_window=3, global_every=3
    ),
    "blocks of queries": replace(DENSE, attention_block=8),
    "experts": replace(DENSE, experts=EXPERTS),
    "experts in some layers": replace(DENSE, layers=4, experts=replace(EXPERTS, every=2)),
    "latent": replace(
        DENSE,
        kv_heads=4,
        latent=LatentAttention(kv_lora=16, q_lora=24, nope_dim=8, rope_dim=4, v_dim=8),
        experts=replace(EXPERTS, first_dense=1, shared=1),
    ),
}
FAMILIES["latent, window in some layers"] = replace(
    FAMILIES["latent"], layers=5, sliding_window=6, global_every=3
)


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def greedy(logits: Callable[[Any], Any], prompt: Sequence[int], most: int) -> list[int]:
    """An answer by the whole forward pass, once for every token."""
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + most):
        tokens[0, at] = int(np.argmax(logits(tokens)[0, at - 1]))
    return tokens[0, len(prompt) : len(prompt) + most].tolist()


def whole_pass(init: Any) -> Callable[[Any], Any]:
    """The logits of a model with the weights of seed 3, without a cache."""
    model = read(init)
    module = model.rebuild(*model.init(3))
    return jax.jit(lambda tokens: forward(module, tokens))


@cache
def reference(family: str) -> Callable[[tuple[int, ...], int], list[int]]:
    """Greedy answers of a family."""
    return partial(greedy, whole_pass(models.build(FAMILIES[family])[0]))


def prompts() -> list[tuple[int, ...]]:
    """Nine, of which some begin alike."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, VOCAB, 9).tolist()
    return [
        (
            *shared[: int(draw.integers(0, 10))],
            *draw.integers(0, VOCAB, int(draw.integers(1, 9))).tolist(),
        )
        for _ in range(9)
    ]


#: Groups of devices, and devices of a group.
MESHES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1))


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"data {mesh[0]} tensor {mesh[1]}")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_whole_forward_pass(family: str, mesh: tuple[int, int]):
    """Pages are scarce, and prefixes are shared, in turns."""
    data, tensor = mesh
    page = max(4, tensor)  # one key head, or latent vector, is sharded over tokens of a page
    number = list(FAMILIES).index(family) + MESHES.index(mesh)
    scarce = number // 2 % 2 == 0
    prefixes = (number + scarce) % 2 == 0
    engine = Engine(
        models.build(FAMILIES[family])[0],
        forward,
        weights=3,
        capacity=Capacity(
            longest=LONGEST,
            slots=4,
            page=page,
            pages=(36 if scarce else 192) // page,
            budget=8,
            prefixes=prefixes,
        ),
        tensor=tensor,
        data=data,
    )
    engine.warm_up()
    compiled, given = engine.compute.compiled, prompts()
    for _ in range(2):  # the second time over pages that are kept
        assert engine.generate(given, 7) == [reference(family)(one, 7) for one in given]
    assert engine.compute.compiled == compiled
    assert engine.schedule.pool.available == engine.schedule.pool.pages
    assert engine.schedule.preempted == 0 or scarce
    if scarce and data == 1 and page == 4 and family != "window":  # it gives pages back
        assert engine.schedule.preempted


@pytest.mark.long
def test_every_group_of_devices_has_requests_of_its_own():
    engine = Engine(
        models.build(FAMILIES["grouped"])[0],
        forward,
        weights=3,
        capacity=Capacity(longest=LONGEST, slots=1, page=4, pages=8, budget=8),
        tensor=2,
        data=2,
    )
    given = prompts()[:2]
    requests = [engine.add(GenerationRequest(prompt=prompt, most=3)) for prompt in given]
    engine.run()
    assert [one.answer for one in requests] == [reference("grouped")(one, 3) for one in given]
    longest = max(map(len, given))
    assert engine.steps == -(-longest // 8) + 2, "both are served at a time"
    page = jax.tree.leaves(engine.compute.pages)[0]
    assert page.shape[1] == 16 and {shard.data.shape[1] for shard in page.addressable_shards} == {8}


@pytest.mark.long
def test_windows_need_pages_of_the_window_alone():
    sizes = Capacity(longest=LONGEST, slots=2, page=2, pages=10, budget=4)
    engine = Engine(
        models.build(FAMILIES["window"])[0], forward, weights=3, capacity=sizes, tensor=2
    )
    long = [(*one, *one, *one)[:23] for one in prompts()[:3]]
    assert engine.capacity.most_pages * 2 <= 10 < -(-30 // 2), "a request has more tokens"
    assert engine.generate(long, 7) == [reference("window")(one, 7) for one in long]
    assert engine.schedule.preempted == 0 and engine.schedule.pool.available == 10
    assert replace(sizes, pages=None).within({5}).all_pages == 10


def test_of_latent_attention_the_compressed_vector_is_kept():
    def kept(config: TransformerConfig) -> set[tuple[tuple[int, ...], ...]]:
        traced = traced_forward(read(models.build(config)[0]), forward, longest=LONGEST)
        return {tuple(one.shape for one in call.kept) for call in traced.calls}

    assert kept(FAMILIES["latent"]) == {((1, 16), (4,))}
    published = models.load("deepseek-v3")  # 576 values a token and layer (arXiv:2412.19437)
    assert isinstance(published, TransformerConfig)
    assert kept(published) == {((1, 512), (64,))}
    # where the vector is no smaller than keys and values, these are kept
    large = LatentAttention(kv_lora=32, q_lora=24, nope_dim=8, rope_dim=4, v_dim=8)
    assert kept(replace(FAMILIES["latent"], latent=large)) == {((4, 8), (4,), (4, 8))}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 0}, "tensor is 0"),
        ({"data": True}, "data is True"),
        ({"tensor": 4, "data": 3}, "3 groups of 4 devices are more than the 8 devices"),
        ({"tensor": 8}, "page is 4; pages of 1 key heads are sharded over 8 devices"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_devices_that_cannot_share_a_model_are_refused(sizes: dict[str, int], said: str):
    with pytest.raises(ArgumentError, match=said):
        Engine(
            models.build(FAMILIES["multi-query"])[0],
            forward,
            capacity=Capacity(longest=LONGEST, page=4),
            **sizes,
        )


@pytest.mark.parametrize("family", ["grouped", "experts in some layers", "latent"])
def test_logits_are_computed_for_the_tokens_that_have_a_next_one(family: str):
    model = read(models.build(FAMILIES[family])[0])
    traced = traced_forward(model, forward, longest=LONGEST)
    tokens = jax.ShapeDtypeStruct((24,), jnp.int32)
    where = TokenPlacement(
        position=tokens,  # type: ignore[arg-type]
        entry=(tokens,),  # type: ignore[arg-type]
        table=(jax.ShapeDtypeStruct((8, 8), jnp.int32),),  # type: ignore[arg-type]
        chunks=(jax.ShapeDtypeStruct((2, 8), jnp.int32),),  # type: ignore[arg-type]
    )
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    groups = (CacheGroup(window=0, pages=9, table=8),)
    jaxpr = jax.make_jaxpr(partial(traced.__call__, groups=groups))(
        model.params, model.state, traced.new_pages(groups, 4), tokens, where, rows
    )
    products = [
        tuple(var.aval.shape)
        for equation in jaxpr.eqns
        if equation.primitive.name == "dot_general"
        for var in equation.outvars
    ]
    wide = [shape for shape in products if VOCAB in shape]
    assert wide and all(shape[0] == 8 for shape in wide), wide
