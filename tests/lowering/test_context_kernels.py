"""Kernels of the vendors compute attention, where they apply; where they do not, they say why."""

from __future__ import annotations

import functools
import importlib.util
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardlib.errors import LayoutError, MissingPackageError
from shardlib.functions.attention import Attention, attend
from shardlib.lowering.context.block import AttentionMask, Cut, Scores
from shardlib.lowering.context.dispatch import (
    AttentionCall,
    HeadSharding,
    Kernels,
    RinglessAttention,
)
from shardlib.verification.isolation import GPU_PLUGINS, environment
from tests.processes import python

SEQ, WIDTH, SCORES = 256, 32, Scores(scale=32**-0.5, softcap=4.0)
SPLASH = Kernels(kind="splash", interpret=True)


def arrays(heads=4, groups=2):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (1, SEQ, count, WIDTH))
        for key, count in zip(keys, (heads, groups, groups, heads), strict=True)
    ]


@pytest.mark.parametrize(
    ("form", "causal", "window", "packed"),
    [("ulysses", True, 0, True), ("ulysses", True, 70, False), ("all_gather", False, None, True)],
)
def test_splash_attention_gives_what_blocks_give(form, causal, window, packed):
    *qkv, cotangent = arrays()
    cut, spec = Cut(axis="context", ways=2), PartitionSpec(None, "context")
    given = (
        [jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (1, SEQ))).astype(np.int32))]
        if packed
        else []
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))

    def run(kernels):
        collected = RinglessAttention(cut=cut, scores=SCORES, causal=causal, kernels=kernels)
        attention = functools.partial(getattr(collected, form), window=window)
        region = jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(spec,) * (3 + len(given)),
            out_specs=spec,
            check_vma=False,
        )
        return jax.jit(
            lambda *qkv: (lambda result, pull: (result, pull(cotangent)))(
                *jax.vjp(lambda *qkv: region(*qkv, *given), *qkv)
            )
        )(*qkv)

    (result, gradients), (found, others) = run(Kernels()), run(SPLASH)
    for one, other in zip((result, *gradients), (found, *others), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("everywhere", [True, False])
def test_layers_with_and_without_a_window_have_a_kernel_each(everywhere):
    """A loop over layers of both kinds chooses when it runs; latent attention brings queries and
    keys in two parts, the second without heads.
    """
    query, key, value, _ = arrays()
    form = Attention(
        scale=0.2, causal=True, window=100, softcap=0.0, block=0, parts=2, chosen=True, packed=False
    )
    given = [query, query[..., :8], key, key[:, :, 0, :8], value, jnp.asarray(everywhere)]
    local = AttentionCall(
        form=form,
        ring=False,
        cut=None,
        heads=HeadSharding(axes=(), ways=1, shards_kv=True),
        num_heads=4,
        kernels=SPLASH,
    )
    true = attend(form, *given)
    np.testing.assert_allclose(
        jax.jit(local)(*given), true, rtol=2e-5, atol=2e-5 * float(jnp.abs(true).max())
    )


def of(*shape, dtype=jnp.bfloat16):
    return SimpleNamespace(shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "shapes", "how", "why"),
    [
        ("splash", {}, {}, ""),
        ("cudnn", {}, {}, ""),
        ("cudnn", {}, {"window": 8}, ""),
        ("blocks", {"query": of(1, 7, 3, 5)}, {"window": jnp.int32(1)}, ""),
        (
            "splash",
            {name: of(1, 200, 4, 64) for name in ("query", "key", "value")},
            {},
            "a sequence of 200 is not a multiple of 128",
        ),
        ("splash", {}, {"window": jnp.int32(3)}, "the window is known only when the program runs"),
        ("cudnn", {"query": of(1, 64, 4, 64)}, {}, "64 queries do not stand where 256 keys do"),
        ("cudnn", {"query": of(1, 64, 4, 64)}, {"causal": False}, ""),
        (
            "cudnn",
            {"query": of(1, 256, 4, 64, dtype=jnp.float32)},
            {},
            "the kernel is for bfloat16 and float16, not for float32",
        ),
        ("cudnn", {"value": of(1, 256, 4, 48)}, {}, ""),
        ("cudnn", {name: of(1, 256, 4, 192) for name in ("query", "key")}, {}, ""),
        (
            "cudnn",
            {name: of(1, 256, 4, 60) for name in ("query", "key", "value")},
            {},
            "heads are 60 wide: no multiple of 8",
        ),
        ("cudnn", {}, {"scores": SCORES}, "scores are capped"),
        ("cudnn", {}, {"documents": True}, "there are several documents"),
        ("cudnn", {}, {"window": 8, "causal": False}, "the window is to both sides"),
    ],
)
def test_a_kernel_says_why_it_does_not_apply(kind, shapes, how, why):
    given = {
        "query": of(1, 256, 4, 64),
        "key": of(1, 256, 4, 64),
        "value": of(1, 256, 4, 64),
        "scores": Scores(scale=1.0),
        **shapes,
        **how,
    }
    mask = AttentionMask(
        **{name: given.pop(name) for name in ("window", "causal") if name in given}
    )
    found = Kernels(kind=kind).why_not(mask=mask, **given)
    assert str(found).startswith(why) and bool(found) == bool(why)


@pytest.mark.parametrize(("width", "values"), [(48, 32), (32, 48), (32, 32)])
@pytest.mark.parametrize("window", [None, 24])
def test_heads_of_two_widths_are_padded_for_a_kernel_that_has_one(
    width, values, window, monkeypatch
):
    """JAX's own attention stands in for the kernel of cuDNN, which it has the signature of."""

    def one_width(*arrays, implementation, **how):
        assert implementation == "cudnn" and len({array.shape[3] for array in arrays}) == 1
        return own(*arrays, implementation="xla", **how)

    own = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", one_width)
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(keys[i], (2, 64, heads, wide)).astype(jnp.bfloat16)
        for i, (heads, wide) in enumerate([(4, width), (2, width), (2, values)])
    )

    def loss(kind, *given):
        found = Kernels(kind=kind).attention(
            *given, scores=Scores(scale=0.2), mask=AttentionMask(window=window)
        )
        assert found.shape == (2, 64, 4, values)
        return jnp.sum(jnp.sin(found.astype(jnp.float32)))

    mine, true = (
        jax.grad(partial(loss, kind), argnums=(0, 1, 2))(query, key, value)
        for kind in ("cudnn", "blocks")
    )
    for one, other in zip(mine, true, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=0.05, atol=0.03
        )


def test_a_gpu_that_cudnn_refuses_is_said(monkeypatch):
    def refused(*arrays, **how):
        raise NotImplementedError("The head dim must be <= 128 and a multiple of 8, but got 192.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refused)
    given = [array.astype(jnp.bfloat16) for array in arrays()[:3]]
    with pytest.raises(LayoutError, match=r"on this GPU: The head dim must be <= 128"):
        Kernels(kind="cudnn").attention(*given, scores=Scores(scale=1.0))


def test_a_kernel_that_does_not_apply_is_not_replaced_in_silence():
    with pytest.raises(
        LayoutError,
        match=(
            r"kind 'cudnn': the kernel is for bfloat16 and float16, not for float32\nTry:"
            r" Kernels\(kind=\"blocks\"\)"
        ),
    ):
        Kernels(kind="cudnn").attention(*arrays()[:3], scores=Scores(scale=1.0))
    with pytest.raises(
        LayoutError, match="kind 'splash': 128 queries do not stand where 256 keys do"
    ):
        SPLASH.attention(arrays()[0][:, :128], *arrays()[1:3], scores=SCORES)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in GPU_PLUGINS),
    reason="the GPU compiler may find cuDNN",
)
def test_without_cudnn_a_program_says_what_to_install():
    given = [array.astype(jnp.bfloat16) for array in arrays()[:3]]
    with pytest.raises(MissingPackageError, match="Try: pip install nvidia-cudnn-cu13"):
        Kernels(kind="cudnn").attention(*given, scores=Scores(scale=1.0))


COMPILE = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.block import Cut
from shardlib.lowering.context.dispatch import RinglessAttention
from shardlib.lowering.context.dispatch import Kernels

mesh, spec = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices), ("context",)), PartitionSpec(None, "context")
def program(kind):
    collected = RinglessAttention(cut=Cut(axis="context", ways=4), scores=Scores(scale=1.0), kernels=Kernels(kind=kind))
    run = functools.partial(collected.ulysses, window=1000)
    region = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    given = [jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for heads in (8, 4, 4)]
    made = jax.jit(jax.grad(lambda *qkv: region(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2))).lower(*given).compile()
    return made.as_text().count('custom_call_target="tpu_custom_call"'), made.memory_analysis().temp_size_in_bytes
print(json.dumps({kind: program(kind) for kind in ("blocks", "splash")}))
"""


@pytest.mark.processes
@pytest.mark.compiler("tpu")
def test_the_tpu_compiler_makes_the_kernels():
    done = python("-c", COMPILE, variables=environment("tpu", 4))
    found = json.loads(done.stdout.splitlines()[-1])
    assert (
        found["blocks"][0] == 0 and found["splash"][0] == 3
    )  # forward, of queries, of keys and values
    assert found["splash"][1] < found["blocks"][1]
