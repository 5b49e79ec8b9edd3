"""What has no lowering is in no plan, and a pin of it is an error with its reason."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.framework import XLA
from shardlib.decisions.lowerings import (
    UNSUPPORTED,
    Unsupported,
    facts_of_decisions,
    facts_of_pins,
    matching_rows,
    unsupported_on,
)
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import Decisions
from shardlib.errors import InfeasibleError, PinError
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds
from tests.planner.worlds import with_memory

#: What asks for each fact: pins, and the decisions of a plan that has it.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stages": ({"mesh.stage": 2}, {"mesh": {"stage": 2}}),
    "routed": ({"experts": "dropless"}, {"experts": "dropless"}),
    "one program": ({}, {}),
    "activations on host": ({"offload": ["activations"]}, {"offload": ("activations",)}),
    "reduction dtype": (
        {"reduction_dtype": "bfloat16"},
        {"dtypes": (("reduction_dtype", "bfloat16"),)},
    ),
    "dtype without lowering": (
        {"moment_dtype": "float8_e5m2"},
        {"dtypes": (("moment_dtype", "float8_e5m2"),)},
    ),
}


@functools.cache
def load(world: str = "experts") -> Workload:
    return prepare(getattr(worlds, world)())


def _testable(gap: Unsupported) -> bool:
    return gap.facts <= ASKED.keys()


@pytest.mark.parametrize(
    "gap", [gap for gap in UNSUPPORTED if _testable(gap)], ids=lambda gap: gap.combination
)
def test_a_pin_of_what_has_no_lowering_is_an_error_with_its_reason(gap: Unsupported) -> None:
    pins: dict[str, Any] = {}
    for fact in sorted(gap.facts):
        pins |= ASKED[fact][0]
    place, vendor = ("v5e:2x4", "google") if gap.vendor == "google" else ("h100:8", "nvidia")
    with pytest.raises(PinError) as caught:
        planner.search(load().problem, place, pins, workload=prepare(load().problem, vendor))
    assert gap.combination in str(caught.value) and gap.hint in str(caught.value)
    if gap.vendor == "google":  # chips of others may have it
        assert planner.search(load().problem, "h100:8", pins).offload == ("activations",)
    elsewhere = prepare(load().problem, "nvidia", replace(XLA, name="other"))
    try:  # other software may have it
        planner.search(load().problem, "h100:8", pins, workload=elsewhere)
    except PinError as error:
        assert gap.combination not in str(error)


@pytest.mark.parametrize(
    "gap", [gap for gap in UNSUPPORTED if _testable(gap)], ids=lambda gap: gap.combination
)
def test_plans_and_pins_have_the_same_facts(gap: Unsupported) -> None:
    pins: dict[str, Any] = {}
    mesh: dict[str, int] = {}
    decided: dict[str, Any] = {"remat": "dots"}
    for fact in sorted(gap.facts):
        pinned, plan = ASKED[fact]
        pins, mesh = {**pins, **pinned}, {**mesh, **plan.get("mesh", {})}
        decided |= {word: value for word, value in plan.items() if word != "mesh"}
    found = facts_of_decisions(Decisions(**decided, mesh=MeshShape(mesh)))
    assert gap in matching_rows(found) and gap in matching_rows(facts_of_pins(Pins.parse(pins)))
    for fact in gap.facts:
        assert gap not in matching_rows(found - {fact})


@functools.cache
def roomy() -> tuple[Workload, int]:
    """A stack of layers, and bytes of its fastest plan that rematerialises nothing."""
    one = prepare(worlds.stack(depth=6, batch=8, seq=64), "nvidia")
    plan = planner.search(one.problem, "h100:4", {"remat": "none"}, workload=one)
    return one, plan.estimate.device_bytes.peak


@pytest.mark.matrix
@pytest.mark.parametrize("share", (1.0, 0.8, 0.6, 0.4, 0.2))
@pytest.mark.parametrize("pin", ({}, {"mesh.stage": 2}, {"offload": ["activations"]}), ids=str)
def test_no_plan_of_the_space_is_without_lowering(pin: dict[str, Any], share: float) -> None:
    one, peak = roomy()
    tight = with_memory(topology("h100:4"), peak * share)
    try:
        ranking = planner.ranked(one.problem, tight, pin, workload=one, slack=1.5)
    except InfeasibleError:
        return
    plans = [entry.build() for entry in itertools.islice(ranking, 20)]
    assert plans and plans[0].estimate.device_bytes.peak <= peak * share
    for plan in plans:
        assert not matching_rows(facts_of_decisions(plan), unsupported_on("nvidia"))


def test_a_dtype_that_is_allowed_routes_no_tokens_where_none_can_be_lowered() -> None:
    allowed = {"allow": {"reduction_dtype": ["bfloat16"]}, "mesh": {"expert": 4}}
    ranking = planner.ranked(load().problem, "h100:4", allowed, workload=load(), slack=2.0)
    plans = [entry.build() for entry in itertools.islice(ranking, 20)]
    assert any(plan.experts != "none" for plan in plans)
    for plan in plans:
        assert not matching_rows(facts_of_decisions(plan), unsupported_on("nvidia"))
