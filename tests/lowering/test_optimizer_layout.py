"""Optimizers that multiply matrices update whole ones, and compute what optax computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import shardlib
from shardlib.errors import TracingError
from shardlib.findings import Finding
from shardlib.lowering.optimizer import with_layout
from shardlib.verification.traffic import read_traffic
from tests.lowering import small

STEPS = 3
DIMS = {
    "table": optax.contrib.MuonDimensionNumbers(0, 1),
    "up": optax.contrib.MuonDimensionNumbers(1, 2),
    "down": optax.contrib.MuonDimensionNumbers(1, 2),
    "scale": None,
    "parts": None,
}


def muon() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(0.02, weight_decay=0.1, muon_weight_dimension_numbers=DIMS),
    )


def shampoo() -> optax.GradientTransformation:
    """Rows are preconditioned by the inverse fourth root of a sum of squares, which is state."""

    def init(params):
        return {
            name: 1e-3
            * jnp.broadcast_to(jnp.eye(leaf.shape[-2]), (*leaf.shape[:-1], leaf.shape[-2]))
            if name in ("up", "down")
            else ()
            for name, leaf in params.items()
        }

    def update(updates, state, params=None):
        def conditioned(name, gradient, squares):
            if name not in ("up", "down"):
                return gradient, squares
            squares = squares + gradient @ jnp.swapaxes(gradient, -1, -2)
            values, vectors = jnp.linalg.eigh(squares)
            root = (vectors * values[..., None, :] ** -0.25) @ jnp.swapaxes(vectors, -1, -2)
            return root @ gradient, squares

        both = {name: conditioned(name, leaf, state[name]) for name, leaf in updates.items()}
        return tuple({name: pair[i] for name, pair in both.items()} for i in (0, 1))

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-0.02))


def clipped_spectrum() -> optax.GradientTransformation:
    """Singular values of at most 0.1."""

    def clipped(gradient):
        if gradient.shape[-1] != small.MLP:
            return gradient
        left, values, right = jnp.linalg.svd(gradient, full_matrices=False)
        return (left * jnp.minimum(values, 0.1)[..., None, :]) @ right

    return optax.chain(
        optax.stateless(lambda updates, params: jax.tree.map(clipped, updates)),
        optax.sgd(0.05, momentum=0.9),
    )


def expected(optimizer):
    """Parameters after some steps of optax on one device."""
    params, batch = small.values(), small.batch()
    state = optimizer.init(params)
    for _ in range(STEPS):
        updates, state = optimizer.update(jax.grad(small.loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def trained(program):
    state = program.init(0)
    for _ in range(STEPS):
        state, _ = program.step(state, small.batch())
    return state.params


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "pin"),
    [
        (muon, {"mesh": {"data": 8}, "zero": 0}),
        (muon, {"mesh": {"data": 2, "fsdp": 4}, "zero": 1}),
        (muon, {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 2}),
        (muon, {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "microbatches": 2}),
        (muon, {"mesh": {"stage": 2, "fsdp": 4}, "zero": 3, "microbatches": 2}),
        (muon, {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "optimizer_layout": "gathered"}),
        (muon, {"mesh": {"fsdp": 8}, "zero": 3, "optimizer_layout": "sharded"}),
        (shampoo, {"mesh": {"data": 2, "fsdp": 4}, "zero": 3}),
        (shampoo, {"mesh": {"stage": 2, "tensor": 4}, "zero": 0, "microbatches": 2}),
        (shampoo, {"mesh": {"data": 8}, "zero": 0, "optimizer_layout": "gathered"}),
        (clipped_spectrum, {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_steps_are_those_of_optax(optimizer, pin) -> None:
    program = small.program(optimizer(), pin)
    assert small.farthest(trained(program), expected(optimizer())) < 1e-5


@pytest.mark.parametrize("optimizer", [muon, shampoo])
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}])
def test_devices_with_several_matrices_and_one_more(monkeypatch, optimizer, mesh) -> None:
    monkeypatch.setattr(small, "LAYERS", 11)
    program = small.program(optimizer(), {"mesh": mesh, "zero": 3})
    assert small.farthest(trained(program), expected(optimizer())) < 1e-5


@pytest.mark.parametrize("layers", [4, 11])
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ({"fsdp": 8}, ("fsdp",)),
        ({"data": 2, "fsdp": 4}, ("fsdp",)),
        ({"fsdp": 4, "tensor": 2}, ("fsdp", "tensor")),
    ],
)
def test_all_to_alls_move_the_bytes_that_are_planned(monkeypatch, layers, mesh, axes) -> None:
    monkeypatch.setattr(small, "LAYERS", layers)
    program = small.program(muon(), {"mesh": mesh, "zero": 3})
    planned = [c for c in program.plan.estimate.collectives if "optimizer" in c.cause]
    compiled = read_traffic(program.compiled().as_text(), program.plan.mesh).found
    measured, predicted = (
        sum(c.bytes * c.count for c in listed if (c.kind, c.axes) == ("all-to-all", axes))
        for listed in (compiled, planned)
    )
    assert measured == predicted > 0


@pytest.mark.parametrize(("topology", "layout"), [("v5e:2x4", "owned"), ("8*v5e:1x1", "gathered")])
def test_the_cheaper_layout_is_planned(topology, layout) -> None:
    """Between hosts a message takes longer than the products of small matrices."""

    def plan(**pin):
        return shardlib.plan(
            small.model(),
            small.loss,
            muon(),
            small.batch(),
            topology=topology,
            pin={"mesh": {"data": 8}, "zero": 0, **pin},
            batch_axes=small.BATCH_AXES,
        )

    assert plan().optimizer_layout == layout
    (other,) = {"owned", "gathered"} - {layout}
    pinned = plan(optimizer_layout=other).estimate
    assert plan().estimate.step_seconds < pinned.step_seconds


def test_products_left_to_the_partitioner_are_told() -> None:
    pin = {"mesh": {"fsdp": 8}, "zero": 3, "optimizer_layout": "sharded"}
    (finding,) = [
        f for f in small.program(muon(), pin).plan.findings if f.code == "optimizer-products"
    ]
    assert "3 parameters" in finding.message
    assert "owned" in finding.hint


def test_an_update_that_cannot_be_traced_is_refused_unless_the_plan_says_so() -> None:
    def by_number(updates, state, params=None):
        return (updates, state) if jnp.sum(updates["up"]) > 0 else (params, state)

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), by_number)
    plan = small.program(muon(), {"mesh": {"fsdp": 8}, "zero": 3}).plan
    with pytest.raises(TracingError, match="TracerBoolConversionError") as caught:
        with_layout(optimizer, plan, small.values(), {})
    assert "optimizer_layout='sharded'" in str(caught.value)
    finding = Finding(code="optimizer-untraced", severity="warning", message="")
    assert with_layout(optimizer, plan.with_findings(finding), small.values(), {}) is optimizer
