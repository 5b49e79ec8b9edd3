"""Simulated schedules against the formulas of the cost model, against timetables in lockstep, and
against all orders there are.
"""

from __future__ import annotations

import doctest
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib import schedules
from shardlib.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Durations,
    Pipelines,
    Task,
    Timetable,
    makespan,
    most_held,
    named,
    orders,
    simulate,
)

CASES = [
    (schedule, stages, micro, virtual)
    for schedule, chunks in (
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("interleaved", (2, 3)),
        ("zero-bubble", (1,)),
    )
    for virtual in chunks
    for stages in (1, 2, 3, 4, 8)
    for micro in (1, 2, 3, 4, 8, 9, 16, 24)
    if virtual == 1 or (micro % stages == 0 and stages > 1)
]
seconds = st.floats(0.1, 10)


@pytest.mark.parametrize("schedule", sorted({case[0] for case in CASES}))
def test_every_stage_does_everything_once_and_nothing_before_what_it_needs(schedule: str) -> None:
    for case in CASES:
        if case[0] == schedule:
            keeps_the_order(*case)


def keeps_the_order(schedule: str, stages: int, micro: int, virtual: int) -> None:
    spans = simulate(
        orders(schedule, stages=stages, microbatches=micro, virtual=virtual),
        Durations(forward=1.0, backward=1.5, weights=0.7, hop=0.25),
    )
    kinds = (FORWARD, BACKWARD, *((WEIGHTS,) if schedule == "zero-bubble" else ()))
    assert Counter((span.stage, span.task) for span in spans) == Counter(
        (stage, Task(kind=kind, microbatch=m, chunk=c))
        for stage in range(stages)
        for kind in kinds
        for m in range(micro)
        for c in range(virtual)
    )
    at = {
        (span.stage + span.task.chunk * stages, span.task.kind, span.task.microbatch): span
        for span in spans
    }
    for (place, kind, m), span in at.items():
        needs = {
            FORWARD: [(place - 1, FORWARD)],
            BACKWARD: [(place, FORWARD), (place + 1, BACKWARD)],
            WEIGHTS: [(place, BACKWARD)],
        }[kind]
        for other, needed in needs:
            if (other, needed, m) in at:
                hop = 0.25 if other % stages != place % stages else 0.0
                assert span.start >= at[other, needed, m].end + hop - 1e-9
    for stage in range(stages):
        own = [span for span in spans if span.stage == stage]
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(own))


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(CASES), forward=seconds, backward=seconds, share=st.floats(0, 1))
def test_formulas_are_exact(
    case: tuple[str, int, int, int], forward: float, backward: float, share: float
) -> None:
    schedule, stages, micro, virtual = case
    weights = share * min(
        forward, backward
    )  # the gradient of a weight has the FLOPs of a matmul of both
    apart = schedule == "zero-bubble"
    spans = simulate(
        orders(schedule, stages=stages, microbatches=micro, virtual=virtual),
        Durations(
            forward=forward,
            backward=backward if apart else backward + weights,
            weights=weights if apart else 0,
        ),
    )
    shape = Pipelines.one(stages=stages, chunks=virtual, microbatches=micro)
    tick = forward + backward + weights
    assert makespan(spans) == pytest.approx(
        micro * tick + named(schedule).waiting(shape, np.array([tick]), np.array([weights]))[0]
    )
    if stages > 1:
        held = [most_held(spans, stage) / virtual for stage in range(stages)]
        assert max(held) == held[0] == pytest.approx(named(schedule).in_flight(shape)[0])
        assert held[-1] == pytest.approx(named(schedule).held_by_last(shape)[0])


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (4, 4), (4, 9), (8, 24)])
def test_late_gradients_of_weights_need_no_more_memory_than_one_forward_one_backward(
    stages: int, micro: int
) -> None:
    spans = simulate(
        orders("zero-bubble", stages=stages, microbatches=micro),
        Durations(forward=1, backward=1, weights=1),
    )
    assert (
        max(most_held(spans, stage, until=WEIGHTS) for stage in range(stages)) == stages
    )  # arXiv:2401.10241, section 2.2
    assert makespan(spans) == 3 * micro + (stages - 1)  # a third of 1F1B's bubble


@pytest.mark.parametrize(
    ("stages", "micro", "virtual"),
    [(2, 3, 2), (4, 9, 2), (4, 8, 3), (8, 32, 3), (8, 3, 1), (3, 7, 1)],
)
def test_lockstep_takes_what_the_formula_says(stages: int, micro: int, virtual: int) -> None:
    schedule = "interleaved" if virtual > 1 else "1f1b"
    table, tick = (
        Timetable(schedule=schedule, stages=stages, microbatches=micro, virtual=virtual),
        3.0,
    )
    shape = Pipelines.one(stages=stages, chunks=virtual, microbatches=micro, lockstep=True)
    wait = named(schedule).waiting(shape, np.array([tick]), np.array([0.0]))[0]
    assert table.forward_ticks * tick / virtual == pytest.approx(micro * tick + wait)
    # however many microbatches there are
    assert table.slots == min(2 * virtual * stages - 1, table.forward_ticks)


def _interleavings(*queues: tuple[Task, ...]):
    """All orders that keep the order of every queue."""
    if not any(queues):
        yield ()
    for k, queue in enumerate(queues):
        if queue:
            for rest in _interleavings(*queues[:k], queue[1:], *queues[k + 1 :]):
                yield (queue[0], *rest)


def _best(
    stages: int, micro: int, durations: Durations, kinds: tuple[str, ...], most: int
) -> float:
    """The least makespan of all orders in which no stage remembers more than `most`
    microbatches.
    """
    queues = [tuple(Task(kind=kind, microbatch=m) for m in range(micro)) for kind in kinds]
    single = [
        order
        for order in _interleavings(*queues)
        if all(
            order.index(b) > order.index(a)
            for early, late in itertools.pairwise(queues)
            for a, b in zip(early, late, strict=True)
        )
    ]
    found = float("inf")
    for every in itertools.product(single, repeat=stages):
        try:
            spans = simulate(every, durations)
        except ValueError:
            continue
        if all(most_held(spans, stage, until=kinds[-1]) <= most for stage in range(stages)):
            found = min(found, makespan(spans))
    return found


@pytest.mark.parametrize(
    ("stages", "micro", "forward", "backward"),
    [(2, 2, 1, 2), (2, 3, 1, 2), (2, 4, 2, 1), (3, 2, 1, 1), (3, 3, 1, 2)],
)
def test_no_order_is_faster_than_one_forward_one_backward(
    stages: int, micro: int, forward: float, backward: float
) -> None:
    durations = Durations(forward=forward, backward=backward)
    assert _best(stages, micro, durations, (FORWARD, BACKWARD), micro) == makespan(
        simulate(orders("1f1b", stages=stages, microbatches=micro), durations)
    )


@pytest.mark.parametrize(("forward", "backward", "weights"), [(1, 1, 1), (2, 2, 1), (2, 1, 1)])
@pytest.mark.parametrize("micro", [1, 2])
def test_no_order_of_two_stages_with_the_same_memory_is_faster_than_zero_bubble(
    micro: int, forward: float, backward: float, weights: float
) -> None:
    durations = Durations(forward=forward, backward=backward, weights=weights)
    assert _best(2, micro, durations, (FORWARD, BACKWARD, WEIGHTS), 2) == makespan(
        simulate(orders("zero-bubble", stages=2, microbatches=micro), durations)
    )


def test_orders_that_cannot_be_kept_are_refused() -> None:
    first, second = Task(kind=FORWARD, microbatch=0), Task(kind=BACKWARD, microbatch=0)
    with pytest.raises(
        ValueError, match="stages wait for each other: stage 0 at B0, stage 1 at F0"
    ):
        simulate([(second, first), (first, second)], Durations(forward=1, backward=1))
    with pytest.raises(ValueError, match="groups of 4, which do not divide 6"):
        orders("interleaved", stages=4, microbatches=6, virtual=2)
    with pytest.raises(ValueError, match="one chunk a stage, not 2"):
        orders("1f1b", stages=4, microbatches=8, virtual=2)
    with pytest.raises(ValueError, match="no schedule 'dualpipe'"):
        orders("dualpipe", stages=4, microbatches=8)


# Schedules keep the order that the computation needs, forget nothing too early, and take the time
# of the ideal schedule.

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
                places[table.residual_slot_written(tick, stage)] = table.backward(tick, stage)
            micro, chunk, works = table.weights(tick)
            if works and tick >= table.weights_turn:
                assert (
                    slots[table.weights_slot(tick)]
                    == places[table.residual_slot_read(tick)]
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


def test_a_picture_shows_who_does_what_when():
    assert doctest.testmod(schedules).failed == 0 < doctest.testmod(schedules).attempted
    lines = schedules.text(
        Timetable(schedule="interleaved", stages=2, microbatches=2, virtual=2)
    ).splitlines()
    assert lines[1].split() == ["stage", "0", ">", "a0", "a1", "b0", "b1", "·", "·", "·", "·"]
    assert lines[4].split() == ["<", "·", "·", "·", "b0", "b1", "a0", "a1", "·"]
