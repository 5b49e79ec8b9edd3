"""Pins that no plan can have: every error says which pin it is about and what to do."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from shardlib.errors import PinError
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds

DEEP = {
    "batch": 8,
    "seq": 512,
    "embed": 1024,
    "hidden": 4096,
    "heads": 8,
    "vocab": 1024,
    "depth": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "layers": {},
    "deep": DEEP,
    "function": DEEP,
    "two stacks": {"batch": 2, "seq": 32, "embed": 64, "hidden": (128, 512), "depth": (2, 2)},
    "stack": {"batch": 2, "seq": 12, "embed": 64, "hidden": 256, "depth": 2},
}
MADE = {"two stacks": worlds.two_stacks, "stack": worlds.stack}


@functools.cache
def load(world: str, vendor: str) -> Workload:
    """A world; "function" calls attention as a function."""
    problem = MADE.get(world, worlds.layers)(**SIZES[world])
    calls = frozenset({"attention"} if world == "function" else ())
    return prepare(replace(problem, functions=calls), vendor)


#: By world and machine: pins, and a part of the message.
ROWS: dict[tuple[str, str], tuple[tuple[dict[str, Any], str], ...]] = {
    ("layers", "h100:8"): (
        (
            {"mesh": {"data": 32}},
            "the mesh data=32 has 32 devices and h100:8 has 8\nTry: a smaller mesh, or a"
            " topology of as many devices",
        ),
        (
            {"mesh": {"data": 3}},
            "the mesh data=3 splits the batch into 3 parts, which do not divide its 16"
            " examples\nTry: a batch that is a multiple of 3, or smaller data and fsdp axes",
        ),
        (
            {"mesh": {"tensor": 7}},
            "tensor=7 divides no dimension that it could shard; dimensions with their largest"
            " common size are vocab (128), mlp (256), head_dim (16), heads (4)\nTry: a tensor"
            " axis that divides one of them",
        ),
        (
            {"mesh": {"data": 8}, "microbatches": 3},
            "microbatches=3 does not divide the 2 examples of each of the 8 parts of the"
            " batch\nTry: one of 1, 2",
        ),
        (
            {"remat": "dots"},
            "remat='dots' rematerialises layers, and world has no repeated layer; it can be none, full",
        ),
        (
            {"remt": "full"},
            "pins are not usable: 'remt' is not a decision; did you mean 'remat'? (decisions"
            " are mesh, rules, sequence_parallel, zero, remat, remat_layers, remat_classes,"
            " microbatches, accumulation, schedule, virtual_stages, gather, pipeline, context,"
            " attention, experts, collective_matmul, offload, optimizer_layout, axis_order,"
            " exchange, dtypes, param_dtype, matmul_dtype, gradient_dtype, reduction_dtype, moment_dtype, allow"
            " and mesh.AXIS)",
        ),
    ),
    ("deep", "h100:8"): (
        ({"offload": ["optimizer", "disk"]}, "offload names 'optimizer' and 'disk'"),
        ({"mesh": {"stage": 16}}, "the mesh stage=16 has 16 devices"),
        (
            {"mesh": {"context": 7}},
            "context=7 shards the sequence, and world has sequences of 512, which 7 parts do"
            " not divide",
        ),
        ({"mesh": {"expert": 2}}, "expert=2 shards experts, and world has none"),
        (
            {"experts": "dropless"},
            "experts='dropless' sends tokens to experts, and world has no grouped matmul",
        ),
        ({"mesh": {"data": 8}, "schedule": "1f1b"}, "schedule='1f1b' needs stages"),
        (
            {"mesh": {"stage": 2}, "virtual_stages": 2, "schedule": "1f1b"},
            "virtual_stages=2 needs the schedule 'interleaved'",
        ),
        (
            {"mesh": {"data": 8}, "accumulation": 2},
            "accumulation=2 is for the stages of a pipeline, and there are none; without stages"
            " gradients are accumulated over microbatches",
        ),
        ({"accumulation": 2, "schedule": "none"}, "accumulation=2 is for the stages of a pipeline"),
        (
            {"accumulation": 3, "microbatches": 8},
            "accumulation=3 takes the microbatches in equal groups, and 8 are pinned",
        ),
        (
            {"mesh": {"stage": 2, "data": 4}, "accumulation": 3},
            "accumulation=3 takes microbatches in equal groups, which do not divide the",
        ),
        (
            {"mesh": {"stage": 4}, "accumulation": 4, "microbatches": 8, "virtual_stages": 2},
            "stages of several chunks of layers need a microbatch for each of the 4 stages, and"
            " 2 go through them together",
        ),
        ({"mesh": {"data": 8}, "context": "ring"}, "context='ring' needs a context axis"),
        ({"offload": ["parameters"]}, "it is a list of 'optimizer', 'activations'"),
        ({"axis_order": ["data", "data"]}, "axis_order names an axis twice"),
        (
            {"mesh": {"data": 8}, "axis_order": ["tensor", "data"]},
            "axis_order names tensor, and the pinned mesh has no such axis\nTry: axis_order without",
        ),
        ({"attention": "cudnn"}, "world does not call attention as a function"),
        ({"mesh": {"context": 4}, "context": "ring"}, "does not call attention as a function"),
    ),
    ("two stacks", "cpu:1"): (
        (
            {"remat_classes": {"third": "full"}},
            "which are first, second: 'third' is not one of them",
        ),
        (
            {"remat_classes": {"first": "fast"}},
            "remat_classes.first is 'fast'; it is one of 'none', 'dots', 'full', or a list",
        ),
        ({"remat_classes": {"first": ["full", 0]}}, "remat_classes.first is ['full', 0]"),
        ({"remat_classes": "full"}, "remat_classes is 'full'; it is a mapping"),
    ),
    ("stack", "h100:1"): (
        (
            {"allow": {"momentum": ["bfloat16"]}},
            "allow names 'momentum'; dtypes are those of param_dtype, matmul_dtype",
        ),
        ({"allow": ["bfloat16"]}, "allow is ['bfloat16']; it is a mapping from"),
        ({"dtypes": {"moment_dtype": "bfloat16"}, "moment_dtype": "float16"}, "contradicts"),
    ),
    ("function", "h100:8"): (
        ({"attention": "splash"}, "a kernel for chips of google, not of nvidia"),
        (
            {"attention": "blocks", "mesh.context": 2, "context": "all-gather"},
            "leaves attention to the compiler",
        ),
        (
            {"attention": "cudnn", "mesh.context": 2, "context": "ring"},
            "a ring computes attention in blocks",
        ),
        ({"attention": "flash"}, "it is one of 'traced', 'blocks'"),
    ),
}


@pytest.mark.parametrize(
    ("world", "where", "pin", "message"),
    [(*place, *row) for place, rows in ROWS.items() for row in rows],
)
def test_bad_pins(world: str, where: str, pin: dict[str, Any], message: str) -> None:
    one = load(world, topology(where).chip.vendor)
    with pytest.raises(PinError) as caught:
        planner.search(one.problem, where, pin, workload=one)
    assert message in str(caught.value)
