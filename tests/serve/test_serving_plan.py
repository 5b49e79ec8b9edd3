"""Questions about a plan that serves, and its JSON."""

from __future__ import annotations

import json
import time

import pytest

import shardlib
from shardlib.errors import InfeasibleError, PinError, PlanError, TopologyError
from shardlib.models import build
from shardlib.models.presets import PRESETS
from shardlib.serve.plan import ServingPlan, curve, meshes
from shardlib.serve.search import plan_served
from shardlib.serve.space import ServingPins
from tests.serve.small_jobs import asked


def test_a_plan_by_its_public_name():
    plan = shardlib.plan_serving(
        build(PRESETS["llama3-70b"])[0],
        lambda model, tokens: model(tokens),
        topology="v6e:2x4",
        prompt=1000,
        output=1000,
        tpot=0.04,
        pin={"mesh": {"tensor": 8}},
        name="mine",
    )
    data = json.loads(plan.to_json())
    assert data["mesh"] == {"tensor": 8} and data["model"] == "mine"
    estimate = data["estimate"]
    assert estimate["ttft_seconds"] > 0 and 0 < estimate["tpot_seconds"] <= 0.04
    assert estimate["output_tokens_per_second_per_chip"] > 0
    held = estimate["device_bytes"]
    assert held["peak"] == held["weights"] + held["cache"] + held["temporaries"] <= held["limit"]
    parts = plan.estimate.parts
    assert sum(parts.values()) == pytest.approx(plan.estimate.tpot_seconds, rel=1e-9)
    assert data["search"]["gap"] == 0 and data["pages"] * data["page"] >= data["batch"] * 2000


def test_json_gives_the_plan_back_and_a_changed_one_is_refused():
    plan = plan_served(asked("llama3-8b", "v5e:4x4"))
    text = plan.to_json()
    again = ServingPlan.from_json(text)
    twin, other = (
        plan_served(asked("llama3-8b", "v5e:4x4")),
        plan_served(asked("llama3-8b", "v5e:2x4")),
    )
    assert plan == twin and {plan, twin, again} == {plan} and plan != other
    assert again == plan and again.explain() == plan.explain() and again.to_json() == text
    with pytest.raises(PlanError, match="changed"):
        ServingPlan.from_json(text.replace('"batch": ', '"batch": 1'))
    for wrong in ("", "[]", "{}", '{"format": 1}', "null", text[:-5]):
        with pytest.raises(PlanError):
            ServingPlan.from_json(wrong)
    for question in (again.pareto, again.two_meshes, lambda: again.why_not(tensor=2), again.replan):
        with pytest.raises(PlanError, match="does not carry its model"):
            question()


def test_questions():
    plan = plan_served(asked("llama3-70b", "v5e:16x16"))
    told = plan.why_not(tensor=plan.choice.tensor * 2)
    assert "tensor" in told and "x" in told
    assert "a device lacks" in plan.why_not(mesh={"tensor": 1})
    with pytest.raises(PinError, match="do you mean 'tensor'"):
        plan.why_not(tenor=2)
    for line in (*plan.explain().splitlines(), *told.splitlines()):
        assert len(line) <= 100
    assert len(curve(plan.pareto()).splitlines()) == 9
    other = plan_served(asked("llama3-8b", "v5e:16x16"))
    assert "llama3-8b" in plan.diff(other)


def test_two_meshes_move_every_key_and_value_once():
    plan = plan_served(asked("llama3-70b", "h100:8", prompt=2048, weights="fp8", cache="fp8"))
    two = plan.two_meshes()
    assert two is not None and "prompts on a mesh of their own" in meshes(two)
    assert two.transfer_bytes == 2048 * 2 * 80 * 8 * 128
    used = two.prefill_tensor * two.prefill_replicas + two.decode_tensor * two.decode_replicas
    assert used <= 8 and two.tpot_seconds < plan.estimate.tpot_seconds


def test_chips_that_are_lost_take_their_group_with_them():
    plan = plan_served(asked("llama3-8b", "v5e:4x4", {"tensor": 4}))
    assert plan.choice.replicas == 4
    left = plan.replan(lost={5})
    assert left.choice.replicas == 3 and left.choice.tensor == 4
    assert left.estimate.requests_per_second == pytest.approx(
        0.75 * plan.estimate.requests_per_second
    )
    free = plan_served(asked("llama3-8b", "v5e:4x4"))
    assert free.replan(lost={0}).estimate.requests_per_second >= max(
        plan_served(
            asked("llama3-8b", "v5e:4x4", {"tensor": ways, "replicas": 16 // ways - 1})
        ).estimate.requests_per_second
        for ways in (2, 4, 8)
    ) * (1 - 1e-9)
    assert plan.replan("v5e:2x4").choice.replicas == 2
    with pytest.raises(TopologyError, match="no devices 16"):
        plan.replan(lost={16})
    with pytest.raises(InfeasibleError):
        plan.replan(lost={0, 4, 8, 12})


def test_seventy_billion_on_256_chips_within_a_second():
    given = asked("llama3-70b", "v5e:16x16", prompt=2048, output=256)
    begin = time.perf_counter()
    points = plan_served(given).pareto()
    assert len(points) > 20 and time.perf_counter() - begin < 1.0


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tensr": 8}, "do you mean 'tensor'"),
        ({"mesh": 8}, "it is a table"),
        ({"tensor": 0}, "whole number"),
        ({"batch": True}, "whole number"),
        ({"batch": 1.5}, "whole number"),
        ({"mesh": {"stage": 2}}, "no decision of serving"),
    ],
)
def test_wrong_pins_are_told(pins: dict[str, object], said: str):
    with pytest.raises(PinError, match=said):
        ServingPins.parse(pins)  # pyright: ignore[reportArgumentType]
