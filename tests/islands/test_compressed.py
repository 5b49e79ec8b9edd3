"""Compressed gradients of islands, against loops over replicas and against what is exact."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardlib
from shardlib.islands.compression import Gradient, largest, low_rank, quantised, signs
from shardlib.islands.exchanges import PowerSGD, Quantised, TopK
from tests.islands.replicas import close, power_sgd, sign, top_k
from tests.islands.replicas import compressed as by_loop
from tests.islands.test_diloco import (
    AXES,
    STEPS,
    compiled,
    halves,
    loss,
    rows,
    trained,
    weights,
)

Tree = Any
NAMES = sorted(AXES)
MESHES = [
    {"mesh": {"data": 4}, "zero": 0},
    {"mesh": {"fsdp": 4}, "zero": 1},
    {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 2},
    {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3, "microbatches": 2},
]


def against(program: Any, exchange: Any, kept: Tree, optimizer: Any) -> None:
    """Twenty steps, as a loop over replicas does them."""
    losses, state = trained(program)
    first = jax.tree.map(np.asarray, program.module(program.init(0)))
    batches = [halves(rows(step)) for step in range(STEPS)]
    expected, params = by_loop(loss, first, optimizer, batches, exchange, kept)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(program.module(state), params)
    one, other = (island.params for island in state.islands)
    jax.tree.map(np.testing.assert_array_equal, one, other)  # alike on all islands, bit for bit


def zeros(name: str) -> np.ndarray:
    return np.zeros(jax.eval_shape(weights, jax.random.key(0))[name].shape, np.float32)


@pytest.mark.long
@pytest.mark.parametrize("pin", MESHES, ids=str)
def test_power_sgd_is_a_loop_over_replicas(pin: dict[str, Any]) -> None:
    optimizer = optax.sgd(0.5)
    program: Any = compiled(optimizer, exchange="compressed:2:powersgd:rank=2", **pin)
    factors = program.init(0).exchange.factors
    kept = {
        name: ([zeros(name), zeros(name)], np.asarray(factor))
        for name, factor in zip(NAMES, factors, strict=True)
        if factor.ndim
    }
    assert sorted(kept) == ["down", "head", "table", "up"]
    against(program, power_sgd, kept, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("pin", MESHES[1:3], ids=str)
def test_the_largest_numbers_are_a_loop_over_replicas(pin: dict[str, Any]) -> None:
    optimizer = optax.sgd(0.2)
    program: Any = compiled(
        optimizer, exchange="compressed:2:topk:density=0.05:momentum=0.5", **pin
    )
    shardings = jax.tree.leaves(program.programs[0].parts.param_shardings.state)
    blocks = {
        name: list(dict.fromkeys(map(_index, one.devices_indices_map(zeros(name).shape).values())))
        for name, one in zip(NAMES, shardings, strict=True)
    }
    kept = {name: [(zeros(name), zeros(name)) for _ in range(2)] for name in NAMES}
    exchange = top_k(0.05, 0.5, {name: [_slices(one) for one in blocks[name]] for name in NAMES})
    against(program, exchange, kept, optimizer)


def _index(slices: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple((one.start, one.stop) for one in slices)


def _slices(index: Any) -> Any:
    return tuple(slice(*one) for one in index)


@pytest.mark.parametrize("pin", MESHES[1:3], ids=str)
def test_signs_are_a_loop_over_replicas(pin: dict[str, Any]) -> None:
    optimizer = optax.sgd(0.2)
    program: Any = compiled(optimizer, exchange="compressed:2:sign", **pin)
    against(program, sign, {name: [zeros(name), zeros(name)] for name in NAMES}, optimizer)


def exchanged(function: Any, count: int) -> list[np.ndarray]:
    """What a function gives on two islands of one device for the same random numbers each time:
    inputs, then results, those of each island along the first dim.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("island",))
    spec = PartitionSpec("island")
    given = [
        np.random.default_rng(number).normal(size=(2, 24, 40)).astype(np.float32)
        for number in range(count)
    ]

    def on_one(*arrays: Any) -> Any:
        found = function(*(one[0] for one in arrays))
        return jax.tree.map(lambda one: one[None], found)

    specs = (spec,) * count
    results = jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=spec))(*given)
    return [*given, *map(np.asarray, results)]


def of_matrix(rank: int) -> Gradient:
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    return Gradient(
        shape=(24, 40),
        stacked=False,
        state=NamedSharding(mesh, PartitionSpec(None, None)),
        matrix=rank > 0,
    )


@pytest.mark.parametrize("by", ["rank 3", "int8", "int4", "sign"])
def test_what_is_sent_and_what_is_left_are_the_gradients(by: str) -> None:
    def function(gradient: Any, residual: Any) -> Any:
        total = [gradient + residual]
        if by == "rank 3":
            factor = jax.random.normal(jax.random.key(1), (40, 3))
            means, left, _ = low_rank([of_matrix(3)], total, [factor])
        elif by == "sign":
            means, left = signs([of_matrix(0)], 2, total)
        else:
            means, left = quantised(Quantised(by), 2, total)
        return means[0], left[0]

    gradient, residual, means, left = exchanged(function, 2)
    np.testing.assert_array_equal(means[0], means[1])
    np.testing.assert_allclose(
        2 * means[0] + left.sum(0), (gradient + residual).sum(0), rtol=1e-5, atol=1e-5
    )
    assert np.abs(left).max() > 1e-3


def test_largest_numbers_and_what_is_left_are_the_sums_of_gradients() -> None:
    by = TopK(density=0.1, momentum=0)

    def function(gradient: Any, residual: Any) -> Any:
        means, left, _ = largest(by, 0, 2, [gradient], [residual], [jnp.zeros((24, 40))])
        return means[0], left[0]

    gradient, residual, means, left = exchanged(function, 2)
    np.testing.assert_allclose(2 * means[0] + left.sum(0), (gradient + residual).sum(0), atol=1e-5)
    assert (left == 0).sum() == 2 * 96


def test_a_matrix_of_full_rank_is_exact() -> None:
    def function(gradient: Any) -> Any:
        factor = jax.random.normal(jax.random.key(1), (40, 24))
        means, left, _ = low_rank([of_matrix(24)], [gradient], [factor])
        return means[0], left[0]

    gradient, means, _ = exchanged(function, 1)
    np.testing.assert_allclose(means[0], gradient.mean(0), rtol=1e-4, atol=1e-4)


def test_gradients_of_zero_stay_zero() -> None:
    zero = jnp.zeros((24, 40))

    def function(_: Any) -> Any:
        factor = jax.random.normal(jax.random.key(1), (40, 3))
        means, left, factors = low_rank([of_matrix(3)], [zero], [factor])
        bits, rest = quantised(Quantised("int8"), 2, [zero])
        return means[0], left[0], factors[0], bits[0], rest[0]

    _, *results = exchanged(function, 1)
    for one in results:
        np.testing.assert_array_equal(one, 0)


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("powersdg", "did you mean 'powersgd'"),
        ("powersgd:rank=0", "rank is 0"),
        ("topk:density=0", "density is 0"),
        ("topk:density=2", "more than 0 and at most 1"),
        ("topk:density=0.3", "send more than all numbers"),
        ("topk:rank=2", "and not rank"),
        ("quantised:dtype=int2", "it is one of 'int8', 'int4'"),
        ("quantised:block=7", "it is even"),
    ],
)
def test_what_cannot_be_sent_says_why(by: str, says: str) -> None:
    with pytest.raises(shardlib.PinError, match=says):
        compiled(optax.sgd(0.1), exchange=f"compressed:2:{by}")


def test_guards_and_programs_of_stages_are_refused() -> None:
    given = shardlib.tree(weights, AXES), loss, optax.sgd(0.1), rows(0)
    with pytest.raises(shardlib.PinError, match="guards"):
        shardlib.compile(
            *given,
            topology="cpu:8",
            pin={"exchange": shardlib.Compressed(by=PowerSGD(rank=2))},
            guards=shardlib.Guards(),
        )


@pytest.mark.long
def test_density_falls_over_the_first_steps() -> None:
    program: Any = compiled(
        optax.sgd(0.1), exchange="compressed:2:topk:density=0.01:warm_up=3", mesh={"fsdp": 4}
    )
    assert [len(program.exchanges), program.exchange.meetings] == [4, 4]
    state, left = program.init(0), []
    for step in range(5):
        state, _ = program.step(state, rows(step))
        left.append(sum(int((np.asarray(one) == 0).sum()) for one in state.exchange.residual))
    assert left[0] > left[1] > left[2] > left[3]


# What crosses in few bits is rounded alike by all devices that hold the same.
