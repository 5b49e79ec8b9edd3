"""Questions to plans of islands: other numbers of devices, and what moves to another machine."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.models.config import TransformerConfig
from shardlib.report.elements import bytes_text, seconds_text
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
    assert "progress of a lost island since the last one is lost" in " ".join(str(change).split())
    assert np.all(np.asarray(change.moved_bytes_per_device) >= 0)


@pytest.mark.long
def test_a_plan_says_what_any_number_of_islands_would_take() -> None:
    def planned(exchange: str) -> shardlib.Plan:
        return shardlib.plan(
            MODEL, loss, optax.adam(0.1), rows(0), topology="cpu:8", pin={"exchange": exchange}
        )

    exact, two = planned("exact"), planned("diloco:2:10")
    for asked, exchange in ((exact, "diloco:2:10"), (two, "exact"), (two, "diloco:4:10")):
        found = asked.source.why_not({"exchange": exchange}) if asked.source else None
        wanted = planned(exchange)
        assert found is not None and found.mesh == wanted.mesh
        assert found.estimate.step_seconds == wanted.estimate.step_seconds
        assert found.estimate.tokens == wanted.estimate.tokens
        assert str(found.mesh) in str(asked.why_not(exchange=exchange))
    with pytest.raises(shardlib.BatchError, match="do not divide among 3 islands"):
        exact.why_not(exchange="diloco:3:10")


@pytest.mark.long
def test_where_steps_wait_for_the_network_islands_are_spoken_of() -> None:
    """Predictions of the finding are those of the plan with the exchange pinned."""
    config = models.load("gpt2-small")
    assert isinstance(config, TransformerConfig)
    init, model_loss = models.build(config)
    batch = models.example_batch(config, 64, 1024)

    def planned(machine: str, **pin: object) -> shardlib.Plan:
        return shardlib.plan(init, model_loss, optax.adamw(1e-3), batch, topology=machine, pin=pin)

    def spoken(plan: shardlib.Plan) -> list[str]:
        return [one.message for one in plan.findings if one.code == "exact-exchange-exposed"]

    machine = "2*v5e:4x4"
    plan = planned(machine)
    (message,) = spoken(plan)
    seconds = plan.estimate.seconds
    assert seconds.exposed > 0.05 * plan.estimate.step_seconds and "2 islands" in message
    found = re.findall(r"exchange=(\S+) waits for (\S+ .?s) and moves (\S+ .?i?B)", message)
    assert [exchange.split(":")[0] for exchange, *_ in found] == ["diloco", *["compressed"] * 2]
    for exchange, waits, moves in found:
        pinned = planned(machine, exchange=exchange)
        crossing = [c for c in pinned.estimate.collectives if "island" in c.axes]
        size = sum(c.total_bytes for c in crossing) // pinned.exchange.period
        if "powersgd" not in exchange:  # whose factors depend on the layouts of another plan
            assert waits == seconds_text(pinned.estimate.seconds.exchange)
            assert moves == bytes_text(size)
        if exchange.startswith("diloco"):  # it hides, and no more often would
            step = pinned.estimate.step_seconds - pinned.estimate.seconds.exchange
            assert sum(c.seconds for c in crossing) < pinned.exchange.every * step
    (apart,) = spoken(planned("2@10gbit-50ms*h100:8"))
    assert "1 of 2 parts of the machine are left out" in apart
    (odd,) = spoken(planned("3@10gbit-50ms*h100:8"))
    assert "64 rows do not divide among them" in odd and "exchange=" not in odd
    (far,) = spoken(planned("2@10mbit-100ms*h100:8"))
    assert "diloco" not in far and "powersgd" in far
    late = planned("2@10gbit-50ms*h100:8", exchange="diloco:2:50:delay=50").explain()
    assert "Every 50 steps a meeting, of which steps wait for" in late
    assert not spoken(planned("h100:8")) and not spoken(planned("v5e:4x4"))
    assert not spoken(planned(machine, exchange="diloco:2:10"))


@pytest.mark.long
def test_islands_of_a_part_of_what_the_links_join_meet_over_the_links() -> None:
    """A plan with half of a cluster's devices: its islands would be one in each cluster."""
    config = models.load("gpt2-small")
    assert isinstance(config, TransformerConfig)
    init, model_loss = models.build(config)
    batch = models.example_batch(config, 32, 128)
    machine = "2@1gbit-100ms*2*h100:8"

    def planned(**pin: object) -> shardlib.Plan:
        return shardlib.plan(init, model_loss, optax.adamw(1e-3), batch, topology=machine, pin=pin)

    plan = planned(mesh={"fsdp": 8}, zero=3)
    (message,) = [one.message for one in plan.findings if one.code == "exact-exchange-exposed"]
    found = re.findall(r"exchange=(\S+) waits for (\S+ .?s)", message)
    assert [exchange for exchange, _ in found][-1] == "compressed:2:quantised"
    for exchange, waits in found:
        pinned = planned(exchange=exchange, mesh={"island": 2, "fsdp": 8}, zero=3)
        if "powersgd" not in exchange:
            assert waits == seconds_text(pinned.estimate.seconds.exchange)
        assert pinned.estimate.seconds.exchange > 0.1
