"""What stage, context and expert axes cost, against formulas that others published, and against
recipes that experts use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardlib.cost.framework import XLA
from shardlib.cost.roofline import fitting_bytes
from shardlib.decisions.pins import Pins
from shardlib.errors import PinError
from shardlib.graph import AttentionCalls, Problem
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.space import attention_strategies
from shardlib.planner.workload import Workload, mixes_positions, prepare
from shardlib.report.elements import bytes_text
from shardlib.report.text import reasons
from tests.planner import worlds
from tests.planner.worlds import with_memory


def deep() -> Workload:
    return worlds.prepared(
        worlds.layers, batch=8, seq=512, embed=1024, hidden=4096, heads=8, vocab=1024, depth=8
    )


@functools.cache
def function() -> Workload:
    """With attention that is called as a function."""
    return prepare(replace(deep().problem, functions=frozenset({"attention"})))


def experts() -> Workload:
    return worlds.prepared(worlds.experts)


#: Recipes of Megatron-LM (arXiv:2104.04473, section 5), of FSDP (arXiv:2304.11277) and of context
#: parallelism.
RECIPES = [
    {"mesh": {"data": 8}},
    {"mesh": {"fsdp": 8}, "zero": 3},
    {"mesh": {"tensor": 8}},
    {"mesh": {"stage": 2, "tensor": 4}, "microbatches": 8},
    {
        "mesh": {"stage": 4, "data": 2},
        "microbatches": 4,
        "schedule": "interleaved",
        "virtual_stages": 2,
    },
    {"mesh": {"fsdp": 4, "context": 2}, "zero": 3},
]


def plan(pin: dict[str, object], where: str = "h100:8", load: Workload | None = None) -> Plan:
    load = load or deep()
    return planner.search(load.problem, where, pin, workload=load)


@pytest.mark.long
@pytest.mark.parametrize("where", ["h100:8", "2*h100:4"])
def test_the_plan_is_never_worse_than_recipes(where: str) -> None:
    best = plan({}, where)
    assert best.search.gap == 0
    for recipe in RECIPES:
        assert best.estimate.step_seconds <= plan(recipe, where).estimate.step_seconds * (
            1 + 1e-9
        ), recipe


@pytest.mark.parametrize("pin", RECIPES)
def test_pinning_the_decisions_of_a_plan_gives_the_plan(pin: dict[str, object]) -> None:
    first = plan(pin)
    again = plan(first.decisions)
    assert again.decisions == first.decisions and again.estimate == first.estimate
    assert Plan.from_json(first.to_json()) == first


@pytest.mark.long
def test_no_schedule_means_no_stages() -> None:
    every = list(planner.ranked(deep().problem, "h100:4", {"schedule": "none"}, workload=deep()))
    assert len(every) > 10 and all(one.candidate.mesh["stage"] == 1 for one in every)
    assert {
        one.candidate.mesh["stage"]
        for one in planner.ranked(deep().problem, "h100:4", workload=deep())
    } > {1}


def test_a_bubble_is_that_of_its_schedule() -> None:
    """(S - 1) / m of the time of a full pipeline, and 1 / v of that interleaved (arXiv:2104.04473,
    section 2.2). What enters and leaves the stages is outside of the pipeline.
    """
    pin = {"mesh": {"stage": 4}, "microbatches": 4, "remat": "none"}
    plain, interleaved = (
        plan({**pin, **more}).estimate
        for more in ({"schedule": "1f1b"}, {"schedule": "interleaved", "virtual_stages": 2})
    )
    ends = sum(one.seconds for one in plain.collectives if one.kind != "collective-permute")
    busy = plain.seconds.compute + plain.seconds.exposed - ends
    assert plain.seconds.bubble == pytest.approx(busy * 3 / 4, rel=0.02)
    assert interleaved.seconds.bubble == pytest.approx(busy * 3 / 4 / 2, rel=0.1)


def test_layers_that_do_not_divide_make_the_fullest_stage_the_slowest() -> None:
    even, uneven = (
        plan({"mesh": {"stage": n}, "microbatches": 8, "remat": "none", "schedule": "1f1b"})
        for n in (4, 3)
    )
    assert (
        uneven.estimate.seconds.bubble > even.estimate.seconds.bubble * 2 / 3
    )  # 3 layers of 8 on two of three stages: 1/9 of all ticks more


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "kind"), [("h100:8", "cudnn"), ("v5e:2x4", "splash"), ("cpu:8", "traced")]
)
def test_attention_that_is_a_function_is_the_kernel_of_the_vendor(where: str, kind: str) -> None:
    load = prepare(function().problem, topology(where).chip.vendor)
    free, traced = (
        planner.search(load.problem, where, pin, workload=load)
        for pin in ({"mesh": {"fsdp": 8}}, {"mesh": {"fsdp": 8}, "attention": "traced"})
    )
    assert free.attention == kind
    assert free.decisions["attention"] == kind
    assert traced.attention == "traced"
    assert (free.estimate.device_bytes.peak < traced.estimate.device_bytes.peak) == (
        kind != "traced"
    )
    assert Plan.from_json(free.to_json()).attention == kind
    without = prepare(
        replace(load.problem, attention=AttentionCalls(without=((kind, "heads are odd"),))),
        topology(where).chip.vendor,
    )
    found = planner.search(without.problem, where, {"mesh": {"fsdp": 8}}, workload=without)
    assert found.attention in ("traced", "blocks")
    assert found.estimate.step_seconds <= traced.estimate.step_seconds


def test_tokens_go_to_their_experts_and_home() -> None:
    """Two all-to-alls a layer forward and two backward, of the tokens of a device (GShard,
    arXiv:2006.16668, section 3.2).
    """
    found = plan({"mesh": {"expert": 4}, "zero": 1, "microbatches": 1}, load=experts())
    mine = [c for c in found.estimate.collectives if c.kind == "all-to-all"]
    assert sum(c.count for c in mine) == 4 * 2 and {c.axes for c in mine} == {("expert",)}
    tokens = 4 * 512 * 1024 * 4 // 4
    assert all(
        tokens <= c.bytes <= 1.5 * tokens for c in mine
    )  # the busiest device has more than its share
    layouts = {p.path: p for p in found.parameters}
    assert "expert" in layouts["up"].compute.axes and found.experts == "dropless"
    whole = plan({"mesh": {"data": 4}, "microbatches": 1}, load=experts())
    assert found.estimate.device_bytes.parameters < whole.estimate.device_bytes.parameters / 3


def test_chunks_of_stages_are_stages() -> None:
    found = plan({"virtual_stages": 2, "zero": 0})
    assert found.virtual_stages == 2 and found.mesh["stage"] > 1


def test_a_pin_without_effect_is_said() -> None:
    pin = {"mesh.data": 8, "axis_order": ["tensor"]}
    (finding,) = [one for one in plan(pin).findings if one.code == "pin-without-effect"]
    assert finding.where == "axis_order" and finding.severity == "warning"
    used = plan({**pin, "mesh.data": 2, "mesh.tensor": 4})
    assert "pin-without-effect" not in {one.code for one in used.findings}


def test_memory_that_is_short_is_found_in_the_host() -> None:
    roomy = plan({"mesh": {"data": 8}, "remat": "full"})
    parts = roomy.estimate.device_bytes
    tight = with_memory(topology("h100:8"), parts.peak - parts.optimizer / 2)
    pin = {"mesh": {"data": 8}, "remat": "full", "microbatches": roomy.microbatches}
    found = planner.search(deep().problem, tight, pin, workload=deep())
    assert found.offload
    assert found.estimate.device_bytes.peak <= fitting_bytes(tight)
    assert found.estimate.step_seconds > roomy.estimate.step_seconds
    moved = found.estimate.offloaded
    assert moved is not None
    assert roomy.estimate.offloaded is None
    same = plan({**found.decisions, "offload": ["none"]})
    assert same.estimate.device_bytes.peak == pytest.approx(
        found.estimate.device_bytes.peak + moved.device_bytes, rel=1e-6
    )
    assert found.estimate.step_seconds - moved.seconds == pytest.approx(
        same.estimate.step_seconds, rel=1e-6
    )
    (why,) = [line for line in reasons(found, tight.chip.usable_bytes) if "Offloaded" in line]
    assert f"would need {bytes_text(same.estimate.device_bytes.peak)}, more than the" in why


@pytest.mark.long
def test_state_on_disk_is_priced_where_the_disk_is_known_and_never_chosen() -> None:
    """Both ways over a disk of 1 GB/s per device."""
    place = topology("h100:8")
    known = replace(place, chip=replace(place.chip, disk_bytes_per_s=1e9), name="with-disks")
    pin = {"mesh": {"data": 8}, "remat": "full", "microbatches": 1}
    roomy = plan(pin)
    unpriced = plan({**pin, "offload": ["disk"]})
    priced = planner.search(deep().problem, known, {**pin, "offload": ["disk"]}, workload=deep())
    state = roomy.estimate.device_bytes.optimizer
    assert "disk-rate" in [finding.code for finding in unpriced.findings]
    assert "disk-rate" not in [finding.code for finding in priced.findings]
    assert (
        unpriced.estimate.device_bytes.peak
        == priced.estimate.device_bytes.peak
        == pytest.approx(roomy.estimate.device_bytes.peak - state)
    )
    assert unpriced.estimate.step_seconds == pytest.approx(roomy.estimate.step_seconds)
    assert priced.estimate.step_seconds - roomy.estimate.step_seconds == pytest.approx(
        2 * state / 1e9
    )
    assert "optimizer state" in str(priced.explain())
    assert Plan.from_json(priced.to_json()) == priced
    tight = with_memory(known, 1.3 * priced.estimate.device_bytes.peak)
    best = planner.search(deep().problem, tight, {"offload": ["disk"]}, workload=deep())
    assert best.offload == ("disk",)
    assert best.estimate.device_bytes.peak <= fitting_bytes(tight)
    other = planner.search(
        deep().problem, tight, {**pin, "offload": ["optimizer"]}, workload=deep()
    )
    assert "disk" not in other.offload


@pytest.mark.parametrize(
    ("chip", "width", "kind"),
    [
        ("h100", 192, "cudnn"),
        ("a100", 192, "blocks"),
        ("a100", 128, "cudnn"),
        ("h100", 264, "blocks"),
    ],
)
def test_heads_that_a_chip_does_not_take_are_left_to_others(
    chip: str, width: int, kind: str
) -> None:
    problem = replace(function().problem, attention=AttentionCalls(width=width))
    first, *_ = attention_strategies(problem, Pins.parse({}), XLA, topology(f"{chip}:8").chip)
    assert first.decisions.attention == kind
    if kind == "blocks":
        with pytest.raises(
            PinError, match=rf"heads are {width} wide; the kernel takes \d+ on {chip}"
        ):
            attention_strategies(
                problem, Pins.parse({"attention": "cudnn"}), XLA, topology(f"{chip}:8").chip
            )


def along_context(way: str, load: Workload | None = None, remat: str = "none") -> Plan:
    """A plan of four parts of the sequence."""
    pin = {"mesh": {"context": 4}, "remat": remat, "zero": 1, "microbatches": 1}
    return plan({**pin, "context": way}, load=load)


def messages(found: Plan, kind: str) -> tuple[set[int], int]:
    """Sizes and number of the collectives of a kind along the context, without the update."""
    own = [
        c
        for c in found.estimate.collectives
        if c.kind == kind and c.axes == ("context",) and c.cause != "updated parameters"
    ]
    return {c.bytes for c in own}, sum(c.count for c in own)


#: Keys of eight layers: batch x seq x embed numbers in float32.
KEYS = 8 * 512 * 1024 * 4


@pytest.mark.long
def test_keys_and_values_are_gathered_along_the_context() -> None:
    """Forward and backward, of every layer; their gradients come back as reduce-scatters of the
    same arrays (arXiv:2310.01889). A ring holds less and is no slower.
    """
    found, ring = along_context("all-gather"), along_context("ring", function())
    sizes, _ = messages(found, "all-gather")
    assert KEYS in sizes
    gathers = [c for c in found.estimate.collectives if (c.kind, c.bytes) == ("all-gather", KEYS)]
    assert sum(c.count for c in gathers) == 2 * 8 * 2
    scatters = [
        c
        for c in found.estimate.collectives
        if (c.kind, c.axes, c.bytes) == ("reduce-scatter", ("context",), KEYS // 4)
    ]
    assert sum(c.count for c in scatters) == 2 * 8
    assert ring.estimate.device_bytes.peak < found.estimate.device_bytes.peak
    assert ring.estimate.step_seconds <= found.estimate.step_seconds


@pytest.mark.parametrize(
    ("way", "remat", "kind", "count"),
    [
        # three messages of a quarter around four devices, for every kernel, and for gradients in
        # float32 (arXiv:2310.01889); recomputed, they go around once more
        ("ring", "none", "collective-permute", 3 * 8 * 2 * 3),
        ("ring", "full", "collective-permute", 3 * 8 * 2 * 4),
        # queries, keys, values and results, and the gradients of all four (arXiv:2309.14509)
        ("ulysses", "none", "all-to-all", 8 * 8),
    ],
)
def test_what_a_sequence_in_parts_sends(way: str, remat: str, kind: str, count: int) -> None:
    found = along_context(way, function(), remat)
    assert messages(found, kind) == ({KEYS // 4}, count)
    for gathered in ("all-gather", "reduce-scatter"):
        assert messages(found, gathered)[1] == 0
    if way == "ulysses":
        assert found.attention == "cudnn"


def test_the_way_along_the_context_is_the_fastest() -> None:
    pin = {"mesh": {"context": 4, "data": 2}, "remat": "none"}
    each = {
        way: plan({**pin, "context": way}, load=function()).estimate.step_seconds
        for way in ("all-gather", "ring", "ulysses")
    }
    found = plan(pin, load=function())
    assert found.estimate.step_seconds == min(each.values())
    assert found.context == min(each, key=lambda way: each[way])


def positions(mix: Callable[[Any], Any]) -> Problem:
    """A matmul at every position, after what is done to the sequence."""

    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        return jnp.mean((mix(b["x"]) @ p["up"]) ** 2)

    return worlds.problem(
        loss,
        {"up": worlds.shape(512, 2048)},
        {"x": worlds.shape(64, 256, 512)},
        {"up": ("embed", "mlp")},
        {"x": ("batch", "seq", None)},
        remat={},
    )


@pytest.mark.parametrize(
    ("mix", "mixes"),
    [
        (lambda x: x, False),
        (lambda x: jax.nn.softmax(x, axis=-1) + 1, False),
        (lambda x: jnp.einsum("bqd,bkd,bke->bqe", x, x, x), True),
        (lambda x: jnp.cumsum(x, axis=1), True),
        (lambda x: x - jnp.mean(x, axis=1, keepdims=True), True),
        (lambda x: jnp.concatenate([x[:, :1], x[:, :-1]], axis=1), True),
    ],
    ids=["nothing", "features", "attention", "running sum", "mean", "shift"],
)
def test_a_context_axis_is_of_models_whose_positions_see_each_other(
    mix: Callable[[Any], Any], mixes: bool
) -> None:
    load = prepare(positions(mix))
    assert mixes_positions(load.problem, load.colouring) == mixes
    plan = worlds.planned("h100:8", None, load)
    meshes = [plan.mesh, *(each.mesh for each in plan.search.landscape)]
    assert mixes or {mesh["context"] for mesh in meshes} == {1}
    pinned = worlds.planned("h100:8", {"mesh.context": 2}, load)
    assert pinned.mesh["context"] == 2
