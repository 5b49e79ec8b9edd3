"""Pipelines against a simulation of every microbatch on every stage, and cuts of chains against all
cuts.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.cost.stages import partition_by_work, slowest_chunk
from shardlib.schedules import Pipelines, Timetable, least_in_flight, named, pipelines


def simulate(stages: int, micro: int, forward: float, backward: float) -> tuple[float, int]:
    """Seconds of 1F1B, and the most microbatches that stage 0 holds: every stage does its next task
    as soon as what it needs is there.

    A stage warms up with as many forward passes as there are stages after it, then alternates
    (Narayanan et al., arXiv:2006.09503, section 3.2).
    """
    order = []
    for stage in range(stages):
        warm = min(stages - stage - 1, micro)
        tasks = [("f", i) for i in range(warm)]
        for i in range(micro - warm):
            tasks += [("f", warm + i), ("b", i)]
        order.append(tasks + [("b", i) for i in range(micro - warm, micro)])
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(order[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(order[s]):
                continue
            kind, i = order[s][at[s]]
            before = (
                ("f", s - 1, i)
                if kind == "f" and s
                else ("b", s + 1, i)
                if kind == "b" and s < stages - 1
                else None
            )
            if before is None or before in done:
                start = max(clock[s], done.get(before, 0.0) if before else 0.0)
                clock[s] = done[kind, s, i] = start + (forward if kind == "f" else backward)
                at[s] += 1
    held = most = 0
    for kind, _ in order[0]:
        held += 1 if kind == "f" else -1
        most = max(most, held)
    return max(clock), most


@pytest.mark.parametrize(("stages", "micro"), [(1, 4), (2, 2), (2, 8), (4, 4), (4, 12), (8, 9)])
def test_one_forward_one_backward_is_that_of_a_simulation(stages: int, micro: int) -> None:
    forward, backward = 1.0, 2.0
    seconds, held = simulate(stages, micro, forward, backward)
    s, v, m = (np.array([n]) for n in (stages, 1, micro))
    alone, lockstep = (
        Pipelines(stages=s, chunks=v, microbatches=m, lockstep=lockstep)
        for lockstep in (False, True)
    )
    wait = named("1f1b").waiting(alone, np.array([forward + backward]), np.array([0.0]))[0]
    assert micro * (forward + backward) + wait == pytest.approx(seconds)
    assert named("1f1b").in_flight(alone)[0] == held
    assert named("1f1b").in_flight(lockstep)[0] >= held


def waiting(schedule: str, chunks: int, micro: int) -> float:
    """Seconds that each of eight stages waits."""
    shape = Pipelines.one(stages=8, chunks=chunks, microbatches=micro)
    return named(schedule).waiting(shape, np.array([3.0]), np.array([1.0]))[0]


def test_schedules_are_in_the_order_of_their_bubbles() -> None:
    several = (("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zero-bubble", 1))
    gpipe, plain, interleaved, zero = (waiting(name, v, 32) for name, v in several)
    assert gpipe == plain == 21 and interleaved == plain / 4 and zero == plain / 3
    # a group of seven takes as long as one of eight
    assert waiting("interleaved", 4, 31) == interleaved + 3
    # which does not matter where all microbatches are one group
    assert waiting("gpipe", 4, 31) == interleaved
    # too few microbatches to fill the gaps with
    assert [waiting("zero-bubble", 1, n) for n in (1, 4, 8)] == [14, 11, 7]
    held = [
        named(name).in_flight(Pipelines.one(stages=8, chunks=v, microbatches=32))[0]
        for name, v in several
    ]
    assert held == [32, 8, 8 + 7 / 4, 8]


@pytest.mark.parametrize("schedule", [one.name for one in pipelines()])
def test_stages_in_lockstep_hold_the_places_of_their_ring_and_what_passes_by(schedule: str) -> None:
    for stages, micro in itertools.product((2, 3, 8), (2, 3, 4, 8, 40)):
        _hold_the_places_of_their_ring(schedule, stages, micro)


def _hold_the_places_of_their_ring(schedule: str, stages: int, micro: int) -> None:
    for virtual in (
        (1, 2, 5) if schedule in ("gpipe", "interleaved") and micro % stages == 0 else (1,)
    ):
        table = Timetable(schedule=schedule, stages=stages, microbatches=micro, virtual=virtual)
        lockstep, alone = (
            Pipelines.one(stages=stages, chunks=virtual, microbatches=micro, lockstep=lockstep)
            for lockstep in (True, False)
        )
        held = named(schedule).in_flight(lockstep)[0]
        waiting_for_weights = stages if schedule == "zero-bubble" else 0
        assert (held - waiting_for_weights) * virtual == pytest.approx(
            table.slots + (1 if schedule == "gpipe" else 2)
        )
        assert least_in_flight(lockstep)[0] <= held
        assert least_in_flight(alone)[0] <= named(schedule).in_flight(alone)[0]


def every_cut(chain: list[float], chunks: int) -> float:
    """Seconds of the slowest chunk in the best of all cuts of a chain into at most so many runs."""
    best = float("inf")
    for cuts in itertools.combinations_with_replacement(range(len(chain) + 1), chunks - 1):
        edges = (0, *cuts, len(chain))
        best = min(best, max(sum(chain[a:b]) for a, b in itertools.pairwise(edges)))
    return best


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    chunks=st.integers(1, 4),
    times=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_the_slowest_chunk_is_that_of_the_best_cut(
    counts: list[int], chunks: int, times: list[float]
) -> None:
    chain = [t for n, t in zip(counts, times, strict=False) for _ in range(n)]
    found = slowest_chunk(
        [np.array([t]) for t in times[: len(counts)]], counts, np.array([chunks])
    )[0]
    assert found == pytest.approx(every_cut(chain, chunks), rel=1e-4)


@pytest.mark.parametrize("head", [0.0, 0.4, 3.7])
@pytest.mark.parametrize(("count", "stages"), [(16, 4), (80, 16), (32, 5), (7, 8), (10, 1)])
def test_a_stage_ends_with_the_layer_in_which_its_part_of_the_work_is_passed(
    count: int, stages: int, head: float
):
    sizes, part = [0] * stages, (count + head) / stages
    stage, done = 0, 0.0
    for _ in range(count):
        sizes[stage] += 1
        done += 1.0
        while stage < stages - 1 and done >= (stage + 1) * part - 1e-9:
            stage += 1
    most, last = partition_by_work(count, head, np.array([stages]))
    assert (most.item(), last.item()) == (max(sizes), sizes[-1])
