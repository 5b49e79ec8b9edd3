"""Programs that serve, as compilers make them: at most two all-reduces a layer, pages written in
place.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.layout import Collective
from shardlib.machines.topology import topology
from shardlib.serve.checks import findings
from shardlib.serve.requests import Capacity, Storage
from shardlib.verification.report import CompiledStep
from tests.serve.test_planned import CONFIG as SERVED

CONFIG = replace(SERVED, compute_dtype="bfloat16", param_dtype="bfloat16")
SIZES = Capacity(longest=256, slots=4, page=16, pages=256, budget=16)


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    [
        "cpu:4",
        pytest.param("v5e:2x2", marks=pytest.mark.compiler("tpu")),
        pytest.param("h100:4", marks=pytest.mark.compiler("gpu")),
    ],
)
def test_layers_are_reduced_and_pages_written_in_place(machine: str):
    found = shardlib.verify_serving(
        models.build(CONFIG)[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=4,
        capacity=SIZES,
    )
    assert [one.tokens for one in found] == [4, 20]
    for one in found:
        assert one.ok and one.compiled is not None, str(one)
        assert not {finding.code for finding in one.findings} - {"cache-copied"}, str(one)
        layer = [
            each
            for each in one.compiled.collectives
            if each.count >= CONFIG.layers and "sort" not in each.cause
        ]
        assert len(layer) == 1 and layer[0].axes == ("tensor",), str(one)
        assert layer[0].kind == "all-reduce" and layer[0].count <= 2 * CONFIG.layers, str(one)
        gathered = [each for each in one.compiled.collectives if each.kind == "all-gather"]
        assert all(each.bytes <= 4.1 * SIZES.slots * CONFIG.vocab_size for each in gathered)
        held = one.compiled.device_bytes
        assert held["arguments"] == pytest.approx(sum(one.predicted.values()), rel=0.03)
        assert one.to_json()["predicted"] == one.predicted


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "machine", ["cpu:8", pytest.param("v5e:2x4", marks=pytest.mark.compiler("tpu"))]
)
def test_no_device_has_all_pages_of_fewer_key_heads(machine: str, kv_heads: int):
    found = shardlib.verify_serving(
        models.build(replace(CONFIG, kv_heads=kv_heads))[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=8,
        capacity=SIZES,
    )
    whole = 2 * CONFIG.layers * SIZES.all_pages * SIZES.page * kv_heads * CONFIG.head_dim * 2
    for one in found:
        assert one.ok and one.compiled is not None, str(one)
        assert one.predicted["pages"] == whole // 8
        held = one.compiled.device_bytes  # a TPU pads the 8 columns that it has of a key
        assert held["arguments"] == pytest.approx(sum(one.predicted.values()), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    "machine", ["cpu:4", pytest.param("v5e:2x2", marks=pytest.mark.compiler("tpu"))]
)
def test_a_device_holds_eight_bits(machine: str):
    sizes = replace(SIZES, storage=Storage(weights="int8", cache="fp8"))
    for one in shardlib.verify_serving(
        models.build(CONFIG)[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=4,
        capacity=sizes,
    ):
        assert one.ok and one.compiled is not None, str(one)
        held = one.compiled.device_bytes
        assert held["arguments"] == pytest.approx(sum(one.predicted.values()), rel=0.05)
        elements = sum(leaf.size for leaf in jax.tree.leaves(read(models.build(CONFIG)[0]).params))
        assert one.predicted["weights"] < 1.1 * elements / 4


@pytest.mark.long
@pytest.mark.parametrize(
    "machine", ["cpu:4", pytest.param("v5e:2x4", marks=pytest.mark.compiler("tpu"))]
)
def test_layers_of_one_loop_with_several_windows_are_written_in_place(machine: str):
    config = replace(CONFIG, layers=4, sliding_window=32, global_every=2)
    data, sizes = (1 if machine == "cpu:4" else 2), replace(SIZES, pages=2048)
    for one in shardlib.verify_serving(
        models.build(config)[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=4,
        data=data,
        capacity=sizes,
    ):
        assert one.ok and one.compiled is not None, str(one)
        if machine != "cpu:4":  # compilers for CPUs copy pages of any model in a loop
            assert not one.findings, str(one)
        first, windowed = sizes.within({0, 32}).groups
        pages = 2 * (first.pages + windowed.pages)
        kept = 2 * sizes.page * config.kv_heads * config.head_dim * 2
        assert windowed.pages < first.pages and one.predicted["pages"] == pages * kept // 4


@pytest.mark.parametrize("machine", [pytest.param("v5e:2x4", marks=pytest.mark.compiler("tpu"))])
def test_groups_of_devices_move_nothing_large_between_each_other(machine: str):
    for one in shardlib.verify_serving(
        models.build(CONFIG)[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=4,
        data=2,
        capacity=SIZES,
    ):
        assert one.ok and one.compiled is not None, str(one)
        between = [each for each in one.compiled.collectives if "data" in each.axes]
        logits = 2 * 4.1 * SIZES.slots * CONFIG.vocab_size
        assert all(each.bytes <= logits for each in between), str(one)


def test_what_is_wrong_is_said():
    step = CompiledStep(
        device_bytes={
            "arguments": 2000,
            "outputs": 0,
            "aliased": 0,
            "temporaries": 600,
            "peak": 10**12,
        },
        collectives=(
            Collective(kind="all-gather", axes=("tensor",), bytes=64, count=3, cause="weights.out"),
            Collective(kind="all-gather", axes=("tensor",), bytes=64, cause="weights.a, pages.0"),
            Collective(kind="all-gather", axes=("tensor",), bytes=8, cause="jit(argsort)/sort"),
            Collective(kind="all-gather", axes=("tensor",), bytes=2001, cause="vmap()/dot"),
        ),
        wire_bytes=0.0,
        compute_seconds=0.0,
        device_kind="",
    )
    said = list(
        findings(
            topology("h100:8"),
            step,
            donated=4,
            aliased=3,
            predicted={"weights": 1000, "pages": 500},
            logits=1000,
        )
    )
    assert [(one.code, one.severity) for one in said] == [
        ("weights-gathered", "error"),
        ("not-aliased", "error"),
        ("cache-copied", "warning"),
        ("memory-differs", "warning"),
        ("does-not-fit", "error"),
    ]
    assert "weights.out" in said[0].message and "argsort" not in said[0].message
    assert "vmap()/dot" in said[0].message
    assert np.all([one.where == "serving" for one in said])
