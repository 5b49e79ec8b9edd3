"""When, over which axes and to which layout gradients are reduced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import shardlib
from shardlib.lowering.uses import LossFacts
from shardlib.lowering.weights import (
    AFTER_PIPELINE,
    EVERY_MICROBATCH,
    LAST_MICROBATCH,
    reduction_time,
    with_reduced_gradient,
)
from shardlib.tracing.program import flatten
from tests.lowering import small
from tests.zoo.parity import capture


def placements_of(program):
    """Batch over all axes but tensor, and nothing else: all that gradients need."""
    loss = LossFacts(program=flatten(program.source.closed_jaxpr), num_parameters=5)
    rows = next(iter(dict(program.plan.batch_layouts).values()))[0]
    found = {}
    for path, use in loss.uses.items():
        rank = use.equation.eqn.outvars[0].aval.ndim
        found[path, 0] = shardlib.Layout(rows, *[()] * (rank - 1))
    return found


def test_every_parameter_says_how_its_gradient_is_reduced():
    reductions = {
        name: built_placing({"mesh": mesh, "zero": zero, "microbatches": 2})
        for name, mesh, zero in (
            ("once", {"data": 4, "tensor": 2}, 0),
            ("scattered", {"data": 2, "fsdp": 4}, 2),
        )
    }
    once = {one.path: one for one in reductions["once"].parameters}
    assert {path: one.when for path, one in once.items()} == {
        "down": LAST_MICROBATCH,
        "parts": EVERY_MICROBATCH,
        "scale": EVERY_MICROBATCH,
        "table": LAST_MICROBATCH,
        "up": LAST_MICROBATCH,
    }
    assert {one.axes for one in once.values()} == {("data",)}
    scattered = {one.path: one for one in reductions["scattered"].parameters}
    assert {one.when for one in scattered.values()} == {EVERY_MICROBATCH}
    assert scattered["up"].axes == ("data", "fsdp")
    assert "fsdp" in scattered["up"].layout.axes and scattered["up"].dtype is None


def layouts_placing(pin):
    from shardlib.lowering.loss_layouts import LossLayouts
    from shardlib.lowering.mesh import parameter_shardings

    program = small.program(capture(), pin)
    params = parameter_shardings(program.plan, program.model, program.mesh)
    return LossLayouts.of(
        program.source, program.plan, program.mesh, params, placements_of(program)
    )


def built_placing(pin):
    return layouts_placing(pin).reductions


def test_lookups_do_not_save_their_table_for_the_backward_pass():
    layouts = layouts_placing({"mesh": {"data": 2, "fsdp": 4}, "zero": 3})
    ((path, use),) = ((p, u) for p, u in layouts.uses.items() if u.equation.name == "gather")
    parameter = layouts.plan.parameters[layouts.plan_indices[use.view.parameter]]
    lookup = with_reduced_gradient(
        use, layouts.values[path, 0], parameter, layouts.regions(layouts.mesh)
    )
    assert lookup is not None
    table, indices = (
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in use.equation.eqn.invars
    )
    saved = jax.eval_shape(lambda *operands: jax.vjp(lookup, *operands)[1], table, indices)
    assert [leaf.shape for leaf in jax.tree.leaves(saved)] == [indices.shape]


def test_plans_reduce_at_one_moment_each():
    def plan(**pin):
        return small.program(capture(), pin).plan

    data = {"mesh": {"data": 8}, "zero": 0}
    assert reduction_time(plan(**data)) == EVERY_MICROBATCH
    assert reduction_time(plan(**data, microbatches=2)) == LAST_MICROBATCH
    assert (
        reduction_time(plan(mesh={"data": 2, "fsdp": 4}, zero=2, microbatches=2))
        == EVERY_MICROBATCH
    )
    assert (
        reduction_time(plan(mesh={"data": 4, "stage": 2}, zero=0, microbatches=4)) == AFTER_PIPELINE
    )


def test_a_weight_that_layers_hand_on_as_it_is_has_another_reader():
    """What becomes of it after the loop adds to the gradients of all microbatches, not to those of
    the last one alone.
    """

    def loss(params, batch):
        x = params["table"][batch["tokens"]]

        def layer(x, p):
            return x + jnp.tanh(x @ p["up"]) @ p["down"], (p["up"].T, p["down"])

        x, (up, down) = jax.lax.scan(layer, x, {name: params[name] for name in ("up", "down")})
        rest = (params["scale"] ** 2).mean() + (params["parts"] ** 2).mean()
        kept = (x.sum((1, 2)) * batch["weight"]).mean() * ((up**2).mean() + (down**2).mean())
        return kept + (x**2).mean() + rest

    found = []
    for microbatches in (1, 2):
        program = small.program(
            capture(),
            {"mesh": {"data": 8}, "zero": 0, "microbatches": microbatches},
            loss=loss,
            rows="mean",
        )
        state, _ = program.step(program.init(0), small.batch())
        found.append(state.opt_state)
    for name in ("up", "down"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4, atol=1e-6)
