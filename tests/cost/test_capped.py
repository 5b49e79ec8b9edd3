"""Experts with a capacity: what is dropped, against simulated routing, and what is priced."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import optax
import pytest

from shardlib import models
from shardlib.cost.roofline import busiest, dropped_share, efficiency_of
from shardlib.cost.terms import Amount, RoutedRows
from shardlib.frontend.model import problem
from shardlib.graph import Problem
from shardlib.models.config import Experts, TransformerConfig
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan

SKEWED = replace(efficiency_of("h100", "nvidia", "xla"), skew=0.25)
CONFIG = TransformerConfig(
    name="small",
    vocab_size=128,
    layers=2,
    embed=1024,
    heads=8,
    kv_heads=8,
    head_dim=128,
    mlp=64,
    max_seq=512,
)


def simulated(assignments: int, experts: int, factor: float, skew: float) -> float:
    """Mean part of the assignments beyond the capacity: popularities from a normal law, assignments
    from a multinomial one.
    """
    draw = np.random.default_rng(3)
    found: list[float] = []
    for _ in range(300):
        popularity = draw.normal(1.0, skew, size=experts).clip(0.01)
        loads = draw.multinomial(assignments, popularity / popularity.sum())
        found.append(
            float(np.maximum(loads - factor * assignments / experts, 0).sum() / assignments)
        )
    return float(np.mean(found))


@pytest.mark.parametrize(("assignments", "experts"), [(4096, 8), (16384, 64)])
@pytest.mark.parametrize(
    ("factor", "skew"),
    [(0.75, 0.25), (1.0, 0.0), (1.0, 0.25), (1.25, 0.25), (1.25, 0.1), (2.0, 0.25)],
)
def test_dropped_tokens(assignments: int, experts: int, factor: float, skew: float):
    assert dropped_share(assignments, experts, factor, skew) == pytest.approx(
        simulated(assignments, experts, factor, skew), rel=0.05, abs=2e-3
    )


def test_no_expert_takes_more_than_its_capacity():
    whole, cut = (
        Amount(total=total, batch=False, tensor=False, expert=expert)
        for total, expert in ((4096.0, False), (64.0, True))
    )

    def load(most: float | None) -> float:
        return float(
            busiest(
                RoutedRows(assignments=whole, experts=cut, capacity_factor=most),
                lambda amount: np.array([amount.total / (64 if amount.expert else 1)]),
                SKEWED,
            )[0]
        )

    assert load(1.25) == 1.25 < load(None) and load(0.5) == 1.0


@functools.cache
def traced(capacity: float) -> Problem:
    config = replace(CONFIG, experts=Experts(count=8, per_token=2, mlp=2048, capacity=capacity))
    init, loss = models.build(config)
    return problem(init, loss, optax.sgd(0.1), models.example_batch(config, 64, 512))


def planned(capacity: float, mesh: dict[str, int], experts: str) -> Plan:
    pin = {"mesh": mesh, "experts": experts, "remat": "none", "zero": 0}
    return planner.search(traced(capacity), "h100:8", pin)


@pytest.mark.long
def test_a_capacity_of_one_costs_as_much_as_none():
    """With a slot for every assignment on average, the same rows travel and the same rows are
    multiplied as without a capacity.
    """
    mesh = {"expert": 4, "data": 2}
    free, capped = planned(0.0, mesh, "dropless"), planned(1.0, mesh, "capacity")
    bytes_ = [
        sorted(
            (one.bytes, one.count)
            for one in plan.estimate.collectives
            if one.axes == ("expert",) and one.kind == "all-to-all"
        )
        for plan in (free, capped)
    ]
    assert bytes_[0] == bytes_[1] != []
    assert capped.estimate.step_seconds == pytest.approx(free.estimate.step_seconds, rel=0.25)


@pytest.mark.long
def test_slots_are_cut_as_tokens_are():
    """Four times the devices that share experts and tokens have a quarter of the products."""
    few, many = (planned(1.25, {"expert": size}, "capacity") for size in (2, 8))
    assert many.estimate.seconds.compute < 0.5 * few.estimate.seconds.compute
