"""The gradients of a step as a program of their own, against `jax.grad` of the whole batch on one
device.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.program import GradientProgram, by_path, with_trained
from tests.islands.test_diloco import AXES, loss, rows, weights


def compiled(pin: dict[str, Any], **more: Any) -> shardlib.Program:
    return shardlib.compile(
        shardlib.tree(weights, AXES),
        loss,
        optax.identity(),
        rows(0),
        topology="cpu:8",
        pin=pin,
        **more,
    )


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh.data": 8, "zero": 0},
        {"mesh.fsdp": 4, "mesh.tensor": 2, "zero": 3},
        {"mesh.fsdp": 4, "zero": 2, "microbatches": 2},
        {"mesh.stage": 2, "mesh.data": 2, "microbatches": 4},
        {"mesh.data": 4, "microbatches": 2, "reduction_dtype": "float32"},
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(pin: dict[str, Any]) -> None:
    program = compiled(pin)
    gradients, state = GradientProgram.of(program), program.init(0)
    metrics, found, _ = gradients.call(state.params, state.model_state, program.put(rows(0)))
    params: Any = jax.device_get(state.params)
    value, wanted = jax.jit(jax.value_and_grad(loss))(params, rows(0))
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    for path, array in by_path(found).items():
        np.testing.assert_allclose(array, wanted[path], rtol=1e-4, atol=1e-6, err_msg=path)
    twice = gradients.call(state.params, state.model_state, program.put(rows(0)))[1]
    jax.tree.map(np.testing.assert_array_equal, found, twice)


def test_parameters_of_the_host_are_placed_as_planned() -> None:
    program = compiled({"mesh.fsdp": 4, "mesh.tensor": 2, "zero": 3})
    params = program.init(0).params
    arrays = {path: np.asarray(leaf) + 1 for path, leaf in by_path(params).items()}
    placed = with_trained(program, params, arrays)
    for path, leaf in by_path(placed).items():
        np.testing.assert_array_equal(leaf, arrays[path])
        assert leaf.sharding == by_path(program.state.params)[path].sharding


def test_steps_that_cannot_be_divided_say_all_reasons() -> None:
    program = compiled({"offload": ["disk"]}, guards=shardlib.Guards())
    with pytest.raises(shardlib.PinError) as caught:
        GradientProgram.of(program)
    assert [one.split(" (")[0] for one in caught.value.failures] == [
        "its optimizer state is on disk",
        "it has guards, which skip updates",
    ]
