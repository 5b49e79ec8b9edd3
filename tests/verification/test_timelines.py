"""Timelines of running pipelines: every tick is found, on every stage, in the order of the
schedule.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import MissingFileError, VerificationError
from shardlib.layout import MeshShape
from shardlib.report.timelines import BOTH, IDLE, work
from shardlib.schedules import BACKWARD, FORWARD, Timetable
from shardlib.verification import timelines
from shardlib.verification.hlo import parse
from shardlib.verification.timelines import (
    Event,
    measure_timeline,
    newest_profile,
    recorded_steps,
    stage_devices,
)
from shardlib.verification.traffic import scheduled
from tests.lowering import models, small
from tests.lowering.test_pipeline import program


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "micro", "schedule", "virtual", "groups"),
    [
        ({"stage": 2}, 2, "1f1b", 1, 1),
        ({"stage": 4, "fsdp": 2}, 8, "1f1b", 1, 1),
        ({"stage": 2, "data": 2}, 8, "interleaved", 2, 2),
        ({"stage": 3}, 4, "zero-bubble", 1, 1),
        ({"stage": 2}, 4, "gpipe", 1, 1),
    ],
    ids=str,
)
def test_every_tick_of_a_step_is_measured(
    mesh: dict[str, int], micro: int, schedule: str, virtual: int, groups: int
) -> None:
    built = program(mesh, micro, schedule, virtual, accumulation=groups)
    line, state = measure_timeline(built, built.init(0), models.transformer_batch())
    table = Timetable(
        schedule=schedule, stages=mesh["stage"], microbatches=micro // groups, virtual=virtual
    )
    assert int(state.step) == 2 and line.name == "measured" and line.stages == table.stages
    kinds = [kinds for begin, end, kinds in table.phases for _ in range(begin, end)]
    for stage in range(line.stages):
        mine = line.of(stage)
        assert [one.label for one in mine] == [
            "·".join(
                label for _, label in work(table, tick, stage, kinds[tick], group * micro // groups)
            )
            for group in range(groups)
            for tick in range(table.ticks)
        ]
        assert all(one.seconds >= 0 for one in mine) and all(
            a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine)
        )
        assert sum(one.seconds for one in mine) > 0.05 * line.seconds
        assert next(one.kind for one in mine) == (FORWARD if stage == 0 else IDLE)
    if schedule == "1f1b":
        assert {one.kind for one in line.slices} == {FORWARD, BACKWARD, BOTH, IDLE}
    assert 0 < line.bubble < 1 and 0 < line.seconds < line.step_seconds < 60
    assert dict(line.beside).keys() == {"before the ticks", "after the ticks"} and all(
        seconds >= 0 for _, seconds in line.beside
    )


def test_the_first_device_of_every_stage_is_looked_at() -> None:
    built = program({"stage": 2, "fsdp": 2}, 4, "1f1b")
    assert stage_devices(built.mesh) == [
        int(built.mesh.devices.reshape(2, 2)[stage, 0].id) for stage in range(2)
    ]


def test_programs_without_stages_have_no_timeline() -> None:
    built = program({"fsdp": 2}, 1, "none")
    with pytest.raises(VerificationError, match="no pipeline stages to measure"):
        measure_timeline(built, built.init(0), models.transformer_batch())


HLO = """HloModule step, is_scheduled=true

%first (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %mul.1 = f32[4]{0} multiply(%p, %p)
  ROOT %hop.1 = f32[4]{0} collective-permute(%mul.1), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/while/body/shard_map/shardlib-hop-forward/ppermute"}
}

%second (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  %hop.2 = f32[4]{0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/while/body/shard_map/shardlib-hop-forward/ppermute"}
  ROOT %hop.3 = f32[4]{0} collective-permute(%hop.2), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/while/body/shard_map/shardlib-hop-backward/ppermute"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %last.1 = f32[4]{0} negate(%x), metadata={op_name="jit(step)/while/body/shard_map/neg"}
}
"""
TABLE = Timetable(
    schedule="1f1b", stages=2, microbatches=1
)  # forward; forward and backward; backward


def happened(*events: tuple[str, float, float]) -> list[Event]:
    return [Event(name=name, start=start, end=end) for name, start, end in events]


def test_a_tick_ends_with_its_last_hop_and_works_until_that_begins() -> None:
    one = happened(
        ("x", 0, 1),
        ("mul.1", 1, 3),
        ("hop.1", 3, 4),
        ("hop.2", 6, 7),
        ("hop.3", 8, 9),
        ("last.1", 9, 12),
        ("out", 12, 13),
    )
    two = happened(
        ("x", 0, 1),
        ("mul.1", 1.5, 2),
        ("hop.1", 2, 4),
        ("hop.2", 6, 7),
        ("hop.3", 7, 9),
        ("last.1", 9, 11),
        ("out", 12, 13),
    )
    line = timelines.timeline(TABLE, parse(HLO), [one, two], title="it")
    assert [(s.stage, s.kind, s.label, s.start, s.seconds) for s in line.slices] == [
        (0, FORWARD, "0", 0, 2),
        (0, IDLE, "", 3, 4),
        (0, BACKWARD, "0", 8, 3),
        (1, IDLE, "", 0.5, 0.5),
        (1, BOTH, "0·0", 3, 3),
        (1, IDLE, "", 8, 2),
    ]
    assert (line.seconds, line.beside, line.step_seconds, line.title) == (
        11,
        (("before the ticks", 1), ("after the ticks", 1)),
        13,
        "it",
    )
    assert line.bubble == pytest.approx(1 - 8 / 22)


def test_a_profile_that_lacks_ticks_is_refused() -> None:
    events = happened(("mul.1", 1, 3), ("hop.2", 6, 7), ("hop.3", 8, 9))
    timelines.timeline(
        TABLE, parse(HLO), [events] * 2, title=""
    )  # the last tick of each direction may hand nothing on
    with pytest.raises(
        VerificationError,
        match=(
            "stage 0 does not show its ticks: 0 messages forward for 2 ticks, 1 messages backward"
            " for 2 ticks"
        ),
    ):
        timelines.timeline(TABLE, parse(HLO), [events[:1] + events[2:]] * 2, title="")


# The steps of a plan in a profile of JAX: those that XLA's own converter finds there.

STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    """A program, and the folder of a run that has recorded three steps of it."""
    program = small.program(optax.sgd(0.1), {"mesh": {"data": 2, "tensor": 4}})
    run = tmp_path_factory.mktemp("run")
    state = jax.block_until_ready(program.step(program.init(0), small.batch())[0])
    with jax.profiler.trace(run / "profiles" / "step-6"):
        for _ in range(STEPS):
            state, _ = program.step(state, small.batch())
        jax.block_until_ready(state)
    return program, run


def converted(run: Path) -> dict[str, list[float]]:
    """Microseconds of every instruction in the trace that XLA's converter wrote of the profile."""
    (path,) = run.rglob("*.trace.json.gz")
    found = defaultdict(list)
    for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if "hlo_op" in one.get("args", {}) and "shardlib_step" in one["args"]["hlo_module"]:
            found[one["args"]["hlo_op"]].append(one["dur"])
    return found


@pytest.mark.long
def test_operations_are_those_of_the_converter(recorded):
    program, run = recorded
    steps = recorded_steps(newest_profile(run), program.plan.digest)
    assert [step.name for step in steps] == ["step 6", "step 7", "step 8"]
    assert all(one.start < other.start for one, other in pairwise(steps))
    mine = defaultdict(list)
    for step in steps:
        assert {one.device for one in step.operations} == set(range(8))
        for one in step.operations:
            mine[one.name].append(one.seconds * 1e6)
    theirs = converted(run)
    collectives = [name for name in theirs if name.startswith(("all-reduce", "all-gather"))]
    assert collectives
    for name in collectives:
        assert sorted(mine[name]) == pytest.approx(sorted(theirs[name]), abs=0.002)


@pytest.mark.long
def test_steps_without_numbers_are_parted_where_they_begin(recorded, monkeypatch):
    from shardlib import _jax_compat

    program, run = recorded
    profile = newest_profile(run)
    wanted = [len(step.operations) for step in recorded_steps(profile, program.plan.digest)]
    read = _jax_compat.profile_events

    def without(content: bytes):
        return [
            (*event, {name: value for name, value in stats.items() if name != "run_id"})
            for *event, stats in read(content)
        ]

    monkeypatch.setattr(_jax_compat, "profile_events", without)
    found = recorded_steps(profile, program.plan.digest)
    assert len(found) == STEPS
    assert [len(step.operations) for step in found] == wanted


def test_what_is_no_profile_of_the_plan_is_said(recorded, tmp_path: Path):
    program, run = recorded
    with pytest.raises(VerificationError, match=rf"shows: {program.plan.digest}\nTry: the plan"):
        recorded_steps(newest_profile(run), "0123456789ab")
    with pytest.raises(MissingFileError, match="has no profile"):
        newest_profile(tmp_path)
    other = tmp_path / "a.xplane.pb"
    other.write_bytes(b"nothing of the kind" + os.urandom(64))
    with pytest.raises(VerificationError, match="is not a profile of JAX"):
        recorded_steps(newest_profile(tmp_path), program.plan.digest)


# Which collectives of a schedule hide behind matmuls, and options of the compiler.

MESH = MeshShape(data=2, tensor=4)
TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%multiplied (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%added (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%c, %c)
}

ENTRY %main (p: f32[8,8], q: f32[2,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[2,8]{1,0} parameter(1)
  %sent = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, metadata={op_name="first"}
  %fused = f32[8,8]{1,0} fusion(%p, %p), kind=kOutput, calls=%multiplied, backend_config={"estimated_cycles":"70"}
  %again = f32[8,8]{1,0} fusion(%fused), kind=kLoop, calls=%added, backend_config={"estimated_cycles":"5"}
  %came = f32[8,8]{1,0} collective-permute-done(%sent)
  %gathering = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%q), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %between = f32[8,8]{1,0} fusion(%came), kind=kLoop, calls=%added
  %gathered = f32[8,8]{1,0} all-gather-done(%gathering)
  %last = f32[8,8]{1,0} custom-call(%gathered, %between), custom_call_target="__cublas$gemm"
  ROOT %reduced = f32[8,8]{1,0} all-reduce(%last), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%added
}
"""


def test_what_stands_between_start_and_done():
    sent, gathered, reduced = scheduled(TEXT, MESH)
    assert (
        sent.kind,
        sent.axes,
        sent.bytes,
        sent.split,
        sent.matmuls,
        sent.cycles,
        sent.operation,
    ) == ("collective-permute", ("tensor",), 256, True, 1, 75, "first")
    assert (gathered.kind, gathered.axes, gathered.bytes, gathered.split, gathered.matmuls) == (
        "all-gather",
        ("tensor",),
        256,
        True,
        0,
    )
    assert (reduced.kind, reduced.axes, reduced.split, reduced.matmuls) == (
        "all-reduce",
        ("data",),
        False,
        0,
    )


@pytest.mark.long
def test_options_reach_the_compiler():
    init = shardlib.tree(lambda key: {"w": jax.random.normal(key, (8, 4))}, {"w": ("embed", "mlp")})
    batch = {"x": jax.ShapeDtypeStruct((4, 8), np.float32)}
    given = {"topology": "cpu:2", "pin": {"mesh": {"data": 2}}}
    refused = shardlib.verify(
        init,
        lambda w, data: jnp.mean((data["x"] @ w["w"]) ** 2),
        optax.sgd(0.1),
        batch,
        **given,
        options={"xla_no_such_option": True},
    )
    assert refused.compiled is None and [one.code for one in refused.findings] == ["compile-error"]
    assert "xla_no_such_option" in refused.findings[0].message
    taken = shardlib.verify(
        init,
        lambda w, data: jnp.mean((data["x"] @ w["w"]) ** 2),
        optax.sgd(0.1),
        batch,
        **given,
        options={"xla_cpu_enable_fast_math": True},
    )
    assert taken.ok and taken.compiled is not None
    assert {(one.kind, one.axes) for one in taken.compiled.scheduled} == {
        (one.kind, one.axes) for one in taken.compiled.collectives
    }
