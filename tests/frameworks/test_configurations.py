"""Plans for other training frameworks: they keep to what the framework can do, and what is written
of them are words that its own parser knows (`benchmarks/framework_configs.py`).
"""

from __future__ import annotations

import functools
import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax
import pytest
import yaml

from shardlib import models
from shardlib.errors import PinError, PlanError
from shardlib.frameworks import framework, framework_profiles, frameworks
from shardlib.frontend.model import read_and_trace
from shardlib.graph import Problem
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan
from shardlib.planner.search import ranked, search, workload_for_framework
from shardlib.report.changes import diff


@functools.cache
def results() -> Any:
    return json.loads(
        (Path(__file__).parents[2] / "benchmarks/results/framework_configs.json").read_text()
    )


NAMES = ("megatron-core", "torchtitan", "maxtext", "deepspeed", "levanter")
GPUS, TPUS = "2*h100:8", "v5e:4x4"


@functools.cache
def problem(name: str = "gpt2") -> Problem:
    config = models.load(name)
    init, loss = models.build(config)
    batch = models.example_batch(config, 32, 512)
    return read_and_trace(init, loss, optax.adamw(1e-4), batch, None, name).traced.problem


@functools.cache
def load(name: str, where: str = GPUS) -> Any:
    return workload_for_framework(name, problem("llama3-8b"), topology(where))


def plan(name: str, where: str = GPUS, **pins: Any) -> Plan:
    one = load(name, where)
    return search(one.problem, where, pins, workload=one)


def words(plan: Plan) -> list[str]:
    """The names of all options that the configuration of a plan gives, by section."""
    assert plan.framework is not None
    text, form = plan.emit(), framework(plan.framework.name, plan.framework.vendor).emits
    if form == "megatron":
        return [line[2:].split()[0] for line in text.splitlines() if line[0] != "#"]
    read = {"torchtitan": tomllib.loads, "deepspeed": json.loads}.get(form, yaml.safe_load)
    return [
        ".".join([name, *([inner] if inner else [])])
        for name, value in read(text).items()
        for inner in (value if isinstance(value, dict) else [""])
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_of_a_framework_is_one_that_it_can_do(name: str) -> None:
    """The fastest forty of the space, whatever they decide, have a configuration, all of whose
    words the framework's parser knows.
    """
    one = load(name)
    abilities, known = one.framework.abilities, {*results()[name]["words"]}
    seen: list[Plan] = []
    for entry in itertools.islice(ranked(one.problem, GPUS, {}, workload=one, slack=1.6), 40):
        made = entry.build()
        assert {*made.mesh} <= {*abilities.axes}
        assert made.zero in abilities.zero and made.remat in abilities.remat
        assert made.schedule in ("none", *abilities.schedules)
        assert {*words(made)} <= known | {"base_config"}
        seen.append(made)
    assert len({str(one.decisions) for one in seen}) > 10


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_framework_is_no_faster_with_less_freedom(name: str) -> None:
    """The space of a framework is a part of the space of its profile: no plan of it beats the free
    one.
    """
    one = load(name)
    free = replace(one, framework=None)
    best = search(free.problem, GPUS, {}, workload=free).estimate.step_seconds
    assert plan(name).estimate.step_seconds >= best * (1 - 1e-9)


@pytest.mark.long
def test_plans_are_those_of_the_profile() -> None:
    fixed: dict[str, Any] = {"mesh": {"fsdp": 16}, "zero": 3, "remat": "full"}
    made = plan("maxtext", TPUS, **fixed)
    assert made.framework is not None
    assert (made.framework.name, made.framework.profile) == ("maxtext", "maxtext-tpu")
    assert plan("maxtext", **fixed).framework.profile == "maxtext-gpu"  # type: ignore[union-attr]
    assert "under maxtext" in made.explain()
    stored = {one.dtype for one in plan("megatron-core", mesh={"fsdp": 16}, zero=1).parameters}
    assert stored == {"bfloat16"}, "Megatron stores half precision, masters among its state"


@pytest.mark.long
def test_plans_of_frameworks_are_stored() -> None:
    made = plan("torchtitan", mesh={"fsdp": 16}, zero=3)
    again = Plan.from_json(made.to_json())
    assert again == made and again.emit() == made.emit()
    other = replace(made, framework=None)
    assert other.digest != made.digest and "framework" not in json.loads(other.to_json())


@pytest.mark.long
def test_megatron_flags() -> None:
    made = plan(
        "megatron-core",
        mesh={"stage": 2, "fsdp": 2, "context": 2, "tensor": 2},
        zero=1,
        remat="full",
        remat_layers=4,
        microbatches=4,
        virtual_stages=2,
        context="ring",
        sequence_parallel=True,
    )
    head, *flags = made.emit().splitlines()
    assert head == f"# shardlib: {made.model} on {GPUS}, mesh {made.mesh}, plan {made.digest}"
    assert flags == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--sequence-parallel",
        "--cp-comm-type p2p",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--micro-batch-size 4",
        "--global-batch-size 32",
        "--seq-length 512",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--recompute-granularity full",
        "--recompute-method block",
        "--recompute-num-layers 4",
        "--bf16",
    ]


@pytest.mark.long
def test_maxtext_options_tell_links_apart() -> None:
    made = plan("maxtext", "2*v5e:4x4", mesh={"data": 2, "fsdp": 8, "tensor": 2}, zero=3)
    found = yaml.safe_load(made.emit())
    sizes = {
        axis: (found[f"ici_{axis}_parallelism"], found[f"dcn_{axis}_parallelism"])
        for axis in ("data", "fsdp", "tensor", "expert", "context", "pipeline")
    }
    assert sizes["data"] == (1, 2) and sizes["fsdp"] == (8, 1)
    assert [size for axis, size in sizes.items() if axis not in ("data", "fsdp", "tensor")] == [
        (1, 1)
    ] * 3
    devices, micro = 32, found["gradient_accumulation_steps"]
    assert found["per_device_batch_size"] * devices * micro == 32


def test_parsers_of_the_frameworks_read_what_was_written() -> None:
    """What they read of stored configurations is what the plans say."""
    for name in NAMES:
        assert results()[name]["release"] == frameworks()[name].release
        assert len(results()[name]["configurations"]) >= 3
        for one in results()[name]["configurations"]:
            assert isinstance(one["read"], dict), one["read"]
    for one in results()["megatron-core"]["configurations"]:
        mesh = {**dict.fromkeys(("tensor", "stage", "context"), 1), **one["mesh"]}
        read = one["read"]
        assert read["tensor-model-parallel-size"] == mesh["tensor"]
        assert read["pipeline-model-parallel-size"] == mesh["stage"]
        assert read["context-parallel-size"] == mesh["context"]
    for one in results()["torchtitan"]["configurations"]:
        read, mesh = one["read"]["parallelism"], one["mesh"]
        assert read["data_parallel_replicate_degree"] == mesh.get("data", 1)
        assert read["tensor_parallel_degree"] == mesh.get("tensor", 1)


@pytest.mark.parametrize(
    ("name", "pins", "message"),
    [
        (
            "megatron-core",
            {"zero": 3, "remat": "dots", "mesh.tensor": 2},
            "framework 'megatron-core' cannot do what is pinned:\n"
            "  - zero=3 (it supports zero 0, 1)\n"
            "  - remat='dots' (it supports remat none, full, partly)\n"
            "Try: other pins, or no framework",
        ),
        (
            "levanter",
            {"mesh": {"stage": 2, "data": 8}},
            "framework 'levanter' cannot do what is pinned: mesh.stage=2 (its axes are data, fsdp,"
            " tensor)\nTry: other pins, or no framework",
        ),
        (
            "torchtitan",
            {"mesh.tensor": 2, "sequence_parallel": False},
            "framework 'torchtitan' cannot do what is pinned: sequence_parallel=False (it does so"
            " always)\nTry: other pins, or no framework",
        ),
        (
            "deepspeed",
            {"rules": [["mlp", "tensor"]], "moment_dtype": "bfloat16"},
            "framework 'deepspeed' cannot do what is pinned:\n"
            "  - rules (the framework decides what a mesh axis shards)\n"
            "  - dtypes (its profile fixes the dtypes)\n"
            "Try: other pins, or no framework",
        ),
    ],
)
def test_what_a_framework_cannot_do_is_said(name: str, pins: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError) as error:
        plan(name, **pins)
    assert str(error.value) == message


def test_tensor_shards_heads_width_and_vocabulary_together() -> None:
    for degree in (2, 4, 8):
        rules = dict(plan("megatron-core", **{"mesh.tensor": degree}).rules.entries)
        assert {n for n, axes in rules.items() if "tensor" in axes} >= {"vocab", "mlp", "kv_heads"}
        assert "tensor" not in rules.get("head_dim", ())
    gpt2 = workload_for_framework("megatron-core", problem("gpt2-small"), topology(GPUS))
    with pytest.raises(PinError) as error:
        search(gpt2.problem, GPUS, {"mesh.tensor": 8}, workload=gpt2)
    assert str(error.value) == (
        "megatron-core shards vocab, mlp, kv_heads over tensor together, and tensor=8 does not"
        " divide vocab (50257), kv_heads (12)\nTry: a tensor axis that does, or a model whose dims"
        " are padded, as vocabularies commonly are"
    )


def test_what_a_framework_decides_is_asked_no_questions() -> None:
    one = plan("megatron-core", **{"mesh.tensor": 2})
    assert {shock.what for shock in one.sensitivity().shocks} >= {"compute", "memory bandwidth"}
    assert one.kernels()


def test_differences_say_whose_plans_they_are_between() -> None:
    one, other = plan("megatron-core"), plan("torchtitan")
    head = f"{one.model} on {GPUS} under "
    assert diff(one, other).startswith(f"{head}megatron-core -> {head}torchtitan\n")
    assert diff(one, one).startswith(f"{head}megatron-core\n")


def test_unknown_frameworks_are_said() -> None:
    with pytest.raises(PinError, match="'megatron' is unknown; did you mean 'megatron-core'"):
        framework("megatron", "nvidia")
    with pytest.raises(PinError, match="'xla' is unknown"):
        framework("xla", "nvidia")
    with pytest.raises(PinError, match="runs on chips of nvidia, and these are of google\nTry: l"):
        framework("torchtitan", "google")


def test_releases_can_do_what_their_framework_can() -> None:
    one = framework("megatron-core-2024", "nvidia")
    assert (one.profile, one.abilities) == (
        "megatron-core-2024",
        framework("megatron-core", "nvidia").abilities,
    )
    assert framework("alpa", "nvidia").abilities.free and framework("alpa", "nvidia").emits == ""
    named = {word for its in frameworks().values() for word in its.releases}
    assert named <= {*framework_profiles()}


@pytest.mark.long
def test_what_cannot_be_written_is_said() -> None:
    with pytest.raises(PlanError, match="made for programs of shardlib, which need no"):
        search(
            problem("llama3-8b"), GPUS, {"mesh": {"fsdp": 16}, "zero": 3, "remat": "full"}
        ).emit()
    with pytest.raises(PlanError, match="no configuration of alpa is written\nTry: one of deep"):
        plan("alpa", mesh={"fsdp": 16}).emit()
    made = plan("deepspeed", mesh={"fsdp": 16}, zero=3)
    with pytest.raises(PlanError) as error:
        replace(made, mesh=MeshShape(fsdp=8, tensor=2), remat="dots", microbatches=3).emit()
    assert str(error.value) == (
        "deepspeed 0.19.8 has no words for this plan:\n"
        "  - mesh.tensor=2 (its axes are data, fsdp, context)\n"
        "  - remat='dots' (it supports remat none, full)\n"
        "  - a batch of 32 in 3 microbatches on fsdp=8 x tensor=2\n"
        "Try: plan again with framework=, which keeps to what it can do"
    )
