"""What is read off a traced forward pass, beside what is known of published models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardlib.serve.cost import Experts, cuts, split, visited
from shardlib.serve.propagation import serving_layouts, serving_mesh
from tests.serve.small_jobs import asked, problem_of, served, weight_bytes


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
