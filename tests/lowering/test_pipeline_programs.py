"""A pipeline whose stages are programs of their own: where its state is stored, what it refuses, and
how it is priced.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import PinError, PlanError
from shardlib.lowering.mesh import abstract_mesh
from shardlib.lowering.pipeline.per_stage import LayerSplit, StageMeshes, stage_programs
from tests.lowering import models
from tests.lowering.test_pipeline import PROGRAMS, program


@pytest.mark.long
def test_state_stays_where_one_program_keeps_it_and_is_donated():
    """Two steps, and an evaluation between them; layers rest on their stages in pieces."""
    p, lockstep = (
        program(
            {"stage": 2, "fsdp": 2}, 4, "1f1b", zero=3, optimizer=optax.adamw(1e-2), pipeline=how
        )
        for how in ("programs", "lockstep")
    )
    assert jax.tree.map(lambda leaf: leaf.sharding, p.state) == jax.tree.map(
        lambda leaf: leaf.sharding, lockstep.state
    )
    start = p.init(0)
    state, first = p.step(start, models.transformer_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start.params))
    between = p.evaluate(state, models.transformer_batch())
    state, second = p.step(state, models.transformer_batch())
    assert float(between["loss"]) == pytest.approx(float(second["loss"]), rel=1e-6)
    assert float(second["loss"]) < float(first["loss"])
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, p.state
    )
    assert {
        shard.data.shape for shard in state.params["layers"]["mlp"]["up"].addressable_shards
    } == {(2, 8, 32)}
    assert set(p.memory()) == {"arguments", "outputs", "aliased", "temporaries", "peak"}
    assert p.timeline().splitlines()[1].split()[:6] == ["stage", "1", "··", "F0", "B0", "F1"]


@pytest.mark.long
def test_a_stage_remembers_no_more_microbatches_than_its_order_says():
    """Four stages, eight microbatches, 1F1B: what is under way on stage s is never more than 4 -
    s.
    """
    p = program({"stage": 4}, 8, "1f1b", **PROGRAMS)
    held, most = [0] * 4, [0] * 4
    for stage, task in p._stage_step.tasks:
        held[stage] += 1 if task.kind == "forward" else -1
        most[stage] = max(most[stage], held[stage])
    assert most == [4, 3, 2, 1]


def test_every_layer_is_in_one_chunk():
    for layers in (1, 2, 5, 7, 12):
        for stages in range(1, 5):
            for virtual in range(1, 4):
                if stages * virtual <= layers:
                    layer_split = LayerSplit(layers=layers, stages=stages, virtual=virtual)
                    stack = np.arange(layers)
                    chunks = layer_split.chunk_stacks(stack)
                    np.testing.assert_array_equal(layer_split.layer_stack(chunks), stack)
                    assert (
                        sum(layer_split.counts) == layers
                        and max(layer_split.counts) - min(layer_split.counts) <= 1
                    )


def test_stages_share_buffers_with_the_arrays_of_all_devices():
    p = program({"stage": 2, "fsdp": 2}, 4, "1f1b", zero=3, **PROGRAMS)
    places, stack = StageMeshes.of(p.mesh), p.init(0).params["layers"]["mlp"]["up"]
    pieces = places.split(stack)
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(piece) for piece in pieces]), np.asarray(stack)
    )
    addresses = {
        shard.device: shard.data.unsafe_buffer_pointer() for shard in stack.addressable_shards
    }
    assert {
        shard.device: shard.data.unsafe_buffer_pointer()
        for piece in pieces
        for shard in piece.addressable_shards
    } == addresses
    joined = places.join(pieces)
    assert joined.sharding == stack.sharding
    assert {
        shard.device: shard.data.unsafe_buffer_pointer() for shard in joined.addressable_shards
    } == addresses


def test_what_is_no_single_program():
    p = program({"stage": 2}, 4, "1f1b", **PROGRAMS)
    for ask in (p.compiled, p.lower, p.step_function):
        with pytest.raises(PlanError, match="is not a single program\nTry: pipeline='lockstep'"):
            ask()


def test_what_is_refused():
    with pytest.raises(
        PlanError, match="cannot follow the plan: the schedule 'gpipe' has one chunk a stage, not 2"
    ):
        program({"stage": 2}, 4, "gpipe", 2, **PROGRAMS)
    with pytest.raises(PinError, match="pipeline='programs' has no stages that work breadth first"):
        shardlib.plan(
            models.Transformer,
            models.transformer_loss,
            optax.sgd(1e-2),
            models.transformer_batch(16),
            topology="cpu:4",
            pin={**PROGRAMS, "schedule": "gpipe", "virtual_stages": 2},
        )
    with pytest.raises(
        PinError, match="'programs' is for the stages of a pipeline, and there are none"
    ):
        shardlib.compile(
            models.Transformer,
            models.transformer_loss,
            optax.sgd(1.0),
            models.transformer_batch(16),
            topology="cpu:2",
            pin={"mesh": {"data": 2}, **PROGRAMS},
        )


def test_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch):
    p = program({"stage": 2}, 4, "1f1b", **PROGRAMS)
    with pytest.raises(
        PlanError, match="runs from one process that has all devices, and there are none here"
    ):
        stage_programs(
            p.plan,
            p.programs.whole_mesh.pipeline,
            abstract_mesh(p.plan),
            p.parts.param_shardings,
            None,
            {},
        )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PlanError, match="that has all devices, and there are 2 processes"):
        stage_programs(
            p.plan, p.programs.whole_mesh.pipeline, p.mesh, p.parts.param_shardings, None, {}
        )


def test_the_planner_prices_stages_that_wait_for_nothing_but_their_neighbours():
    def planned(**pin):
        return shardlib.plan(
            models.Transformer,
            models.transformer_loss,
            optax.sgd(1.0),
            models.transformer_batch(16),
            topology="cpu:4",
            pin={"mesh": {"stage": 4}, "microbatches": 8, "schedule": "zero-bubble", **pin},
        )

    free, lockstep = planned(**PROGRAMS), planned()
    assert (free.pipeline, lockstep.pipeline) == ("programs", "lockstep")
    assert (
        free.estimate.step_seconds < lockstep.estimate.step_seconds
        and free.estimate.device_bytes.peak < lockstep.estimate.device_bytes.peak
    )
    assert "stages are programs of their own" in free.explain() and "each stage on its own" in str(
        free.timeline()
    )


@pytest.mark.long
def test_interleaved_programs_are_planned_with_whole_groups_of_microbatches_alone():
    def planned(**pin):
        return shardlib.plan(
            models.Transformer,
            models.transformer_loss,
            optax.sgd(1e-2),
            models.transformer_batch(24),
            topology="cpu:4",
            pin={"mesh": {"stage": 4}, "schedule": "1f1b", **pin},
        )

    looped = {
        "mesh": {"stage": 2, "data": 2},
        "schedule": "interleaved",
        "virtual_stages": 2,
        "microbatches": 3,
    }
    assert (
        planned(**looped).microbatches == 3
    )  # in lockstep, a group that is not full takes the time of a full one
    with pytest.raises(
        PinError,
        match="interleaves whole groups of 2 microbatches, one for each stage, and 3 go through",
    ):
        planned(**looped, **PROGRAMS)
    assert planned(**{**looped, "microbatches": 4}, **PROGRAMS).pipeline == "programs"
