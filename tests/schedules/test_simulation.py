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


@pytest.mark.parametrize(
    "module",
    [
        schedules,
        schedules,
        schedules,
        schedules,
        schedules,
        schedules,
        schedules,
        schedules,
        schedules,
    ],
    ids=lambda module: module.__name__,
)
def test_examples(module) -> None:
    failed, attempted = doctest.testmod(module)
    assert failed == 0 < attempted


@pytest.mark.parametrize("schedule", sorted({case[0] for case in CASES}))
def test_every_stage_does_everything_once_and_nothing_before_what_it_needs(schedule: str) -> None:
    for name, stages, micro, virtual in CASES:
        if name == schedule:
            _keeps_the_order(name, stages, micro, virtual)


def _keeps_the_order(schedule: str, stages: int, micro: int, virtual: int) -> None:
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
    ("stages", "micro", "virtual"), [(2, 3, 2), (4, 9, 2), (4, 8, 3), (8, 3, 1), (3, 7, 1)]
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
