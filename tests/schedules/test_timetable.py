"""Schedules keep the order that the computation needs, forget nothing too early, and take the time
of the ideal schedule.
"""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from shardlib import schedules
from shardlib.schedules import Pipelines, Timetable, named

TABLES = [
    Timetable(schedule=schedule, stages=stages, microbatches=micro, virtual=virtual)
    for schedule, chunks in (
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("zero-bubble", (1,)),
        ("interleaved", (2, 3)),
    )
    for virtual in chunks
    for stages in (2, 3, 4, 8)
    for micro in (1, stages, stages + 1, 2 * stages, 4 * stages)
    if virtual == 1 or micro >= stages
]

SCHEDULES = sorted({table.schedule for table in TABLES})


def tables_of(schedule):
    """The timetables of a schedule."""
    return [table for table in TABLES if table.schedule == schedule]


def ticks_of(table, direction):
    """(microbatch, chunk, stage) -> tick; every piece of work is done once."""
    found = {}
    for stage in range(table.stages):
        for tick in range(table.ticks):
            micro, chunk, works = getattr(table, direction)(tick, stage)
            assert 0 <= micro < table.microbatches and 0 <= chunk < table.virtual
            if works:
                assert (micro, chunk, stage) not in found
                found[micro, chunk, stage] = tick
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_microbatch_passes_every_chunk_in_order_one_tick_after_another(schedule):
    for table in tables_of(schedule):
        _passes_every_chunk_in_order(table)


def _passes_every_chunk_in_order(table):
    forward, backward = ticks_of(table, "forward"), ticks_of(table, "backward")
    assert len(forward) == len(backward) == table.microbatches * table.virtual * table.stages
    for (micro, chunk, stage), tick in forward.items():
        after = (micro, chunk, stage + 1) if stage + 1 < table.stages else (micro, chunk + 1, 0)
        assert tick < table.forward_ticks and table.turn <= backward[micro, chunk, stage]
        if (
            after in forward
            # what hops to the neighbour is used in the next tick, and what comes back was made in
            # the one before
        ):
            assert (forward[after], backward[after]) == (
                tick + 1,
                backward[micro, chunk, stage] - 1,
            )
        else:
            assert backward[micro, chunk, stage] >= tick


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_stage_remembers_is_there_when_it_goes_back(schedule):
    for table in tables_of(schedule):
        _remembers_what_goes_back(table)


def _remembers_what_goes_back(table):
    for stage in range(table.stages):
        slots = {}
        for tick in range(table.ticks):
            if tick < table.forward_ticks:
                slots[table.forward_slot(tick, stage)] = table.forward(tick, stage)
            micro, chunk, works = table.backward(tick, stage)
            if works:
                assert slots[table.backward_slot(tick, stage)] == (micro, chunk, True)


def test_what_is_put_off_is_there_when_gradients_of_weights_are_made():
    split = [table for table in TABLES if table.split]
    assert split
    for table in split:
        _has_what_is_put_off(table)


def _has_what_is_put_off(table):
    done = []
    for stage in range(table.stages):
        slots, places = {}, {}
        for tick in range(
            table.ticks
        ):  # in a tick forward work comes first, then backward work, then gradients of weights
            if tick < table.forward_ticks:
                slots[table.forward_slot(tick, stage)] = table.forward(tick, stage)
            if tick >= table.turn:
                places[table.passing_slot(tick, stage)] = table.backward(tick, stage)
            micro, chunk, works = table.weights(tick)
            if works and tick >= table.weights_turn:
                assert (
                    slots[table.weights_slot(tick)]
                    == places[table.passed_slot(tick)]
                    == (micro, chunk, True)
                )
                done.append((micro, stage))
    assert sorted(done) == [
        (micro, stage) for micro in range(table.microbatches) for stage in range(table.stages)
    ]


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_zero_bubble_saves_the_gradients_of_weights_of_the_bubble(stages, micro):
    seconds = {"forward": 1.0, "backward": 2.0, "weights": 4.0}
    table = Timetable(schedule="zero-bubble", stages=stages, microbatches=micro)
    step = sum(
        (stop - start) * sum(seconds[kind] for kind in kinds) for start, stop, kinds in table.phases
    )
    shape = Pipelines.one(stages=stages, microbatches=micro, lockstep=True)
    wait = named("zero-bubble").waiting(shape, np.array([7.0]), np.array([4.0]))[0]
    assert step == pytest.approx(micro * 7.0 + wait)
    plain = Timetable(schedule="1f1b", stages=stages, microbatches=micro)
    whole = {"forward": 1.0, "backward": 6.0}
    assert step == sum(
        (stop - start) * sum(whole[kind] for kind in kinds) for start, stop, kinds in plain.phases
    ) - 4.0 * (stages - 1)


@pytest.mark.parametrize(
    ("stages", "micro", "virtual"), [(4, 8, 1), (4, 8, 2), (8, 32, 3), (2, 2, 1)]
)
def test_the_time_is_that_of_the_ideal_schedule(stages, micro, virtual):
    table = Timetable(
        schedule="interleaved" if virtual > 1 else "1f1b",
        stages=stages,
        microbatches=micro,
        virtual=virtual,
    )
    forward, backward = 1.0, 2.0  # of all layers of a stage
    both = table.forward_ticks - table.turn
    seconds = (table.turn * (forward + backward) + both * (forward + backward)) / virtual
    assert seconds == pytest.approx(
        (micro + (stages - 1) / virtual) * (forward + backward)
    )  # arXiv:2104.04473, section 2.2.2
    assert table.slots == min(
        2 * virtual * stages - 1, table.forward_ticks
    )  # however many microbatches there are


def test_a_picture_shows_who_does_what_when():
    assert doctest.testmod(schedules).failed == 0 < doctest.testmod(schedules).attempted
    lines = schedules.text(
        Timetable(schedule="interleaved", stages=2, microbatches=2, virtual=2)
    ).splitlines()
    assert lines[1].split() == ["stage", "0", ">", "a0", "a1", "b0", "b1", "·", "·", "·", "·"]
    assert lines[4].split() == ["<", "·", "·", "·", "b0", "b1", "a0", "a1", "·"]
