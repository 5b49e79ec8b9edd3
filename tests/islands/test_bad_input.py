"""What users can get wrong about islands: each an error before anything starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.exchanges import read_exchange
from tests.islands.test_diloco import AXES, compiled, loss, rows, weights

ISLANDS = "diloco:2:10"


def plan(batch: Any = None, topology: str = "cpu:8", **pin: Any) -> shardlib.Plan:
    return shardlib.plan(
        shardlib.tree(weights, AXES),
        loss,
        optax.sgd(0.1),
        rows(0) if batch is None else batch,
        topology=topology,
        pin=pin,
    )


@pytest.mark.parametrize(
    ("exchange", "says"),
    [
        ("dilco:2", "did you mean 'diloco'"),
        ("diloco:2:10:0.5", "has no name"),
        ("diloco:2:ten", "every is 'ten'; it is an integer"),
        ("diloco:2:islands=4", "says islands twice"),
        ("exact:2", "'2' has no name; exact has no settings"),
        ("exact:islands=2", "exact has no settings, and not islands"),
        ("gossip:6", "it is a power of two"),
        ("gossip:2:ring", "a ring has at least 3"),
        ("gossip:8:star", "graph is 'star'; it is one of"),
        ("diloco:2:10:fragments=3", "which 3 fragments do not divide"),
        ("diloco:2:10:wire=int2", "wire is 'int2'; it is one of 'float32'"),
        ({"kind": "diloco", "evry": 3}, "and not evry"),
        ({"islands": 2}, "it is one of"),
        (2, "it is one of"),
        ({"kind": "diloco", "islands": 1}, "islands is 1; it is an integer of at least 2"),
        ({"kind": "diloco", "every": 0}, "every is 0; it is an integer of at least 1"),
        ({"kind": "diloco", "every": True}, "every is True"),
        ({"kind": "diloco", "every": 2.5}, "every is 2.5"),
        ({"kind": "diloco", "rate": 0}, "rate is 0; it is a number of more than 0"),
        ({"kind": "diloco", "rate": float("nan")}, "rate is nan"),
        ({"kind": "diloco", "momentum": 1.0}, "momentum is 1.0"),
    ],
)
def test_what_is_no_exchange_says_what_would_be_one(exchange: object, says: str) -> None:
    with pytest.raises(shardlib.PinError, match=says.replace("(", r"\(")):
        read_exchange("exchange", exchange)


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ({"exchange": "diloco:3"}, shardlib.BatchError, "do not divide among 3 islands"),
        (
            {"exchange": "diloco:16"},
            shardlib.TopologyError,
            "16 islands do not divide the 8 devices of cpu:8",
        ),
        (
            {"exchange": ISLANDS, "topology": "v5e:4x4"},
            shardlib.TopologyError,
            r"islands are whole slices, and v5e:4x4 is one\nTry: topology='2\*v5e:4x4'",
        ),
        (
            {"exchange": "diloco:4", "topology": "2*h100:8"},
            shardlib.TopologyError,
            "4 islands do not divide the 2 domains",
        ),
        ({"mesh.island": 2}, shardlib.PinError, "are islands, which are pinned with how they meet"),
    ],
)
def test_islands_that_do_not_divide(asked: dict[str, Any], kind: type, says: str) -> None:
    with pytest.raises(kind, match=says):
        plan(**asked)


def test_frameworks_and_rules_have_no_islands() -> None:
    given = (shardlib.tree(weights, AXES), loss, optax.sgd(0.1), rows(0))
    with pytest.raises(shardlib.PinError, match="megatron-core runs its own"):
        shardlib.plan(
            *given, topology="2*h100:8", pin={"exchange": ISLANDS}, framework="megatron-core"
        )
    with pytest.raises(shardlib.PlanError, match="refine is about the plans of one island"):
        shardlib.plan(*given, topology="cpu:8", pin={"exchange": ISLANDS}, refine=1)
    with pytest.raises(shardlib.PinError, match="'embed' -> 'island' is not a mesh axis"):
        plan(rules=[["embed", "island"]])


@pytest.mark.parametrize("way", [shardlib.plan, shardlib.compile])
def test_state_that_steps_update_is_refused(way: Any) -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

    with pytest.raises(shardlib.PinError, match="cannot be carried out: steps update"):
        way(
            lambda rngs: Net(rngs),
            lambda model, batch: jnp.mean(model.norm(model.dense(batch["x"])) ** 2),
            optax.sgd(0.1),
            {"x": np.ones((8, 8), np.float32)},
            topology="cpu:4",
            pin={"exchange": ISLANDS},
        )


@pytest.mark.long
def test_batches_and_states_that_do_not_fit() -> None:
    program = compiled(optax.sgd(0.1), exchange=ISLANDS)
    state = program.init(0)
    short = jax.tree.map(lambda a: a[:-1], rows(0))
    with pytest.raises(shardlib.BatchError, match=r"int32\[15, 8\], compiled for int32\[16, 8\]"):
        program.step(state, short)
    with pytest.raises(shardlib.BatchError):
        program.step(state, jax.tree.map(lambda a: a[:-2], rows(0)))
    with pytest.raises(shardlib.BatchError):
        program.step(state, {"inputs": rows(0)["inputs"]})
    with pytest.raises(shardlib.StateError, match="and not of islands"):
        program.step(state.islands[0], rows(0))  # pyright: ignore[reportArgumentType]
    before = state
    state, _ = program.step(state, program.put(rows(0)))
    assert state.step == 1
    for asked in (program.module, lambda one: program.evaluate(one, rows(0))):
        with pytest.raises(shardlib.StateError):
            asked(before)


def test_a_plan_of_islands_is_stored_and_carried_out() -> None:
    made = plan(exchange=ISLANDS)
    again = shardlib.Plan.from_json(made.to_json())
    assert again.exchange == made.exchange == shardlib.DiLoCo(islands=2, every=10)
    assert again.mesh["island"] == 2 and again.digest == made.digest != plan().digest
    assert made.estimate.tokens == plan().estimate.tokens
    program: Any = shardlib.compile(
        shardlib.tree(weights, AXES), loss, optax.sgd(0.1), rows(0), plan=again
    )
    state, metrics = program.step(program.init(0), rows(0))
    assert np.isfinite(metrics["loss"]) and len(state.islands) == 2


@pytest.mark.parametrize("way", [shardlib.plan, shardlib.compile])
def test_what_islands_cannot_carry_is_in_no_plan(way: Any) -> None:
    given = (shardlib.tree(weights, AXES), loss, optax.sgd(0.1), rows(0))
    with pytest.raises(shardlib.PinError, match="which islands share"):
        way(*given, topology="cpu:8", pin={"exchange": "diloco:2:5", "offload": ["disk"]})
    with pytest.raises(shardlib.PinError, match="islands lie on the outermost links"):
        way(
            *given,
            topology="cpu:8",
            pin={"exchange": "diloco:2:5", "axis_order": ["data", "island"]},
        )


def test_what_an_island_cannot_says_that_it_is_one() -> None:
    with pytest.raises(shardlib.PinError) as caught:
        plan(exchange=ISLANDS, mesh={"fsdp": 8})
    assert str(caught.value) == (
        "the mesh fsdp=8 has 8 devices and cpu:4 has 4\nThat is of one island: each of 2 on cpu:8"
        " has 4 devices (cpu:4) and its part of the rows\nTry: a smaller mesh, or a topology of as"
        " many devices"
    )
