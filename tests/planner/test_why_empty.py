"""Does an error about pins that allow no plan name the pin that is to blame?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.decisions.pins import Pins
from shardlib.planner import search as planner
from tests.planner import worlds

BATCH = {"x": np.ones((8, 16), np.float32)}
LAYERS = 3
NONE, LOOP = "has no layers that repeat", "has 3 layers that repeat"


def initialise(key: jax.Array) -> dict[str, Any]:
    """Three layers in a stack, and a head."""
    stack = jnp.ones((LAYERS, 16, 16))
    return {"layers": {"up": stack, "down": stack}, "head": jnp.ones((16, 8))}


def flat(params: Any, batch: Any) -> jax.Array:
    """A loss without layers in a loop."""
    return ((batch["x"] @ params["head"]) ** 2).mean()


def looped(params: Any, batch: Any) -> jax.Array:
    """A loss of layers in a loop."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    return ((jax.lax.scan(layer, batch["x"], params["layers"])[0] @ params["head"]) ** 2).mean()


@pytest.mark.parametrize(
    ("where", "pin", "why"),
    [
        ("h100:2", {"zero": 1, "mesh.fsdp": 1}, "pinned to 1: fsdp; of no use for world: expert"),
        ("h100:2", {"zero": 3, "mesh.tensor": 2}, "no devices left: fsdp; of no use for world"),
        ("h100:1", {"zero": 2}, "no devices left: fsdp; of no use for world: expert, context"),
    ],
)
def test_nothing_that_zero_could_shard_over_is_said(
    where: str, pin: dict[str, Any], why: str
) -> None:
    with pytest.raises(shardlib.PinError) as error:
        planner.search(worlds.mlp(), where, pin)
    assert why in str(error.value) and str(error.value).endswith(", or zero=0")


def test_pins_are_said_as_users_write_them() -> None:
    pins = Pins.parse({"mesh.tensor": 8, "offload": [], "remat": "none"})
    assert str(pins) == "mesh.tensor=8, remat='none', offload=[]"


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (
            {"mesh.tensor": 8},
            "the pinned axes (tensor=8) need 8 devices, which do not divide the 2",
        ),
        (
            {"mesh.tensor": 2, "mesh.fsdp": 2},
            "the pinned axes (fsdp=2 and tensor=2) need 4 devices",
        ),
    ],
)
def test_axes_that_take_more_devices_than_there_are_say_how_many(pin: Any, said: str) -> None:
    with pytest.raises(shardlib.PinError) as error:
        planner.search(worlds.mlp(), "h100:2", pin)
    assert said in str(error.value)


def listed(params: Any, x: jax.Array) -> jax.Array:
    """Layers in a Python loop."""
    for at in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"layer{at}"])
    return x


def beside(params: Any, batch: Any) -> jax.Array:
    return listed(params, batch["x"]).sum() + listed(params, batch["y"]).sum()


def nested(params: Any, batch: Any) -> jax.Array:
    return listed(params, listed(params, batch["x"])).sum()


@pytest.mark.parametrize(
    ("loss", "pin"),
    [
        (beside, {"mesh": {"stage": 2}}),
        (beside, {"remat": "full", "remat_layers": 2}),
        (nested, {"mesh": {"stage": 2}}),
    ],
)
def test_a_loss_that_calls_its_model_twice_is_told_so(loss: Any, pin: dict[str, Any]) -> None:
    def initialise(key: jax.Array) -> Any:
        return {f"layer{at}": jax.random.normal(key, (16, 16)) for at in range(LAYERS)}

    with pytest.raises(shardlib.PinError) as error:
        shardlib.plan(
            shardlib.tree(initialise),
            loss,
            optax.sgd(0.1),
            {**BATCH, "y": BATCH["x"]},
            topology="cpu:2",
            pin=pin,
        )
    said = str(error.value)
    assert "the loss runs the layers of the model 'initialise', or some of them, twice" in said
    assert "one call of the model for all rows" in said and "scan" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "topology", "pin", "said"),
    [
        (flat, "cpu:8", {"schedule": "1f1b"}, ["schedule=", NONE, "in a list or under a scan"]),
        (flat, "cpu:8", {"pipeline": "programs"}, ["pipeline='programs'", NONE]),
        (flat, "cpu:8", {"accumulation": 2}, ["accumulation=2", NONE]),
        (flat, "cpu:8", {"virtual_stages": 2}, ["virtual_stages=2 splits", NONE]),
        (flat, "cpu:8", {"gather": "once"}, ["gather='once' splits", NONE]),
        (flat, "cpu:8", {"mesh.expert": 2}, ["expert=2", "shardlib.functions.experts.visit"]),
        (flat, "cpu:8", {"context": "all-gather"}, ["context='all-gather'", "no sequence"]),
        (looped, "cpu:8", {"mesh": {"stage": 4, "data": 2}}, ["stage=4", LOOP, "stage=3 at most"]),
        (looped, "cpu:8", {"remat": "full", "remat_layers": 99}, ["remat_layers=99", LOOP]),
        (looped, "cpu:8", {"remat_layers": 3}, ["remat_layers=3", LOOP, "without a number"]),
        (
            looped,
            "cpu:8",
            {"remat_classes": {"layers": ["full", 9]}},
            ["9 of the layers of 'layers'", "has 3 there"],
        ),
        (
            looped,
            "cpu:6",
            {
                "mesh": {"stage": 3, "data": 2},
                "schedule": "interleaved",
                "virtual_stages": 3,
            },
            ["virtual_stages=3", "9 chunks in all", LOOP],
        ),
        (
            looped,
            "cpu:6",
            {"mesh": {"stage": 3, "data": 2}, "schedule": "interleaved"},
            ["schedule='interleaved'", "6 chunks in all", "'1f1b'"],
        ),
    ],
)
def test_message_names_the_pin(loss: Any, topology: str, pin: Any, said: list[str]) -> None:
    with pytest.raises(shardlib.PinError) as error:
        shardlib.plan(
            shardlib.tree(initialise), loss, optax.adam(1e-3), BATCH, topology=topology, pin=pin
        )
    for part in said:
        assert part in str(error.value)
    assert "multiple of the number of devices" not in str(error.value)
    assert "(('layers'" not in str(error.value)
