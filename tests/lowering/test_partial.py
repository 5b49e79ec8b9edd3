"""A part of a model is trained: the numbers are those of Flax and optax alone, and what is frozen
stays as it is.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib._jax_compat import unsharded_variables
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import AnnotationError, LayoutError
from tests.lowering import partial
from tests.zoo.case import leaves_by_path

LORA = [
    {
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "zero": 3,
        "rules": [["batch", ["data", "fsdp"]], ["mlp", "tensor"]],
    },
    {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 2, "microbatches": 2},
    {"mesh": {"data": 8}, "zero": 0, "microbatches": 2, "dtypes": {"reduction_dtype": "float32"}},
    {"mesh": {"fsdp": 8}, "zero": 3, "dtypes": {"reduction_dtype": "float32"}},
    {"mesh": {"data": 2, "fsdp": 4}, "zero": 1, "remat": "none"},
]


def compiled(init, loss, pin, **given):
    return shardlib.compile(
        init,
        loss,
        given.pop("optimizer", partial.OPTIMIZER),
        partial.batch(),
        topology="cpu:8",
        pin=pin,
        **given,
    )


def argument_bytes(program):
    """Bytes of a step's arguments by the plan, with the counters of step and optimizer, which no
    plan counts.
    """
    parts = program.plan.estimate.device_bytes
    counters = sum(
        leaf.dtype.itemsize
        for leaf in jax.tree.leaves((program.state.step, program.state.opt_state))
        if not leaf.shape
    )
    return parts.parameters + parts.frozen + parts.optimizer + parts.batch + counters


@pytest.mark.parametrize("pin", LORA, ids=str)
def test_adapters_are_trained_as_flax_trains_them(pin):
    reference = partial.by_flax(partial.Lora, partial.loss, nnx.LoRAParam)
    program = compiled(partial.Lora, partial.loss, pin, wrt=nnx.LoRAParam)
    before = leaves_by_path(program.init(0).params)
    state = partial.trains_like(program, reference)
    after = leaves_by_path(state.params)
    for path, array in before.items():
        assert (array.tobytes() == after[path].tobytes()) == ("lora" not in path), path
    assert all(
        "lora" in path for path in leaves_by_path(state.opt_state) if not path.endswith("count")
    )
    assert program.memory()["arguments"] == argument_bytes(program)


def test_frozen_parameters_are_sharded_as_parameters_are():
    program = compiled(partial.Lora, partial.loss, LORA[0], wrt=nnx.LoRAParam)
    layouts = {parameter.path: parameter for parameter in program.plan.parameters}
    kernel = layouts["up.kernel"]
    assert (
        kernel.role == "frozen"
        and kernel.rest.axes == {"fsdp", "tensor"}
        and kernel.compute.axes == {"tensor"}
    )
    assert program.state.params["up"]["kernel"].sharding.shard_shape((16, 32)) == (8, 16)
    again = shardlib.Plan.from_json(program.plan.to_json())
    assert (
        again.parameters == program.plan.parameters
        and again.digest == program.plan.digest
        and again.estimate == program.plan.estimate
    )
    assert "frozen" in program.plan.explain()


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3},
        {
            "mesh": {"fsdp": 4},
            "zero": 3,
            "microbatches": 4,
            "dtypes": {"reduction_dtype": "float32"},
        },
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "microbatches": 4, "schedule": "1f1b"},
        {
            "mesh": {"stage": 2, "fsdp": 2},
            "zero": 1,
            "microbatches": 4,
            "schedule": "1f1b",
            "pipeline": "programs",
        },
    ],
    ids=str,
)
def test_a_head_is_trained_on_a_frozen_backbone(pin):
    def wrt(path, variable):
        return path[0] == "head"

    reference = partial.by_flax(partial.Backbone, partial.loss, wrt)
    state = partial.trains_like(compiled(partial.Backbone, partial.loss, pin, wrt=wrt), reference)
    assert set(state.opt_state[0].mu) == {"head"}


@pytest.mark.long
@pytest.mark.parametrize(
    "pin",
    [
        {
            "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
            "zero": 3,
            "microbatches": 4,
            "schedule": "gpipe",
        },
        {
            "mesh": {"stage": 4, "fsdp": 2},
            "zero": 3,
            "microbatches": 4,
            "schedule": "zero-bubble",
            "pipeline": "programs",
        },
        {
            "mesh": {"stage": 2, "fsdp": 4},
            "zero": 3,
            "microbatches": 4,
            "schedule": "1f1b",
            "gather": "once",
            "dtypes": {"reduction_dtype": "float32"},
        },
    ],
    ids=str,
)
def test_stages_hold_layers_with_frozen_and_trained_weights(pin):
    """A tree, by a predicate over paths; with integers among its arrays."""
    reference = partial.by_optax(
        partial.tree_init(jax.random.key(0)), partial.tree_loss, {"a", "b"}
    )
    program = compiled(
        shardlib.tree(partial.tree_init),
        partial.tree_loss,
        pin,
        wrt=lambda path, leaf: path[-1] in ("a", "b"),
    )
    assert ("frozen-gathered-at-use" in {finding.code for finding in program.findings}) == (
        program.plan.gather == "once"
    )
    partial.trains_like(program, reference, lambda state: leaves_by_path(state.params))


def test_a_linen_model_takes_a_predicate_over_paths():
    model = shardlib.linen(partial.LinenModel(), jnp.zeros((2, partial.EMBED)))
    program = compiled(
        model,
        partial.linen_loss,
        {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
        wrt=lambda path, leaf: path[0] == "head" and leaf.ndim == 2,
    )
    first = jax.device_get(program.init(0).params)
    kernel, state = first["head"]["kernel"], partial.OPTIMIZER.init(first["head"]["kernel"])
    step = jax.jit(
        jax.value_and_grad(
            lambda kernel: partial.linen_loss(
                {**first, "head": {**first["head"], "kernel": kernel}}, partial.batch()
            )
        )
    )
    losses = []
    for _ in range(partial.STEPS):
        value, gradient = step(kernel)
        updates, state = partial.OPTIMIZER.update(gradient, state, kernel)
        kernel = optax.apply_updates(kernel, updates)
        losses.append(float(value))
    wanted = leaves_by_path({**first, "head": {**first["head"], "kernel": kernel}})
    partial.trains_like(program, (losses, wanted), lambda state: leaves_by_path(state.params))


@pytest.mark.parametrize(
    "pin",
    [{"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3}, {"mesh": {"fsdp": 8}, "zero": 1}],
    ids=str,
)
def test_state_that_the_loss_updates_stays_sharded(pin):
    """A moving average in the loss, statistics, a counter, and a buffer that nobody changes."""
    reference = partial.by_flax(partial.Student, partial.distilled, nnx.Param)
    program = compiled(partial.Student, partial.distilled, pin)
    state = partial.trains_like(program, reference)
    roles = {parameter.path: parameter.role for parameter in program.plan.parameters}
    assert roles == {
        "layer.kernel": "trained",
        "fixed": "frozen",
        "state.teacher": "updated",
        "state.seen": "updated",
    }
    whole, parts = (16, 16), 8 if pin["zero"] == 3 and "tensor" in pin["mesh"] else 1
    if parts > 1:
        assert (
            np.prod(state.model_state["teacher"].sharding.shard_shape(whole)) < np.prod(whole)
            and state.model_state["teacher"].sharding
            == program.state.model_state["teacher"].sharding
        )
    assert program.memory()["arguments"] == argument_bytes(program)


def test_other_kinds_of_variables_can_be_trained():
    def loss(model, batch):
        return jnp.mean(
            (model.layer(batch["x"]) + batch["x"] @ model.teacher[...] - batch["y"]) ** 2
        )

    wrt = nnx.Any(partial.Teacher, nnx.All(nnx.Param, nnx.Not(nnx.Param)))
    reference = partial.by_flax(partial.Student, loss, wrt)
    program = compiled(partial.Student, loss, {"mesh": {"fsdp": 4}, "zero": 3}, wrt=wrt)
    state = partial.trains_like(program, reference)
    assert list(state.opt_state[0].mu) == ["teacher"]


def test_guards_and_clipping_see_the_trained_gradients_alone():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), partial.OPTIMIZER)
    reference = partial.by_flax(partial.Lora, partial.loss, nnx.LoRAParam, optimizer)
    program = compiled(
        partial.Lora,
        partial.loss,
        {"mesh": {"fsdp": 4}, "zero": 2},
        wrt=nnx.LoRAParam,
        guards=shardlib.Guards(clip=0.1, scale=1024.0),
    )
    partial.trains_like(program, reference)


@pytest.mark.long
def test_optimizer_state_on_disk_is_that_of_adapters(tmp_path):
    reference = partial.by_flax(partial.Lora, partial.loss, nnx.LoRAParam)
    program = compiled(
        partial.Lora,
        partial.loss,
        {"mesh": {"fsdp": 2}, "zero": 3, "offload": ["disk"]},
        wrt=nnx.LoRAParam,
        disk=tmp_path,
    )
    partial.trains_like(program, reference)
    assert len(program.disk_paths) == 8


def test_checkpoints_hold_what_is_frozen_and_are_restored_onto_another_mesh(tmp_path):
    """Also a moving average that the loss updates."""
    first, second = (
        compiled(partial.Student, partial.distilled, pin)
        for pin in ({"mesh": {"fsdp": 8}, "zero": 3}, {"mesh": {"data": 2, "tensor": 4}, "zero": 0})
    )
    state, _ = first.step(first.init(0), partial.batch())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan=first.plan, wait=True)
    wanted = partial.variables(first.module(state))
    restored = Checkpoints(tmp_path, read_only=True).restore(second).state
    partial.close(partial.variables(second.module(restored)), wanted, limit=0)
    assert restored.params["fixed"].sharding == second.state.params["fixed"].sharding
    after = [
        float(program.step(some, partial.batch())[1]["loss"])
        for program, some in ((first, state), (second, restored))
    ]
    np.testing.assert_allclose(after[0], after[1], rtol=1e-5)


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"fsdp": 8}, "zero": 3, "remat": "none", "dtypes": {"reduction_dtype": "float32"}},
        {"mesh": {"data": 8}, "zero": 0, "remat": "none"},
    ],
    ids=str,
)
def test_the_program_makes_and_reduces_no_gradients_of_the_base(pin):
    """As many products as plain JAX makes for the adapters, and the reductions of the plan."""
    program = compiled(partial.Lora, partial.loss, pin, wrt=nnx.LoRAParam)
    with unsharded_variables():
        graph, trained, rest = nnx.split(partial.Lora(nnx.Rngs(0)), nnx.LoRAParam, ...)
        plain = (
            jax.jit(
                jax.value_and_grad(
                    lambda trained, rest: partial.loss(
                        nnx.merge(graph, trained, rest), partial.batch()
                    )
                )
            )
            .lower(trained, rest)
            .compile()
        )
    text = program.compiled().as_text()
    assert text.count(" dot(") == plain.as_text().count(" dot(") == 14
    planned = {
        kind: sum(one.count for one in program.plan.estimate.collectives if one.kind == kind)
        for kind in ("reduce-scatter", "all-gather")
    }
    assert text.count(" reduce-scatter(") == planned["reduce-scatter"] == (4 if pin["zero"] else 0)
    assert text.count(" all-gather(") == planned["all-gather"] == (6 if pin["zero"] else 0)


def test_a_plan_for_other_trained_parameters_is_refused():
    plan = shardlib.plan(
        partial.Lora,
        partial.loss,
        partial.OPTIMIZER,
        partial.batch(),
        topology="cpu:8",
        wrt=nnx.LoRAParam,
    )
    with pytest.raises(
        LayoutError, match=re.escape("up.kernel is trained in the model, not in the plan")
    ):
        compiled(partial.Lora, partial.loss, None, plan=plan)


def refused(init, loss, wrt):
    with pytest.raises(AnnotationError) as caught:
        shardlib.plan(init, loss, partial.OPTIMIZER, partial.batch(), topology="cpu:8", wrt=wrt)
    return str(caught.value)


def test_a_filter_that_chooses_nothing_says_what_there_is():
    assert refused(partial.Student, partial.distilled, nnx.LoRAParam).startswith(
        "wrt chooses nothing: every array would be frozen, and nothing would be trained\nthe model"
        " has:\n  Variable: calls, fixed\n  Param: layer.kernel\n  BatchStat: seen\n  Teacher:"
        " teacher\n"
    )
    assert "head.kernel" in refused(
        shardlib.linen(partial.LinenModel(), jnp.zeros((2, partial.EMBED))),
        partial.linen_loss,
        lambda path, leaf: False,
    )


def test_a_filter_of_another_kind_is_refused():
    assert "not a filter of Flax" in refused(partial.Lora, partial.loss, 3)
    assert "no types" in refused(shardlib.tree(partial.tree_init), partial.tree_loss, nnx.LoRAParam)
    assert "no types" in refused(
        shardlib.tree(partial.tree_init), partial.tree_loss, nnx.Not(nnx.Param)
    )
    assert "wrt failed when called with the path" in refused(
        shardlib.tree(partial.tree_init), partial.tree_loss, lambda path: True
    )


def test_integers_cannot_be_trained():
    assert (
        refused(partial.Student, partial.distilled, nnx.Variable)
        == "wrt chooses arrays that have no gradient: calls has dtype int32\nTry: a filter that"
        " leaves out what is not floating-point"
    )
    assert "order has dtype int32" in refused(
        shardlib.tree(partial.tree_init), partial.tree_loss, lambda path, leaf: True
    )


def test_adapters_beside_a_trained_base_are_a_finding():
    def codes(**given):
        plan = shardlib.plan(
            partial.Lora,
            partial.loss,
            partial.OPTIMIZER,
            partial.batch(),
            topology="cpu:1",
            **given,
        )
        return {finding.code for finding in plan.findings}

    assert "base-trained" in codes()
    assert "base-trained" not in codes(wrt=nnx.LoRAParam) and "base-trained" not in codes(
        wrt=nnx.Param
    )
