"""Questions to plans of islands: other numbers of devices, and what moves to another machine."""

from __future__ import annotations

import jax
import numpy as np
import optax

import shardlib
from tests.islands.test_diloco import AXES, loss, rows, weights

MODEL = shardlib.tree(weights, AXES)


def test_a_curve_says_where_islands_are_no_parts_of_a_machine() -> None:
    curve = shardlib.scale(
        MODEL,
        loss,
        optax.sgd(0.1),
        rows(0),
        topology="cpu:4",
        devices=[1, 2, 4],
        pin={"exchange": "diloco:2:10"},
    )
    one, *others = curve.points
    assert one.plan is None and one.message.startswith("2 islands do not divide the 1 devices")
    assert [point.plan.mesh["island"] for point in others if point.plan is not None] == [2, 2]


def test_what_moves_of_islands_is_what_is_outer_as_well() -> None:
    pin = {"exchange": "diloco:2:10", "zero": 3, "mesh.fsdp": 4}
    plan = shardlib.plan(MODEL, loss, optax.adam(0.1), rows(0), topology="cpu:8", pin=pin)
    change = plan.replan("cpu:8")
    elements = sum(
        leaf.size for leaf in jax.tree.leaves(jax.eval_shape(weights, jax.random.key(0)))
    )
    by_kind = {
        what: sum(part.bytes for part in change.parts if part.what == what)
        for what in ("parameter", "optimizer state", "outer state")
    }
    assert by_kind["parameter"] == 4 * elements and by_kind["outer state"] == 8 * elements
    assert "what a lost island has learned since is lost" in " ".join(str(change).split())
    assert np.all(np.asarray(change.moved_bytes_per_device) >= 0)
