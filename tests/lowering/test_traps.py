"""Traps of today's JAX and Flax, each closed: what goes wrong silently elsewhere is right, or an
error, or a finding here.
"""

from __future__ import annotations

import collections
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib._jax_compat import unsharded_variables
from shardlib.annotation.model import read
from shardlib.errors import BatchError, LayoutError, PinError, TopologyError
from shardlib.layout import Layout, MeshShape
from shardlib.lowering.mesh import (
    device_mesh,
    optimizer_shardings,
    other_machine,
    parameter_shardings,
)
from shardlib.lowering.program import build_program
from tests.lowering import models
from tests.lowering.hand_plan import RULES, hand_plan
from tests.lowering.test_step import program as step_program


def mlp_program(mesh, rules=RULES, optimizer=None, loss=models.mlp_loss, **options):
    model, batch = read(models.Mlp), models.mlp_batch()
    plan = hand_plan(model, batch, mesh, rules=rules, **options)
    axes = {"batch.x": ("batch", None), "batch.y": ("batch", None)}
    return build_program(
        plan, model, model.bind(loss), optimizer or optax.sgd(0.1), batch, batch_axes=axes
    )


def spec(array):
    """The cut of an array without the Nones at its end."""
    entries = list(array.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def test_t1_two_plans_of_one_loss_never_share_a_program():
    one = mlp_program({"data": 2, "tensor": 2})
    other = mlp_program({"data": 2, "tensor": 2}, rules=[("batch", "data"), ("embed", "tensor")])
    assert one.plan.digest != other.plan.digest
    first, _ = one.step(one.init(0), models.mlp_batch())
    second, _ = other.step(other.init(0), models.mlp_batch())
    assert spec(first.params["up"]) == (None, "tensor")
    assert spec(second.params["up"]) == ("tensor",)
    assert f"shardlib_step_{one.plan.digest}" in one.compiled().as_text()
    assert f"shardlib_step_{other.plan.digest}" in other.compiled().as_text()


def test_t2_a_constraint_in_a_loss_of_evaluations_is_not_imposed():
    def evaluation(model, batch):
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ model.up[...], P("rows", "model"))
        return (hidden**2).mean()

    batch = models.mlp_batch()
    program = shardlib.compile(
        models.Mlp,
        models.mlp_loss,
        optax.sgd(0.1),
        batch,
        topology="cpu:8",
        evaluation=evaluation,
    )
    state = program.init(0)
    wanted = np.mean((batch["x"] @ np.asarray(state.params["up"])) ** 2)
    assert float(program.evaluate(state, batch)["loss"]) == pytest.approx(wanted, rel=1e-6)


def test_t3_optimizer_state_is_sharded_like_its_parameter():
    program = mlp_program(
        {"fsdp": 4, "tensor": 2},
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        zero=1,
    )
    state = program.init(0)
    adam = state.opt_state[1][0]
    assert spec(adam.mu["up"]) == spec(adam.nu["up"]) == ("fsdp", "tensor")
    assert spec(state.params["up"]) == (None, "tensor")
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state))
    after, _ = program.step(state, models.mlp_batch())
    assert spec(after.opt_state[1][0].mu["up"]) == ("fsdp", "tensor")


def test_t4_a_dim_that_does_not_divide_is_an_error_that_lists_every_parameter():
    with pytest.raises(LayoutError) as caught:
        model, batch = read(models.Mlp), models.mlp_batch(rows=15)
        plan = hand_plan(model, batch, {"data": 3})
        bad = Layout(("data",), ())
        plan = replace(
            plan,
            parameters=tuple(
                replace(p, rest=bad) if len(p.shape) == 2 else p for p in plan.parameters
            ),
        )
        parameter_shardings(plan, model, device_mesh(plan.mesh, jax.devices()[:3])[0])
    assert (
        str(caught.value) == "layouts of the plan do not fit the mesh data=3:\n"
        "  - down: dim 0 of (32, 16) has size 32, which 3 parts (data) do not divide\n"
        "  - up: dim 0 of (16, 32) has size 16, which 3 parts (data) do not divide\n"
        "Try: choose mesh sizes that divide the dims, or leave the rule for these names out"
    )


def test_t4_a_batch_that_does_not_divide_is_an_error():
    model = read(models.Mlp)
    plan = hand_plan(model, models.mlp_batch(16), {"data": 8})
    with pytest.raises(
        BatchError,
        match=r"batch.x: dim 0 of \(12, 16\) has size 12, which 8 parts \(data\) do not divide",
    ):
        build_program(
            plan, model, model.bind(models.mlp_loss), optax.sgd(0.1), models.mlp_batch(12)
        )


def test_t5_the_first_free_rule_wins_for_nnx_too_and_fallbacks_are_honoured():
    rules = [
        ("batch", "data"),
        ("mlp", "tensor"),
        ("embed", "tensor"),
        ("embed", "fsdp"),
        ("mlp", "data"),
    ]
    program = mlp_program({"data": 2, "fsdp": 2, "tensor": 2}, rules=rules)
    params = program.init(0).params
    assert spec(params["up"]) == ("fsdp", "tensor")
    assert spec(params["scale"]) == ("tensor",)


# also flax#5112: moments of a stack
def test_t6_stacks_without_a_name_are_cut_along_the_dims_that_were_named():
    program = step_program({"fsdp": 2, "tensor": 4}, optax.adam(1e-3), zero=1)
    state = program.init(0)
    up, mu = state.params["layers"]["mlp"]["up"], state.opt_state[0].mu["layers"]["mlp"]["up"]
    assert up.shape == mu.shape == (4, 16, 32)
    assert spec(up) == (None, None, "tensor") and spec(mu) == (None, "fsdp", "tensor")
    assert [finding.code for finding in program.findings] == ["stacking-dim-unnamed"]


def test_t7_a_mesh_never_ignores_devices_in_silence():
    mesh, findings = device_mesh(MeshShape(data=2, tensor=2))
    assert mesh.size == 4 and [finding.code for finding in findings] == ["idle-devices"]
    mesh, findings = device_mesh(MeshShape(data=2, tensor=4))
    assert mesh.size == 8 and not findings
    with pytest.raises(TopologyError, match="has 4 devices, argument `devices` gives 8"):
        device_mesh(MeshShape(data=2, tensor=2), jax.devices())


def test_t7_axes_are_auto_and_all_six_are_there():
    mesh, _ = device_mesh(MeshShape(tensor=8))
    assert mesh.axis_names == ("stage", "data", "fsdp", "expert", "context", "tensor")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert mesh.devices.reshape(-1).tolist() == jax.devices()


def test_optimizer_leaves_that_belong_to_no_parameter_are_whole_and_said():
    model, batch = read(models.Mlp), models.mlp_batch()
    plan = hand_plan(model, batch, {"fsdp": 8}, zero=3)
    mesh, _ = device_mesh(plan.mesh)
    cut = parameter_shardings(plan, model, mesh)
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, model.params)
    shardings, findings = optimizer_shardings(state, model.params, cut.state, mesh)
    assert all(isinstance(leaf, jax.sharding.NamedSharding) for leaf in jax.tree.leaves(shardings))
    assert [finding.code for finding in findings] == [
        "optimizer-state-whole"
    ] and "v_row.up (16,)" in findings[0].where


def test_paths_that_end_alike_are_told_apart():
    params = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "inner": {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)},
    }
    mesh, _ = device_mesh(MeshShape(data=2, tensor=4))
    cut = {
        "w": jax.sharding.NamedSharding(mesh, P("data")),
        "inner": {"w": jax.sharding.NamedSharding(mesh, P("tensor"))},
    }
    found, _ = optimizer_shardings(jax.eval_shape(optax.adam(1e-3).init, params), params, cut, mesh)
    assert found[0].mu["w"].spec == P("data") and found[0].mu["inner"]["w"].spec == P("tensor")


class Random(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(
            8, 16, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs
        )
        self.second = nnx.Linear(16, 8, kernel_init=nnx.initializers.normal(0.3), rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def test_random_numbers_do_not_depend_on_the_mesh():
    model, batch = read(Random), {"x": np.ones((8, 8), np.float32)}
    with unsharded_variables():
        wanted = nnx.to_pure_dict(nnx.state(Random(nnx.Rngs(9)), nnx.Param))
    for mesh in ({}, {"fsdp": 4, "tensor": 2}):
        program = build_program(
            hand_plan(model, batch, mesh, zero=3),
            model,
            model.bind(lambda m, b: m(b["x"]).mean()),
            optax.sgd(0.1),
            batch,
        )
        found = program.init(9).params
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, wanted
        )


def test_a_plan_for_another_model_is_an_error():
    model = read(models.Mlp)
    plan = hand_plan(model, models.mlp_batch(), {"data": 2})
    other = read(Random)
    with pytest.raises(
        LayoutError,
        match=(
            r"the plan is for a different model from 'Random':\n  - down is in the plan, not in the"
            r" model"
        ),
    ):
        build_program(
            plan,
            other,
            other.bind(lambda m, b: m(b["x"]).mean()),
            optax.sgd(0.1),
            models.mlp_batch(),
        )


ARRAY = np.zeros((16, 16), np.float32)


@pytest.fixture(scope="module")
def mlp():
    return mlp_program({"data": 2})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"x": ARRAY[:8], "y": ARRAY.astype(np.int32)},
            "  - batch.x: found float32[8, 16], compiled for float32[16, 16]\n"
            "  - batch.y: found int32[16, 16], compiled for float32[16, 16]\n"
            "Try: compile again for these shapes, or pad the batch",
        ),
        (
            {"x": ARRAY, "labels": ARRAY, "more": [ARRAY]},
            "  - batch.y is missing, float32[16, 16]\n"
            "  - batch.labels is unexpected\n"
            "  - batch.more.0 is unexpected\n"
            "Try: give the step the arrays that the program was compiled for, or compile again for"
            " these",
        ),
        ({"x": None}, "  - batch.x is missing, float32[16, 16]\n  - batch.y is missing"),
        (ARRAY, "batch is unexpected"),
        (collections.OrderedDict(x=ARRAY, y=ARRAY), "compiled for {'x': *, 'y': *}"),
        ({"more": [ARRAY] * 1000}, "  - 982 more"),
    ],
)
def test_a_batch_unlike_the_compiled_one_is_an_error_that_lists_every_array(mlp, given, said):
    with pytest.raises(BatchError) as caught:
        mlp.put(given)
    assert said in str(caught.value)


def test_a_batch_is_placed_once_and_cast(mlp):
    placed = mlp.put(models.mlp_batch())
    assert mlp.put(placed)["x"] is placed["x"]
    assert spec(placed["x"]) in (("data",), (("data",),))
    assert mlp.put({"x": np.zeros((16, 16)), "y": np.zeros((16, 16))})["x"].dtype == jnp.float32


def test_a_decision_that_cannot_be_lowered_is_an_error():
    with pytest.raises(PinError) as caught:
        mlp_program({"stage": 2, "context": 2}, schedule="1f1b", context="ring")
    assert (
        str(caught.value)
        == "context='ring' needs attention that is called as a function, and the loss of Mlp has"
        " none\nTry: shardlib.attention(query, key, value) in the model, or context='all-gather'"
    )


def test_updated_stacks_on_cpu_devices_are_gathered_in_no_loop():
    """Loops with collectives of one group that do not depend on each other are run side by side by
    XLA for CPUs, and devices that come to them in another order wait for good.
    """
    program = step_program({"fsdp": 2, "tensor": 2}, optax.adam(0.1), zero=1)
    gathers = [line for line in program.compiled().as_text().splitlines() if " all-gather(" in line]
    updated = [line for line in gathers if "jvp" not in line]
    assert updated
    assert not [line for line in updated if "/while/body/" in line]


class Tempered(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)
        self.temperature = nnx.Param(jnp.asarray(2.0))


def test_an_optimizer_may_ask_a_scalar_parameter_for_its_shape():
    def loss(model, batch):
        return jnp.mean((model.layer(batch["x"]) * model.temperature[...]) ** 2)

    batch, optimizer = {"x": np.ones((8, 16), np.float32)}, optax.adafactor(1e-2)
    program = shardlib.compile(Tempered, loss, optimizer, batch, topology="cpu:2")
    after, _ = program.step(program.init(0), batch)
    params = jax.tree.map(np.asarray, program.init(0).params)
    graph, _ = nnx.split(Tempered(nnx.Rngs(0)))
    gradients = jax.grad(lambda p: loss(nnx.merge(graph, nnx.State(p)), batch))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    wanted = float(params["temperature"] + updates["temperature"])
    assert float(after.params["temperature"]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("topology", "platform", "told"),
    [
        ("h100:8", "cpu", True),
        ("v5e:2x4", "gpu", True),
        ("cpu:8", "cpu", False),
        ("h100:8", "gpu", False),
        ("v5e:2x4", "tpu", False),
        ("a machine of the user's", "cpu", False),
        (None, "cpu", False),
    ],
)
def test_a_program_on_other_devices_than_planned_says_so(topology, platform, told):
    assert bool(other_machine(topology, platform)) == told


def test_a_rehearsal_of_gpus_on_cpu_devices_says_so():
    _, findings = device_mesh(MeshShape(data=8), topology="h100:8")
    assert [one.code for one in findings] == ["other-machine"]
