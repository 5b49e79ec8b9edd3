"""Matmuls that every device along an axis computes in whole are said, with their seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.machines.topology import topology
from shardlib.planner.search import search
from tests.planner import worlds

SIZE = 2048


def _plan(
    columns: int,
    mesh: dict[str, int],
    rules: Sequence[Sequence[str]] = (("first.kernel:1", "tensor"),),
) -> shardlib.Plan:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(SIZE, columns, use_bias=False, rngs=rngs)
            self.third = nnx.Linear(columns, columns, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))

    batch = {"x": jax.ShapeDtypeStruct((8192, SIZE), jnp.float32)}
    pin = {"mesh": mesh, "microbatches": 1, "rules": [["batch", ["data", "fsdp"]], *rules]}
    return shardlib.plan(
        Model,
        lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optax.sgd(1e-2),
        batch,
        topology="h100:8",
        pin=pin,
    )


def _found(plan: shardlib.Plan) -> list[shardlib.Finding]:
    return [finding for finding in plan.findings if finding.code == "replicated-compute"]


def test_a_matmul_with_an_indivisible_dim_is_said_with_its_seconds() -> None:
    plan = _plan(2047, {"tensor": 8})
    (finding,) = _found(plan)
    assert finding.where == "tensor"
    assert finding.severity == "warning"
    assert "third.kernel" in finding.message
    assert "second.kernel" not in finding.message
    # Three products of [8192, 2047] and [2047, 2047]: no less than at the peak, and no more than at
    # a third of it.
    least = 3 * 2 * 8192 * 2047**2 / topology(plan.topology).chip.peak("float32")
    amount, unit = finding.message.split("that take ")[1].split(" of a step")[0].split()
    seconds = float(amount) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert least < seconds < 3 * least
    text = " ".join(plan.explain().split())
    assert "are replicated over tensor=8, and each of its 8 devices computes all of them:" in text
    assert [
        one["where"]
        for one in json.loads(plan.to_json())["findings"]
        if one["code"] == "replicated-compute"
    ] == ["tensor"]


def test_the_seconds_are_those_that_an_axis_that_divides_them_saves() -> None:
    whole = _plan(3072, {"tensor": 8})
    divided = _plan(
        3072, {"tensor": 8}, rules=[["first.kernel:1", "tensor"], ["third.kernel:1", "tensor"]]
    )
    (finding,) = _found(whole)
    assert not _found(divided)
    amount, unit = finding.message.split("that take ")[1].split(" of a step")[0].split()
    seconds = float(amount) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    saved = whole.estimate.seconds.compute - divided.estimate.seconds.compute
    assert saved == pytest.approx(
        seconds * 7 / 8, rel=0.15
    )  # what is done to the results is divided, too


def test_what_divides_is_not_said() -> None:
    assert not _found(_plan(2047, {"data": 8}))


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [{"tensor": 8}, {"data": 2, "tensor": 4}, {"fsdp": 8}, {"stage": 2, "tensor": 4}]
)
def test_a_well_sized_transformer_computes_nothing_in_whole(mesh: dict[str, int]) -> None:
    problem = worlds.layers(
        batch=64, seq=1024, embed=1024, hidden=4096, heads=16, vocab=4096, depth=4
    )
    assert not _found(search(problem, topology("h100:8"), {"mesh": mesh}))
