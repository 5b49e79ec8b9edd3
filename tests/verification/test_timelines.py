"""Timelines of running pipelines: every tick is found, on every stage, in the order of the
schedule.
"""

from __future__ import annotations

import itertools

import pytest

from shardlib.errors import VerificationError
from shardlib.report.timelines import BOTH, IDLE, work
from shardlib.schedules import BACKWARD, FORWARD, Timetable
from shardlib.verification import timelines
from shardlib.verification.hlo import parse
from shardlib.verification.timelines import Event, measure_timeline, stage_devices
from tests.lowering import models
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
