"""What a framework profile changes in the price of a plan."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.framework import XLA, FrameworkProfile, framework_profile
from shardlib.graph import Problem
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan, source_of
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds


def world() -> Problem:
    return worlds.made(worlds.layers, depth=8, vocab=512)


PIPELINE: dict[str, Any] = {
    "mesh": {"stage": 4},
    "microbatches": 8,
    "schedule": "1f1b",
    "remat": "none",
}
SHARDED: dict[str, Any] = {"mesh": {"fsdp": 4}, "zero": 1, "microbatches": 4, "remat": "none"}


@functools.cache
def _load(software: FrameworkProfile) -> Workload:
    return prepare(world(), "nvidia", software)


def _plan(pins: dict[str, Any], where: str = "4*h100:1", **facts: Any) -> Plan:
    software = replace(XLA, name="test", **facts) if facts else XLA
    return planner.search(world(), topology(where), pins, workload=_load(software))


@pytest.mark.long
def test_a_stack_is_given_by_name_or_taken_from_the_load() -> None:
    named = planner.search(world(), "h100:4", SHARDED, profile="megatron-core")
    loaded = planner.search(
        world(), "h100:4", SHARDED, workload=_load(framework_profile("megatron-core"))
    )
    assert named.estimate == loaded.estimate != _plan(SHARDED, "h100:4").estimate
    assert (
        planner.search(
            world(),
            "h100:4",
            SHARDED,
            workload=_load(framework_profile("megatron-core")),
            profile="xla",
        ).estimate
        == _plan(SHARDED, "h100:4").estimate
    )


@pytest.mark.long
def test_asking_a_plan_again_keeps_its_stack() -> None:
    plan = planner.search(world(), "h100:4", SHARDED, profile="megatron-core")
    assert source_of(plan).why_not(SHARDED).estimate == plan.estimate


@pytest.mark.long
def test_ends_with_their_owners_are_slower_than_spread() -> None:
    spread = _plan(PIPELINE, embedding_and_head="spread")
    owners = _plan(PIPELINE, embedding_and_head="owners")
    assert owners.estimate.seconds.bubble > spread.estimate.seconds.bubble
    assert owners.estimate.seconds.compute == spread.estimate.seconds.compute
    assert (
        owners.estimate.device_bytes.parameters < spread.estimate.device_bytes.parameters
    )  # one of the two ends, of which every stage has both where they are spread


@pytest.mark.long
def test_a_stage_without_its_last_layer_has_time_for_the_head() -> None:
    uneven = worlds.layers(depth=7, vocab=512)
    even = planner.search(
        world(),
        topology("4*h100:1"),
        PIPELINE,
        workload=_load(replace(XLA, name="test", embedding_and_head="owners")),
    )
    seven = planner.search(
        uneven,
        topology("4*h100:1"),
        PIPELINE,
        profile=replace(XLA, name="test", embedding_and_head="owners"),
    )
    assert seven.estimate.step_seconds < even.estimate.step_seconds


@pytest.mark.long
def test_asynchronous_stages_hold_fewer_microbatches() -> None:
    lockstep, free = _plan(PIPELINE, pipeline="lockstep"), _plan(PIPELINE, pipeline="asynchronous")
    assert (
        free.estimate.device_bytes.activations < 0.7 * lockstep.estimate.device_bytes.activations
    )  # 4 against 7 microbatches
    ours, theirs = lockstep.estimate.seconds, free.estimate.seconds
    assert ours.compute == theirs.compute and ours.bubble == pytest.approx(theirs.bubble)
    # In one program all stages take part in what enters and leaves.
    ends = [one for one in lockstep.estimate.collectives if one.cause.endswith("of the stages")]
    assert ends and not any(one in free.estimate.collectives for one in ends)
    assert ours.exposed > theirs.exposed


def test_gradients_are_reduced_once_a_step() -> None:
    often = _plan(SHARDED, gather_overlap=0.0, reduce_overlap=0.0, reduction="microbatch")
    once = _plan(SHARDED, gather_overlap=0.0, reduce_overlap=0.0, reduction="step")
    assert once.estimate.seconds.exposed < often.estimate.seconds.exposed / 2
    scattered = sum(
        c.bytes * 4 * c.count for c in once.estimate.collectives if c.kind == "reduce-scatter"
    )
    reduced = sum(
        c.bytes * c.count
        for c in often.estimate.collectives
        if c.kind == "all-reduce" and c.bytes > 4096
    )
    assert scattered == pytest.approx(reduced / 4, rel=0.01), (
        "every gradient once, in pieces, and not whole in each of four microbatches"
    )


def test_gradients_on_the_wire_have_the_dtype_of_the_stack() -> None:
    none = {"gather_overlap": 0.0, "reduce_overlap": 0.0, "reduction": "step"}
    full = _plan({**SHARDED, "mesh": {"data": 4}, "zero": 0}, **none)
    half = _plan({**SHARDED, "mesh": {"data": 4}, "zero": 0}, **none, reduction_dtype="bfloat16")
    assert half.estimate.seconds.exposed == pytest.approx(
        full.estimate.seconds.exposed / 2, rel=0.1
    )  # beside them, small sums that compute waits for


@pytest.mark.long
def test_hidden_shares_shorten_what_compute_waits_for() -> None:
    tensor: dict[str, Any] = {"mesh": {"tensor": 4}, "microbatches": 1, "remat": "none"}
    assert _plan(tensor, tensor_overlap=0.5).estimate.seconds.exposed == pytest.approx(
        _plan(tensor, tensor_overlap=0.0).estimate.seconds.exposed / 2, rel=0.2
    )
    sends, hidden = _plan(PIPELINE, send_overlap=0.0), _plan(PIPELINE, send_overlap=1.0)
    assert hidden.estimate.step_seconds < sends.estimate.step_seconds


@pytest.mark.long
def test_memory_of_state_gradients_and_runtime() -> None:
    plain = _plan(SHARDED)
    count = sum(math.prod(p.shape) for p in world().parameters)
    assert _plan(SHARDED, state_bytes=16.0).estimate.device_bytes.optimizer == pytest.approx(
        2 * plain.estimate.device_bytes.optimizer
    )
    kept = _plan({**SHARDED, "microbatches": 1}, gradient_buffer=True, gradient_dtype="bfloat16")
    assert kept.estimate.device_bytes.gradients == pytest.approx(2 * count, rel=0.01)
    runtime = _plan(SHARDED, runtime_bytes=1 << 30)
    assert runtime.estimate.device_bytes.peak == pytest.approx(
        plain.estimate.device_bytes.peak + (1 << 30), rel=1e-9
    )
    assert _plan(SHARDED, fragmentation=1.5).estimate.device_bytes.peak == pytest.approx(
        1.5 * plain.estimate.device_bytes.peak, rel=1e-6
    )


def test_links_are_as_fast_as_the_stack_reaches() -> None:
    slow = replace(topology("4*h100:1"), efficiency={"slow": 0.5})
    pins = {"mesh": {"data": 4}, "microbatches": 1, "remat": "none"}
    software = replace(XLA, name="test", gather_overlap=0.0, reduce_overlap=0.0)
    full, half = (
        planner.search(world(), place, pins, workload=_load(software)).estimate.seconds
        for place in (topology("4*h100:1"), slow)
    )
    gradients = 4 * sum(math.prod(p.shape) for p in world().parameters)
    assert half.exposed - full.exposed == pytest.approx(
        2 * 3 / 4 * gradients / (50e9 * 0.9), rel=0.02
    )
    assert half.compute == full.compute


def test_fixed_seconds_of_microbatches() -> None:
    slow = replace(topology("4*h100:1"), efficiency={"microbatch_s": 0.01})
    assert planner.search(
        world(), slow, PIPELINE, workload=_load(XLA)
    ).estimate.seconds.overhead == pytest.approx(1e-3 + 0.01 * (8 + 3))
