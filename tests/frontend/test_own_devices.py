"""Devices and keys of the user's own: a mesh or a list of devices in place of a topology, a key in
place of a seed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import shardlib
from tests.frontend.equality import plain

ROWS = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 8), np.float32)}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model.down(jax.nn.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)


def own_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def first(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (8, 8))}


def step(state: dict[str, jax.Array], batch: Any) -> tuple[dict[str, jax.Array], Any]:
    value, gradients = jax.value_and_grad(own_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), {"loss": value}


def used(tree: Any) -> set[jax.Device]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set}


def test_a_mesh_or_devices_are_the_machine_and_run_the_program() -> None:
    last = jax.devices()[4:]
    mesh = jax.sharding.Mesh(np.array(last).reshape(2, 2), ("rows", "model"))
    pin = {"mesh": {"data": 2, "tensor": 2}}
    losses: list[float] = []
    for own in (mesh, last, "cpu:4"):
        program = shardlib.compile(Model, loss, optax.sgd(0.1), ROWS, topology=own, pin=pin)
        assert program.plan.topology == "cpu:4" and program.plan.mesh.devices == 4
        state = program.init(seed=0)
        assert used(state) == set(jax.devices()[:4] if own == "cpu:4" else last)
        losses.append(float(program.step(state, ROWS)[1]["loss"]))
    np.testing.assert_allclose(losses, losses[2], rtol=1e-6)

    # The axes of a mesh fix nothing, unless they are handed on as a pin.
    ours = jax.sharding.Mesh(np.array(last).reshape(4, 1), ("data", "tensor"))
    plan = shardlib.plan(Model, loss, optax.sgd(0.1), ROWS, topology=ours, pin={"mesh": ours.shape})
    assert (plan.mesh["data"], plan.mesh.devices) == (4, 4)

    # Fewer devices than the machine has: the first of them.
    half = shardlib.compile(Model, loss, optax.sgd(0.1), ROWS, topology=last, pin={"mesh.data": 2})
    assert used(half.init()) == set(last[:2])


def test_steps_run_on_the_devices_that_their_topology_names() -> None:
    last = jax.devices()[4:]
    mesh = jax.sharding.Mesh(np.array(last), ("data",))
    program = shardlib.compile_step(first, step, ROWS, topology=mesh, pin={"mesh.data": 4})
    assert used(program.init()) == set(last)
    parallel = shardlib.parallelize(step, topology=last, pin={"mesh.data": 4})
    state, _ = parallel(first(jax.random.key(0)), ROWS)
    assert used(state) == set(last)


@pytest.mark.long
def test_a_key_in_place_of_a_seed_gives_the_same_numbers() -> None:
    dense = nn.Dense(8)
    programs = [
        shardlib.compile(
            init, function, optax.adam(0.1), ROWS, topology="cpu:8", pin={"mesh.data": 8}
        )
        for init, function in (
            (Model, loss),
            (shardlib.tree(first), own_loss),
            (
                shardlib.linen(dense, ROWS["x"]),
                lambda params, batch: jnp.mean(dense.apply({"params": params}, batch["x"]) ** 2),
            ),
        )
    ]
    programs.append(
        shardlib.compile_step(first, step, ROWS, topology="cpu:8", pin={"mesh.data": 8})
    )
    programs.append(
        shardlib.compile(
            Model,
            loss,
            optax.sgd(0.1),
            ROWS,
            topology="cpu:8",
            pin={"exchange": shardlib.DiLoCo(islands=2, every=2)},
        )
    )
    for program in programs:
        seeds = [3, np.int32(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3)]
        states = [plain(program.init(seed)) for seed in seeds]
        other = plain(program.init(jax.random.key(4)))
        for state in states[1:]:
            assert all(map(np.array_equal, states[0], state))
        assert not all(map(np.array_equal, states[0], other))


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (
            jax.random.key(0, impl="rbg"),
            "seed is a key<rbg>, and JAX's default is key<fry>\nTry:"
            " jax.config.update('jax_default_prng_impl', 'rbg') before the program is compiled",
        ),
        (jax.random.split(jax.random.key(0), 2), "seed is 2 keys of shape (2,)\nTry: one key"),
        (
            np.ones(3, np.float32),
            "seed is an array float32[3], and neither an integer nor a key (uint32[2])\nTry: an"
            " integer from 0 to 2147483647, or jax.random.key(0)",
        ),
    ],
)
def test_what_is_no_seed_and_no_key_is_told(seed: Any, message: str) -> None:
    program = shardlib.compile_step(first, step, ROWS, topology="cpu:8", pin={"mesh.data": 8})
    with pytest.raises(shardlib.ShardlibError) as caught:
        program.init(seed)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"topology": jax.sharding.AbstractMesh((8,), ("data",))},
            "topology is of type AbstractMesh, which has no devices\nTry: a jax.sharding.Mesh, or a"
            ' spelling such as topology="v5e:16x16"',
        ),
        (
            {"topology": ["cpu:8"], "batch": 64},
            "shardlib.compile_step cannot use its arguments:\n"
            "  - batch is 64, not a tree of arrays, of which the leading dim is the number of rows\n"
            "  - topology is a list, not a topology\n"
            'Try: batch={"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}; topology="cpu:8", a'
            " jax.sharding.Mesh, or a list of devices",
        ),
        (
            {"init": Model},
            "init cannot be traced: AttributeError: DynamicJaxprTracer has no attribute params\nTry:"
            " init=lambda key: state, or a state; of an NNX model, lambda key: Model(nnx.Rngs(key))",
        ),
    ],
)
def test_arguments_of_steps_of_another_kind_are_told(given: dict[str, Any], message: str) -> None:
    words = {"init": first, "step": step, "batch": ROWS, "topology": "cpu:8", **given}
    with pytest.raises(shardlib.ShardlibError) as caught:
        shardlib.compile_step(**words)
    assert str(caught.value) == message


def test_a_device_is_a_machine_of_one() -> None:
    program = shardlib.compile_step(first, step, ROWS, topology=jax.devices()[3])
    assert used(program.init()) == {jax.devices()[3]}
