"""A trace of a step: the prediction beside what was measured, on one axis, nothing on top of
anything else.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.report.timelines import MeasuredStep, Operation, step_trace
from tests.planner import worlds
from tests.planner.fixture_plan import PLAN


def operation(name: str, start: float, seconds: float, device: int = 0) -> Operation:
    return Operation(device=device, name=name, start=start, seconds=seconds)


STEPS = tuple(
    MeasuredStep(
        name=f"step {number}",
        start=at,
        seconds=PLAN.estimate.step_seconds * 1.5,
        operations=(
            operation("fusion.1", at, 0.25),
            operation("while.2", at + 0.1, 0.3),  # at the same time
            operation("all-gather.3", at + 0.25, 0.5),
            operation("fusion.1", at + 0.125, 0.25, device=1),
        ),
    )
    for number, at in ((6, 100.0), (7, 100.0 + PLAN.estimate.step_seconds * 2))
)


def tracks(text: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The events of every thread by the names of process and thread."""
    found = json.loads(text)["traceEvents"]
    for one in found:  # of "Trace Event Format" (Google, catapult), the events that stand here
        if one["ph"] == "X":
            assert min(one["ts"], one["dur"]) >= 0
            assert isinstance(one["pid"], int) and isinstance(one["tid"], int)
        else:
            assert one["ph"] == "M"
            assert re.fullmatch("(process|thread)_(name|sort_index)", one["name"])
            assert "args" in one
    names = {
        (one["pid"], one.get("tid")): one["args"]["name"]
        for one in found
        if one["name"] in ("process_name", "thread_name")
    }
    made = defaultdict(list)
    for one in found:
        if one["ph"] == "X":
            made[names[one["pid"], None], names[one["pid"], one["tid"]], one["tid"]].append(one)
    for events in made.values():  # no event begins before the one in front is over
        ordered = sorted(events, key=lambda one: one["ts"])
        for one, after in pairwise(ordered):
            assert one["ts"] + one["dur"] < after["ts"]
    joined = defaultdict(list)
    for (process, thread, _), events in made.items():
        joined[process, thread] += events
    return joined


def test_a_prediction_adds_up_to_its_step():
    found = tracks(step_trace(PLAN))["predicted", "per device"]
    seconds = PLAN.estimate.seconds
    assert sum(one["dur"] for one in found) == pytest.approx(seconds.total * 1e6)
    assert found[0]["name"] == "compute"
    assert found[0]["dur"] == pytest.approx(seconds.compute * 1e6)


def test_prediction_and_measurement_begin_together():
    found = tracks(step_trace(PLAN, STEPS))
    starts = [one["ts"] for one in found["measured, device 0", "steps"]]
    assert starts[0] == 0
    assert starts[1] == pytest.approx(PLAN.estimate.step_seconds * 2e6)
    predicted = [one["ts"] for one in found["predicted", "per device"] if one["name"] == "compute"]
    assert predicted == pytest.approx(starts)
    (first, second) = found["measured, device 0", "collectives"]
    assert (first["ts"], first["name"]) == (pytest.approx(0.25e6), "all-gather.3")
    assert second["ts"] - starts[1] == pytest.approx(0.25e6)
    assert len(found["measured, device 0", "computation"]) == 4
    assert len(found["measured, device 1", "computation"]) == 2


def test_a_prediction_stands_only_where_it_has_room():
    near = [
        MeasuredStep(
            name=f"step {number}",
            start=at,
            seconds=0.001,
            operations=(operation("fusion.1", at, 0.001),),
        )
        for number, at in ((6, 100.0), (7, 100.002))
    ]
    found = tracks(step_trace(PLAN, near))["predicted", "per device"]
    assert [one["ts"] for one in found if one["name"] == "compute"] == [0]


def test_stages_stand_beside_it():
    plan = planner.search(
        worlds.layers(), topology("h100:4"), {"mesh": {"stage": 4}, "microbatches": 8}
    )
    timeline = plan.timeline()
    found = tracks(step_trace(plan, pipeline=timeline))
    for stage in range(4):
        assert len(found["predicted stages", f"stage {stage}"]) == len(timeline.of(stage))
