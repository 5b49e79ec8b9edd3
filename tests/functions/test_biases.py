"""What distances add to scores is what the papers say, on one device and on many."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import shardlib
from shardlib.errors import ModelError, PinError
from shardlib.functions.attention import Alibi, BiasForm, RelativeBias
from shardlib.lowering.context.block import Cut, PositionBias, Scores
from shardlib.lowering.context.dispatch import Ring, RinglessAttention
from tests.functions.biased import BUCKETS, FAR, GROUPS, HEADS, WIDTH, Biased, loss, written_bias

SEQ = 32


def arrays() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, SEQ, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    made = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    return [*made, jax.random.normal(keys[4], (BUCKETS, HEADS))]


def by_jax(kind: str, causal: bool, query: Any, key: Any, value: Any, array: Any) -> jax.Array:
    bias = written_bias(kind, array, query.shape[1], key.shape[1], causal=causal)
    return jax.nn.dot_product_attention(query, key, value, bias=bias, is_causal=causal)


def array_of(kind: str) -> jax.Array:
    return Alibi.of(HEADS).slopes if kind == "alibi" else arrays()[4]


def close(found: Any, true: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * float(jnp.abs(other).max()))


def test_slopes_are_the_published_ones():
    assert Alibi.of(8).slopes.tolist() == [2.0**-power for power in range(1, 9)]
    found = np.log2(Alibi.of(12).slopes)  # of no power of two, as BLOOM has them
    expected = [*range(-1, -9, -1), -0.5, -1.5, -2.5, -3.5]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["alibi", "relative"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [0, 8])
def test_attention_with_a_bias_is_that_of_jax(kind: str, causal: bool, block: int):
    def mine(query: Any, key: Any, value: Any, array: Any) -> jax.Array:
        bias = Alibi(array) if kind == "alibi" else RelativeBias(array, max_distance=FAR)
        return shardlib.attention(query, key, value, causal=causal, block=block, bias=bias)

    *qkv, cotangent, _ = arrays()
    given = [*qkv, array_of(kind)]
    found, pull = jax.vjp(mine, *given)
    true, back = jax.vjp(functools.partial(by_jax, kind, causal), *given)
    close((found, pull(cotangent)), (true, back(cotangent)))


FORMS = [
    ("ring", "relative", True, 5),
    ("ring", "relative", False, 1024),
    ("ring", "alibi", True, 1024),
    ("gathered", "relative", True, 5),
    ("exchanged", "relative", True, 1024),
    ("exchanged", "alibi", False, 5),
]


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize(("way", "kind", "causal", "block"), FORMS)
def test_over_devices_a_bias_is_that_of_one_device(way: str, kind: str, causal: bool, block: int):
    cut, scores = Cut(axis="context", ways=4), Scores(scale=WIDTH**-0.5, block=block)
    form = BiasForm(kind=kind, max_distance=FAR, both=not causal)  # type: ignore[arg-type]
    collected = RinglessAttention(cut=cut, scores=scores, causal=causal)
    ways: dict[str, Any] = {
        "ring": Ring(cut=cut, scores=scores, causal=causal).attention,
        "gathered": collected.all_gather,
        "exchanged": collected.ulysses,
    }
    spec = PartitionSpec(None, "context")
    region = jax.shard_map(
        lambda q, k, v, array: ways[way](q, k, v, bias=PositionBias(form=form, array=array)),
        mesh=Mesh(np.array(jax.devices()[:4]), ("context",)),
        in_specs=(spec, spec, spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )

    def mine(query: Any, key: Any, value: Any, array: Any) -> jax.Array:
        given = [*map(cut.dealt, (query, key, value)), array]
        return cut.collected(region(*given))

    *qkv, cotangent, _ = arrays()
    given = [*qkv, array_of(kind)]

    def both(function: Any) -> Any:
        def run(*given: Any) -> Any:
            result, pull = jax.vjp(function, *given)
            return result, pull(cotangent)

        return jax.jit(run)(*given)

    close(both(mine), both(functools.partial(by_jax, kind, causal)))


def batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, 61, (8, SEQ)).astype(np.int32) for name in ("inputs", "targets")}


@functools.cache
def one_step(kind: str) -> list[Any]:
    """Loss, and parameters after a step, without a plan."""
    model = Biased(kind, nnx.Rngs(0))
    value, gradients = nnx.value_and_grad(loss)(model, batch())
    params = nnx.state(model, nnx.Param)
    stepped = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients)
    return [value, stepped]


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "pin"),
    [
        ("relative", {"mesh": {"context": 2, "tensor": 2, "data": 2}, "context": "ring"}),
        ("relative", {"mesh": {"context": 2, "fsdp": 4}, "zero": 3, "context": "ulysses"}),
        ("relative", {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "attention": "blocks"}),
        ("relative", {"mesh": {"context": 2, "data": 4}, "context": "all-gather"}),
        ("relative", {"mesh": {"stage": 2, "data": 4}, "microbatches": 2}),
        ("alibi", {"mesh": {"context": 4, "tensor": 2}, "context": "ring"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value["mesh"]),
)
def test_steps_with_a_bias_are_those_of_one_device(kind: str, pin: dict[str, Any]):
    program = shardlib.compile(
        lambda rngs: Biased(kind, rngs),
        loss,
        optax.sgd(0.1),
        batch(),
        topology="cpu:8",
        pin=pin,
    )
    state, metrics = program.step(program.init(0), batch())
    assert program.plan.context == pin.get("context", "none")
    true = one_step(kind)
    close((metrics["loss"], jax.tree.leaves(state.params)), (true[0], jax.tree.leaves(true[1])))


@pytest.mark.parametrize(("topology", "kernel"), [("v5e:2x2", "splash"), ("h100:4", "cudnn")])
def test_kernels_of_vendors_have_no_bias_and_say_so(topology: str, kernel: str):
    shapes = {name: jax.ShapeDtypeStruct((8, 256), jnp.int32) for name in ("inputs", "targets")}
    given = (lambda rngs: Biased("alibi", rngs)), loss, optax.sgd(0.1), shapes
    plan = shardlib.plan(*given, topology=topology)
    assert plan.attention in ("traced", "blocks")
    with pytest.raises(PinError, match="distances add to scores, for which the kernel has no form"):
        shardlib.plan(*given, topology=topology, pin={"attention": kernel})


@pytest.mark.parametrize(
    ("bias", "causal", "said"),
    [
        (Alibi(jnp.ones(3)), True, r"slopes are \(3,\); there are 4 heads"),
        (RelativeBias(jnp.ones((8, 3))), True, r"the table is \(8, 3\); it is \[buckets, heads\]"),
        (RelativeBias(jnp.ones((2, 4))), False, "4 buckets at least"),
        (RelativeBias(jnp.ones((8, 4)), max_distance=4), True, "max_distance=4; 4 distances have"),
        (jnp.ones((1, 4, 32, 32)), True, "known are Alibi and RelativeBias"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias: Any, causal: bool, said: str):
    with pytest.raises(ModelError, match=said):
        shardlib.attention(*arrays()[:3], causal=causal, bias=bias)
