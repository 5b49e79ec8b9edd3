"""Questions about a plan that serves, and its JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import shardlib
from shardlib.errors import InfeasibleError, PinError, PlanError, TopologyError
from shardlib.models import build
from shardlib.models.presets import PRESETS
from shardlib.serve.cost import Experts, cuts, split, visited
from shardlib.serve.plan import ServingPlan, curve, meshes
from shardlib.serve.propagation import serving_layouts, serving_mesh
from shardlib.serve.search import plan_served
from shardlib.serve.space import ServingPins
from tests.serve.small_jobs import asked, problem_of, served, weight_bytes


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
    begin = time.process_time()
    points = plan_served(given).pareto()
    assert len(points) > 20 and time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tensr": 8}, "do you mean 'tensor'"),
        ({"mesh": 8}, "it is a table"),
        ({"tensor": 0}, "whole number"),
        ({"batch": True}, "whole number"),
        ({"batch": 1.5}, "whole number"),
        ({"mesh": {"stage": 2}}, "not a decision of serving"),
    ],
)
def test_wrong_pins_are_told(pins: dict[str, object], said: str):
    with pytest.raises(PinError, match=said):
        ServingPins.parse(pins)  # pyright: ignore[reportArgumentType]


# What is read off a traced forward pass, beside what is known of published models.


@pytest.mark.parametrize(
    ("name", "parameters", "active", "kept"),
    [
        # kept: 2 arrays x layers x key heads x width, elements (model cards)
        ("llama2-7b", 6.74e9, 6.61e9, 2 * 32 * 32 * 128),
        ("llama3-8b", 8.03e9, 7.50e9, 2 * 32 * 8 * 128),
        ("llama3-70b", 70.6e9, 69.5e9, 2 * 80 * 8 * 128),
        ("llama3-405b", 405.9e9, 403.8e9, 2 * 126 * 8 * 128),
        ("mixtral-8x7b", 46.7e9, 12.7e9, 2 * 32 * 8 * 128),  # arXiv:2401.04088: 47B and 13B
    ],
)
def test_sizes_are_those_of_published_models(
    name: str, parameters: float, active: float, kept: int
):
    model = served(name)
    assert model.parameters == pytest.approx(parameters, rel=0.002)
    assert sum(one.flops for one in model.products) == pytest.approx(2 * active, rel=0.01)
    assert model.kept_bytes("bf16") == 2 * kept
    assert model.kept_bytes("int8") == kept + 4 * kept / model.attention[0].kept[0][0]  # scales


@pytest.mark.parametrize("name", ["llama3-70b", "llama2-7b", "mixtral-8x7b"])
def test_layers_are_sharded_as_megatron_does(name: str):
    """Heads and the width of the MLP are sharded, with two sums a layer (arXiv:1909.08053), and one
    more for the embedding.
    """
    model = served(name)
    found = split(model, cuts(model), 8, weights="bf16", cache="bf16")
    layers = model.layers
    assert sum(count for count, _ in found.sums) == 2 * layers + 1
    norms = sum(one.elements for one in model.weights if len(one.dims) < 3)
    assert found.weights * 8 == pytest.approx(2 * model.parameters, rel=0.01, abs=2 * 7 * norms)
    assert found.kept * 8 == model.kept_bytes("bf16")
    assert found.flops * 8 == pytest.approx(sum(one.flops for one in model.products), rel=0.01)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
@pytest.mark.parametrize("tensor", [2, 8, 16])
def test_what_is_priced_is_sharded_as_programs_are(name: str, tensor: int):
    """Without experts: their matmuls have no dim of experts, so that they are priced as if their
    width was sharded, which costs the same.
    """
    model, mesh = served(name), serving_mesh(tensor=tensor, key_heads=[8])
    layouts = serving_layouts(problem_of(name), mesh)
    sharded = {
        colour
        for weight in model.weights
        for (_, colour), axes in zip(weight.dims, layouts[weight.path], strict=True)
        if axes
    }
    assert sharded == cuts(model)


def test_keys_and_values_are_shared_by_all_devices():
    model = served("llama3-70b")
    found = split(model, cuts(model), 16, weights="bf16", cache="bf16")
    assert found.kept * 16 == model.kept_bytes("bf16")


def test_experts_are_read_as_tokens_visit_them():
    draw = np.random.default_rng(0)
    for tokens in (1, 4, 64):
        drawn = [
            len({int(one) for _ in range(tokens) for one in draw.permutation(16)[:2]})
            for _ in range(400)
        ]
        found = visited(Experts(bytes=16.0, count=16, chosen=2), np.asarray(float(tokens)))
        assert float(found) == pytest.approx(np.mean(drawn), rel=0.05)


@pytest.mark.parametrize("name", ["llama3-70b", "mixtral-8x7b", "gpt2-small"])
@pytest.mark.parametrize("tensor", [2, 8, 16])
def test_weights_of_a_plan_are_those_of_the_programs(name: str, tensor: int):
    """The layouts of programs; experts and few key heads are cut over all devices, too."""
    given = asked(name, "v5e:4x4", {"tensor": tensor})
    problem = problem_of(name)
    mesh = serving_mesh(
        tensor=tensor, key_heads=[max(n for _, n in one.kept) for one in given.model.attention]
    )
    replica = replace(given, problem=problem).replica(tensor)
    assert replica is not None
    held = replica.pricing.split.weights
    assert held == pytest.approx(weight_bytes(problem, mesh, 2), rel=0.01)
    assert held * tensor <= 1.75 * 2 * given.model.parameters  # 12 heads on 16 devices


# Every weight of a model that serves is cut, whatever its family.


def test_dims_that_are_cut_are_those_of_megatron():
    mesh = serving_mesh(tensor=16, key_heads=[8])
    layouts = serving_layouts(problem_of("llama3-70b"), mesh)
    assert cut(layouts) == {
        "embedding": (0, 16),
        "head": (1, 16),
        "layers.attention.query": (2, 16),
        "layers.attention.key": (2, 8),
        "layers.attention.value": (2, 8),
        "layers.attention.out": (1, 16),
        "layers.mlp.gate": (2, 16),
        "layers.mlp.up": (2, 16),
        "layers.mlp.down": (1, 16),
    }


def test_experts_and_latents_are_cut():
    found = problem_of("deepseek-v3")
    layouts = serving_layouts(found, serving_mesh(tensor=16, key_heads=[128]))
    ways = {path: number for path, (_, number) in cut(layouts).items()}
    whole = {one.path: one.shape for one in found.parameters if one.path not in ways}
    assert all(path.endswith(("norm.scale", "norm")) for path in whole), whole
    assert set(ways.values()) == {16}
    assert cut(layouts)["layers.experts.up"][0] == 1, "whole experts"


def cut(layouts: Mapping[str, tuple[tuple[str, ...], ...]]) -> dict[str, tuple[int, int]]:
    """The dim that is cut, and over how many of 8 x 2 or 16 devices, of what is cut."""
    sizes = {("tensor", "context"): 16, ("tensor",): 8}
    return {
        path: (dim, sizes[axes])
        for path, layout in layouts.items()
        for dim, axes in enumerate(layout)
        if axes
    }
