"""Some of the layers recompute, or each class of them in its own way: the numbers stay, and memory
lies in between.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.errors import PlanError
from shardlib.models.config import Experts
from shardlib.verification.traffic import read_traffic
from tests.lowering.steps import DENSE, token_batch, trained
from tests.zoo.parity import capture, relative_errors

LAYERS, WIDTH = 6, 16


def values():
    """Two stacks of layers in loops, and two layers that are written out."""
    made = {
        name: (
            0.3
            * jnp.cos(0.7 * i + 1.1 * jnp.arange(n * WIDTH * WIDTH).reshape(n, WIDTH, WIDTH) % 53)
        )
        for i, (name, n) in enumerate((("first", LAYERS), ("second", LAYERS - 2)))
    }
    return {name: {"weights": leaf} for name, leaf in made.items()} | {
        "written": [{"weights": made["first"][0] * 0.5}, {"weights": made["first"][1] * 0.5}]
    }


def loss(params, batch):
    def layer(x, p):
        return x + jnp.tanh(x @ p["weights"]), None

    x, _ = jax.lax.scan(layer, batch["x"], params["first"])
    x, _ = jax.lax.scan(layer, x, params["second"], reverse=True)
    for p in params["written"]:
        x = x + jnp.sin(x @ p["weights"])
    return jnp.mean(x**2)


def batch():
    return {"x": np.random.default_rng(1).normal(size=(64, WIDTH)).astype(np.float32)}


def program(pin):
    axes = jax.tree.map(lambda leaf: ("layers", "embed", "mlp")[-leaf.ndim :], values())
    return shardlib.compile(
        shardlib.tree(lambda key: values(), axes),
        loss,
        capture(),
        batch(),
        topology="cpu:8",
        pin={"mesh": {"fsdp": 8}, "zero": 3, "microbatches": 1, **pin},
        batch_axes={"x": ("batch", None)},
    )


@pytest.mark.parametrize(
    "pin",
    (
        {"remat_classes": {"first": "full", "second": "none"}},
        {"remat_classes": {"first": ["full", 2], "second": ["dots", 3]}},
        {"remat_classes": {"second": ["full", 1]}},
        {"remat": "full", "remat_layers": 5},
    ),
    ids=str,
)
def test_gradients_are_those_of_one_device(pin):
    assert max(relative_errors(program(pin), loss, batch()).values()) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize(("layers", "travels"), [(0, 6 * 4), (1, 6 + 3 * 4), (3, 6 * 3 + 4)])
def test_collectives_are_those_of_the_layers_that_recompute_and_of_the_others(layers, travels):
    """Tokens travel twice more in a layer that is computed again; as planned, and as the compiler
    has it.
    """
    experts = Experts(count=8, per_token=2, mlp=64)
    config = replace(DENSE, layers=4, embed=32, mlp=64, experts=experts)
    pin = {"mesh": {"data": 2, "expert": 4}, "zero": 0, "microbatches": 1, "remat": "full"}
    pin |= {"remat_layers": layers} if layers else {}
    _, made = trained(*models.build(config), token_batch(8, 64), "cpu:8", pin, steps=0)
    compiled = read_traffic(made.compiled().as_text(), made.plan.mesh).collectives
    planned, found = (
        [one for one in every if one.kind == "all-to-all"]
        for every in (made.plan.estimate.collectives, compiled)
    )
    assert sum(one.count for one in found) == sum(one.count for one in planned) == travels
    assert sum(one.total_bytes for one in found) == sum(one.total_bytes for one in planned)


@pytest.mark.long
def test_layers_that_recompute_keep_less():
    """As the compiler has it."""
    whole, half, none = (
        small_memory(pin)
        for pin in ({"remat": "full"}, {"remat": "full", "remat_layers": 8}, {"remat": "none"})
    )
    assert whole < half < none
    assert abs(half - (whole + none) / 2) < 0.15 * (none - whole)


def small_memory(pin):
    """Temporaries of a step over sixteen layers of eight products each, whose weights are small
    beside what is kept.
    """

    def deep(params, batch):
        def layer(x, p):
            for k in range(8):
                x = x + jnp.sin(x @ p[k])
            return x, None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["stack"])[0] ** 2)

    model = shardlib.tree(
        lambda key: {"stack": jax.random.normal(key, (16, 8, 8, 8)) * 0.1},
        {"stack": ("layers", None, "embed", "mlp")},
    )
    rows = {"x": np.ones((4096, 8), np.float32)}
    return shardlib.compile(
        model,
        deep,
        capture(),
        rows,
        topology="cpu:8",
        pin={"mesh": {"data": 8}, "zero": 0, "microbatches": 1, **pin},
        batch_axes={"x": ("batch", None)},
    ).memory()["temporaries"]


def test_a_plan_with_classes_of_another_model_is_refused():
    made = program({"remat_classes": {"first": "full", "second": "none"}})
    other = replace(made.plan, remat_classes=(("encoder", "full", 6), ("second", "none", 0)))
    with pytest.raises(PlanError, match="has the groups first, second"):
        shardlib.compile(
            made.model, loss, capture(), batch(), plan=other, batch_axes={"x": ("batch", None)}
        ).compiled()


def layers_of_a_matmul(key):
    return {"up": jax.random.normal(key, (4, 16, 16)) / 4}


@pytest.mark.parametrize(
    "mesh", [{"data": 1}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}]
)
def test_saved_results_of_matmuls_are_not_computed_again(mesh):
    """What the backward pass of layers computes again, by the program: no matmul under "dots"."""

    def loss(params, batch):
        def layer(x, up):
            return jnp.tanh(x @ up), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["up"])[0] ** 2)

    def matmuls(remat):
        program = shardlib.compile(
            shardlib.tree(layers_of_a_matmul, {"up": ("layers", "in", "out")}),
            loss,
            optax.sgd(0.1),
            {"x": np.zeros((8, 16), np.float32)},
            topology=f"cpu:{math.prod(mesh.values())}",
            pin={"mesh": mesh, "remat": remat, "microbatches": 1, "zero": 0},
        )
        return program.lower().as_text().count("stablehlo.dot_general")

    assert matmuls("dots") == matmuls("none") < matmuls("full")
