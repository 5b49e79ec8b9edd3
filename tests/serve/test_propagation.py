"""Every weight of a model that serves is cut, whatever its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardlib import models
from shardlib.annotation.tree import read
from shardlib.graph import Problem
from shardlib.models.config import TransformerConfig
from shardlib.serve.propagation import serving_layouts, serving_mesh
from shardlib.tracing.trace import forward_problem
from tests.serve.small_jobs import weight_bytes

#: Elements as published: arXiv:2407.21783, table 3, and model cards.
PUBLISHED = {"llama3-8b": 8.03e9, "llama3-70b": 70.6e9}


def problem(name: str) -> tuple[TransformerConfig, Problem]:
    config = models.load(name)
    assert isinstance(config, TransformerConfig)
    config = replace(config, param_dtype="bfloat16")
    model = read(models.build(config)[0])
    return config, forward_problem(model, lambda module, tokens: module(tokens), rows=8, tokens=32)


@pytest.mark.parametrize(("name", "tensor"), [("llama3-8b", 8), ("llama3-70b", 16)])
def test_a_device_has_its_share_of_the_weights(name: str, tensor: int):
    config, found = problem(name)
    mesh = serving_mesh(tensor=tensor, key_heads=[config.kv_heads])
    share = 2 * PUBLISHED[name] / tensor
    # keys and values of 8 heads lie twice on 16 devices
    keys = 2 * 2 * config.layers * config.embed * config.kv_heads * config.head_dim
    twice = keys / math.gcd(tensor, config.kv_heads) - keys / tensor
    assert weight_bytes(found, mesh) == pytest.approx(share + twice, rel=0.005)
    assert weight_bytes(found, mesh, itemsize=1) * 2 == weight_bytes(found, mesh)


def test_dims_that_are_cut_are_those_of_megatron():
    config, found = problem("llama3-70b")
    layouts = serving_layouts(found, serving_mesh(tensor=16, key_heads=[config.kv_heads]))
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
    config, found = problem("deepseek-v3")
    layouts = serving_layouts(found, serving_mesh(tensor=16, key_heads=[config.heads]))
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
