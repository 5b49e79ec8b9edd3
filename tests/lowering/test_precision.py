"""Steps in the dtypes of a plan compute what the same thing written by hand computes on one device,
and reduce gradients in the dtype of the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlib.errors import PinError
from shardlib.lowering.collectives import eight_bit_matmul, require_matmuls
from shardlib.verification.report import CompiledStep, wire_dtypes
from tests.lowering import small

SGD = functools.partial(optax.sgd, 0.5, momentum=0.9)


def cast(tree, dtype):
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        tree,
    )


@functools.cache
def by_hand(steps, param_dtype=None, matmul_dtype=None, moment_dtype=None, model="float32"):
    """Losses, parameters and momentum after some steps on one device, in plain JAX and optax."""

    def eight_bit_matmul(a, b):
        return (
            (a.astype(matmul_dtype) @ b.astype(matmul_dtype)).astype(a.dtype)
            if matmul_dtype
            else a @ b
        )

    wide, optimizer, batch = jnp.promote_types(model, param_dtype or model), SGD(), small.batch()
    params = small.values(model)
    state = cast(optimizer.init(params), moment_dtype or model)
    params, losses = cast(params, param_dtype), []
    for _ in range(steps):
        value, gradients = jax.value_and_grad(
            lambda params: small.loss(cast(params, model), batch, eight_bit_matmul)
        )(params)
        updates, state = optimizer.update(
            cast(gradients, wide), cast(state, wide), cast(params, wide)
        )
        params, state = (
            cast(optax.apply_updates(cast(params, wide), updates), param_dtype),
            cast(state, moment_dtype or model),
        )
        losses.append(float(value))
    return losses, params, state


CASES = [
    (
        {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
        {"param_dtype": "bfloat16", "moment_dtype": "bfloat16"},
    ),
    (
        {"mesh": {"data": 2, "fsdp": 4}, "zero": 2, "microbatches": 2},
        {"gradient_dtype": "bfloat16", "reduction_dtype": "bfloat16"},
    ),
    (
        {
            "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
            "zero": 3,
            "schedule": "1f1b",
            "microbatches": 4,
            "gather": "once",
        },
        {"param_dtype": "bfloat16", "matmul_dtype": "bfloat16"},
    ),
    (
        {
            "mesh": {"stage": 2, "data": 2, "tensor": 2},
            "schedule": "1f1b",
            "microbatches": 4,
            "pipeline": "programs",
        },
        {"param_dtype": "bfloat16", "gradient_dtype": "bfloat16", "reduction_dtype": "bfloat16"},
    ),
    ({"mesh": {"data": 8}}, {"matmul_dtype": "float16"}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("pin", "dtypes"),
    CASES,
    ids=lambda value: (
        " ".join(map(str, value.values())) if "mesh" not in value else str(value["mesh"])
    ),
)
def test_steps_equal_those_written_by_hand(pin, dtypes):
    program = small.program(SGD(), {**pin, **dtypes})
    assert dict(program.plan.dtypes) == dtypes
    state, losses = program.init(0), []
    for _ in range(3):
        state, metrics = program.step(state, small.batch())
        losses.append(float(metrics["loss"]))
    wanted, params, moments = by_hand(
        3,
        **{
            word: dtype
            for word, dtype in dtypes.items()
            if word not in ("gradient_dtype", "reduction_dtype")
        },
    )
    assert losses[0] == pytest.approx(wanted[0], rel=1e-5) and losses == pytest.approx(
        wanted, rel=3e-3
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {
        dtypes.get("param_dtype", "float32")
    }
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.opt_state)} == {
        dtypes.get("moment_dtype", "float32")
    }
    # Sums in another order round differently: a few units in the last of the 8 binary digits of
    # bfloat16.
    assert small.farthest((state.params, state.opt_state), (params, moments)) < 0.025


@pytest.mark.long
def test_float32_at_rest_are_master_weights_of_a_model_in_16_bits():
    tiny = optax.sgd(2e-4)
    program = small.program(
        tiny, {"mesh": {"fsdp": 8}, "zero": 3, "param_dtype": "float32"}, dtype=jnp.bfloat16
    )
    plain = small.program(tiny, {"mesh": {"fsdp": 8}, "zero": 3}, dtype=jnp.bfloat16)
    state, lost = program.init(0), plain.init(0)
    assert (
        program.state.params["up"].dtype == jnp.float32
        and plain.state.params["up"].dtype == jnp.bfloat16
    )
    first = np.asarray(state.params["up"])
    gradients = jax.grad(lambda params: small.loss(cast(params, "bfloat16"), small.batch()))(
        cast(small.values("bfloat16"), "float32")
    )["up"]
    state, _ = program.step(state, small.batch())
    lost, _ = plain.step(lost, small.batch())
    moved = np.asarray(state.params["up"]) - first
    assert np.abs(moved + 2e-4 * np.asarray(gradients)).max() < 0.05 * np.abs(moved).max()
    assert np.mean(np.asarray(lost.params["up"], np.float32) == first) > 0.95 > np.mean(moved == 0)


def reduced(program):
    """(dtype, elements) of every result of a sum over devices in the program before it is
    compiled.
    """
    text = program.lower().as_text()
    found = re.findall(
        r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<([\dx]*?)x?([a-z]+\d+)>',
        text,
        re.DOTALL,
    )
    return [
        (dtype, int(np.prod([int(size) for size in dims.split("x") if size])))
        for dims, dtype in found
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_matrices_and_tables_are_reduced_in_the_dtype_of_the_plan(dtype):
    found = reduced(
        small.program(SGD(), {"mesh": {"data": 2, "fsdp": 4}, "zero": 2, "reduction_dtype": dtype})
    )
    matrices = [name for name, size in found if size >= small.EMBED * small.MLP]
    assert len(matrices) >= 4 and set(matrices) == {{"bfloat16": "bf16", "float16": "f16"}[dtype]}


def test_reductions_in_another_dtype_than_the_plans_are_found():
    plan = small.program(SGD(), {"mesh": {"data": 8}, "reduction_dtype": "bfloat16"}).plan
    step = CompiledStep(
        device_bytes={},
        collectives=(),
        wire_bytes=0.0,
        compute_seconds=0.0,
        device_kind="",
        reductions=(
            ("all-reduce", ("data",), "f32", 10),
            ("all-reduce", ("data",), "bf16", 5000),
            ("all-reduce", ("tensor",), "f32", 9000),
        ),
    )
    assert list(wire_dtypes(plan, step)) == []
    wide = dataclasses.replace(
        step, reductions=(("reduce-scatter", ("data",), "f32", 5000), *step.reductions)
    )
    (finding,) = wire_dtypes(plan, wide)
    assert (
        finding.code == "reduction-dtype"
        and "reduce-scatter over data" in finding.where
        and "f32" in finding.message
    )
    assert list(wire_dtypes(dataclasses.replace(plan, dtypes=()), wide)) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("numbers", "left", "right"),
    [
        ((((2,), (0,)), ((), ())), (4, 5, 16), (16, 8)),
        ((((1, 3), (2, 0)), ((0,), (1,))), (3, 8, 5, 16), (16, 3, 8, 6)),
    ],
)
def test_products_in_8_bits_and_their_gradients_are_near_those_in_float32(numbers, left, right):
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in (left, right))
    exact, pull_exact = jax.vjp(
        lambda a, b: jax.lax.dot_general(a, b, numbers),
        a.astype(jnp.float32),
        b.astype(jnp.float32),
    )
    found, pull = jax.vjp(
        eight_bit_matmul(numbers, (a.ndim, b.ndim), jnp.float8_e4m3fn, jnp.float32), a, b
    )
    cotangent = jnp.asarray(random.normal(size=exact.shape), jnp.float32)
    for one, wanted in zip((found, *pull(cotangent)), (exact, *pull_exact(cotangent)), strict=True):
        assert (
            float(jnp.abs(one.astype(jnp.float32) - wanted).mean() / jnp.abs(wanted).mean()) < 0.1
        )
    assert not np.asarray(pull(jnp.zeros_like(cotangent))[0], np.float32).any()


def test_a_step_with_products_in_8_bits_is_near_one_in_float32_and_chips_without_refuse():
    def loss(params, batch):
        return small.loss(
            params,
            batch,
            lambda a, b: (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32),
        )

    program = small.program(
        SGD(),
        {
            "mesh": {"data": 2, "fsdp": 4},
            "zero": 3,
            "matmul_dtype": "float8_e4m3fn",
            "reduction_dtype": "float32",
        },
        loss,
    )
    state, metrics = program.step(program.init(0), small.batch())
    losses, params, _ = by_hand(1)
    step = jax.tree.map(
        lambda after, before: np.asarray(after) - np.asarray(before), state.params, small.values()
    )
    wanted = jax.tree.map(
        lambda after, before: np.asarray(after) - np.asarray(before), params, small.values()
    )
    assert (
        float(metrics["loss"]) == pytest.approx(losses[0], rel=0.02)
        and small.farthest(step, wanted) < 0.2
    )
    assert "f8E4M3FN" in program.lower().as_text() and "f8E5M2" in program.lower().as_text()
    with pytest.raises(PinError, match="v5e"):
        require_matmuls(dataclasses.replace(program.plan, topology="v5e:2x4", source=None))
