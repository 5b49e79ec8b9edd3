"""How gradients are reduced is one value, made once; another way of exchanging them is one class,
which all drivers of a step carry out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import PlanError
from shardlib.lowering.collectives import InDtype
from shardlib.lowering.program import BuildOptions, PlannedLoss, build_program
from shardlib.lowering.uses import LossReading
from shardlib.lowering.weights import DEFERRED, EACH, IN_LAST, moment
from shardlib.tracing.program import flatten
from tests.lowering import small
from tests.zoo.parity import capture


@dataclasses.dataclass(frozen=True)
class Halved:
    """Sends half of what there is: whatever a driver does with it, it is seen in the gradients."""

    dtype = None
    keeps = False

    def __call__(self, partial, collectives):
        return collectives(partial / 2), None


@dataclasses.dataclass(frozen=True)
class WithErrorFeedback:
    """Sends what bfloat16 can hold, and keeps the rest for the next step."""

    dtype = jnp.bfloat16
    keeps: bool = True

    def __call__(self, partial, collectives):
        sent = partial.astype(self.dtype).astype(partial.dtype)
        return collectives(sent), partial - sent if self.keeps else None


def built(pin, exchange=None, optimizer=None, guards=None):
    """The small model under a plan and an exchange."""
    planned = small.program(optimizer or capture(), pin, dtype=jnp.float32)
    known = planned.evaluated
    return build_program(
        planned.plan,
        planned.model,
        planned.model.bind(small.loss),
        optimizer or capture(),
        small.batch(),
        batch_axes=known.axes,
        planned=PlannedLoss(traced=planned.source, placements=placements_of(planned)),
        options=BuildOptions(exchange=exchange, guards=guards),
    )


def placements_of(program):
    """Batch over all axes but tensor, and nothing else: all that gradients need."""
    loss = LossReading(program=flatten(program.source.closed_jaxpr), parameters=5)
    rows = next(iter(dict(program.plan.batch_layouts).values()))[0]
    found = {}
    for path, use in loss.uses.items():
        rank = use.equation.eqn.outvars[0].aval.ndim
        found[path, 0] = shardlib.Layout(rows, *[()] * (rank - 1))
    return found


DRIVERS = {
    "each microbatch": {"mesh": {"data": 2, "fsdp": 4}, "zero": 2, "microbatches": 2},
    "one batch": {"mesh": {"data": 8}, "zero": 0},
    "in the last": {"mesh": {"data": 8}, "zero": 0, "microbatches": 2},
    "in lockstep": {"mesh": {"data": 4, "stage": 2}, "zero": 0, "microbatches": 4},
    "per stage": {
        "mesh": {"data": 4, "stage": 2},
        "zero": 0,
        "microbatches": 4,
        "pipeline": "programs",
    },
    "on disk": {"mesh": {"data": 8}, "zero": 0, "offload": ["disk"]},
}


@pytest.mark.long
@pytest.mark.parametrize("driver", DRIVERS)
def test_an_exchange_is_carried_out_by_every_driver(driver, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_DISK_DIR", str(tmp_path))
    found = []
    for exchange in (InDtype(jnp.float32), Halved()):
        program = built(DRIVERS[driver], exchange, optax.sgd(1.0, momentum=0.0))
        before = program.init(0)
        start = jax.tree.map(np.asarray, before.params)
        after, _ = program.step(before, small.batch())
        found.append(jax.tree.map(lambda a, b: a - np.asarray(b), start, after.params))
    whole, half = found
    for name in ("up", "down"):
        np.testing.assert_allclose(half[name], whole[name] / 2, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(half["scale"], whole["scale"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("microbatches", (1, 2))
def test_error_feedback_is_carried_from_step_to_step(microbatches):
    pin = {"mesh": {"data": 8}, "zero": 0, "microbatches": microbatches}
    program = built(pin, WithErrorFeedback(), optax.sgd(0.0))
    state = program.init(0)
    assert state.exchange is not None and not any(
        np.asarray(leaf).any() for leaf in state.exchange.values()
    )
    assert all(leaf.sharding.spec for leaf in program.state.exchange.values())
    kept = []
    for _ in range(2):
        state, _ = program.step(state, small.batch())
        kept.append({path: np.asarray(leaf) for path, leaf in state.exchange.items()})
    assert all(leaf.any() for leaf in kept[0].values())
    # The same gradients again: what was kept is added to them before they are rounded again.
    assert any(not np.array_equal(kept[0][path], kept[1][path]) for path in kept[0])
    anew = program.anew(state)
    assert not any(np.asarray(leaf).any() for leaf in anew.exchange.values())


@pytest.mark.long
def test_rounding_errors_do_not_add_up_with_error_feedback():
    """The sum of the gradients of many steps is that of exact ones, but for what is kept."""
    totals = {}
    for name, exchange in {
        "exact": InDtype(jnp.float32),
        "rounded": WithErrorFeedback(keeps=False),
        "fed back": WithErrorFeedback(),
    }.items():
        program = built({"mesh": {"data": 8}, "zero": 0}, exchange, capture())
        state, total = program.init(0), 0.0
        for _ in range(16):
            state = dataclasses.replace(program.init(0), exchange=state.exchange)
            state, _ = program.step(state, small.batch())
            total = total + np.asarray(state.opt_state["up"], np.float64)
        totals[name] = total
    errors = {
        name: np.abs(totals[name] - totals["exact"]).max() for name in ("rounded", "fed back")
    }
    assert errors["fed back"] < errors["rounded"] / 4, errors


def test_states_without_an_exchange_that_keeps_something_are_what_they_were():
    program = built({"mesh": {"data": 8}, "zero": 0})
    assert program.state.exchange is None
    assert program.init(0).exchange is None


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
        "down": IN_LAST,
        "parts": EACH,
        "scale": EACH,
        "table": IN_LAST,
        "up": IN_LAST,
    }
    assert {one.axes for one in once.values()} == {("data",)}
    scattered = {one.path: one for one in reductions["scattered"].parameters}
    assert {one.when for one in scattered.values()} == {EACH}
    assert scattered["up"].axes == ("data", "fsdp")
    assert "fsdp" in scattered["up"].to.axes and scattered["up"].dtype is None


def built_placing(pin):
    from shardlib.lowering.mesh import parameter_shardings
    from shardlib.lowering.placing import Placing

    program = small.program(capture(), pin)
    params = parameter_shardings(program.plan, program.model, program.mesh)
    return Placing.of(
        program.source, program.plan, program.mesh, params, placements_of(program)
    ).reductions


def test_plans_reduce_at_one_moment_each():
    def plan(**pin):
        return small.program(capture(), pin).plan

    exact = InDtype()
    assert moment(plan(**DRIVERS["one batch"]), exact) == EACH
    assert moment(plan(**DRIVERS["in the last"]), exact) == IN_LAST
    assert moment(plan(**DRIVERS["each microbatch"]), exact) == EACH
    assert moment(plan(**DRIVERS["in lockstep"]), exact) == DEFERRED


@pytest.mark.parametrize("driver", ("in lockstep", "each microbatch"))
def test_what_is_kept_needs_gradients_that_are_reduced_once(driver):
    with pytest.raises(PlanError) as caught:
        built(DRIVERS[driver], WithErrorFeedback())
    assert str(caught.value) == (
        "a gradient exchange that keeps what it does not send needs gradients that are reduced once"
        " per step and are not sharded between microbatches\nTry: a mesh without stages, and zero"
        " below 2"
    )


def test_what_is_kept_has_no_scale():
    with pytest.raises(PlanError, match="guards without a scale"):
        built(
            {"mesh": {"data": 8}, "zero": 0},
            WithErrorFeedback(),
            guards=shardlib.Guards(scale=8.0),
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
