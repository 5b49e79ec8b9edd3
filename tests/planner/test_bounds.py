"""No plan is faster or smaller than the bounds say that exclude it."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from shardlib.cost.framework import framework_profile
from shardlib.cost.stages import Meshes, distinct
from shardlib.cost.tables import Pricer
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import Decisions
from shardlib.machines.topology import place, topology
from shardlib.planner.assembly import price
from shardlib.planner.bounds import (
    Entries,
    MicrobatchBounds,
    Pairs,
    StepBounds,
    fastest_mixture,
    pipeline_overhead,
    step_seconds,
)
from shardlib.planner.parts import Candidate
from shardlib.planner.space import AttentionStrategy, Scope, build_space
from shardlib.planner.workload import Workload, prepare
from shardlib.schedules import Pipelines, named
from tests.planner import worlds
from tests.planner.brute_force import every_candidate, variants

WHERE = "2*h100:2"
#: Plans that are priced one by one, and as many variants of them.
SAMPLE = 100
OFFLOADS = ((), ("optimizer",), ("activations",), ("optimizer", "activations"))


@functools.cache
def _load(world: str, software: str) -> Workload:
    problem = {
        "layers": lambda: worlds.layers(batch=4, heads=2, depth=3),
        "deep": lambda: worlds.stack(batch=4, depth=6, seq=16),
        "experts": worlds.experts,
    }[world]()
    return prepare(problem, "nvidia", framework_profile(software))


@functools.cache
def _prices(world: str, software: str) -> list[tuple[Candidate, float, float]]:
    """(decision, seconds, bytes) of a sample of all plans on all devices, each with one of its
    variants.
    """
    load, where = _load(world, software), topology(WHERE)
    some = [one for one in every_candidate(load, where) if one.mesh.devices == where.devices]
    some = some[:: max(1, len(some) // SAMPLE)]
    every = itertools.chain.from_iterable(
        (one, *itertools.islice(variants(load, where, one), number % 9, number % 9 + 1))
        for number, one in enumerate(some)
    )
    return [
        (one, float(totals.step_seconds[0]), float(totals.peak_bytes[0]))
        for one in every
        for totals in [price(load, where, one)]
    ]


def _entries(
    world: str, software: str, routes: bool, capacity: float, context: str = "all-gather"
) -> tuple[Entries, StepBounds]:
    load, pricer = _load(world, software), Pricer(topology(WHERE), framework_profile(software))
    strategy = AttentionStrategy(decisions=Decisions(context=context))
    room = build_space(load, Pins(), None, strategy)
    sizes = room.mesh_sizes(load.colouring, pricer.topology.devices)
    shapes, shape = distinct(sizes)
    counts = load.layer_counts
    fitting = StepBounds(
        space=room, counts=counts, pricer=pricer, capacity=capacity, offloads=OFFLOADS
    )
    scope = Scope(
        workload=load,
        space=room,
        shardable=room.tensor,
        context_colour=load.colouring.sequence_colour,
        routes=routes,
    )
    return (
        Entries(scope, pricer, fitting, sizes, pricer.values(load.tallies.index, shapes), shape),
        fitting,
    )


def _index(entries: Entries) -> dict[tuple[int, ...], int]:
    """The index of every (sizes of the axes, microbatches)."""
    return {
        tuple(int(values[at]) for values in entries.sizes.values()): at
        for at in range(len(entries))
    }


def _key(entries: Entries, one: Candidate) -> tuple[int, ...]:
    return tuple(
        one.decisions.microbatches if axis == "micro" else one.mesh[axis] for axis in entries.sizes
    )


def _placed(entries: Entries, at: int, one: Candidate, software: str) -> Meshes:
    """An entry on the place of a plan, on links as the software reaches them."""
    where = Pricer(topology(WHERE), framework_profile(software)).topology
    placement = place(one.mesh, where, one.decisions.axis_order)
    assert placement is not None
    c = Meshes.placed([(one.mesh, placement)], [one.decisions.microbatches], where)
    return replace(c, degrees=entries.values.degrees, degrees_index=entries.degrees_index[[at]])


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "software"),
    (("layers", "xla"), ("layers", "megatron-core"), ("deep", "xla"), ("experts", "xla")),
)
@pytest.mark.parametrize("share", (0.1, 0.4, 0.8))
def test_no_plan_that_fits_is_faster_than_its_bounds(
    world: str, software: str, share: float
) -> None:
    prices = _prices(world, software)
    capacity = float(np.quantile([size for _, _, size in prices], share))
    routes = _load(world, software).expert is not None
    checked = 0
    for context in sorted({one.decisions.context for one, _, _ in prices}):
        entries, _ = _entries(world, software, routes, capacity, context)
        every = np.arange(len(entries))
        of_entries, of_pairs, places = entries.seconds(every), entries.pairs(every), _index(entries)
        bounds = {
            (int(entry), int(choice)): least
            for entry, choice, least in zip(
                of_pairs.entries, of_pairs.choices, of_pairs.bound, strict=True
            )
        }
        for one, seconds, size in prices:
            if size > capacity or one.routes != routes or one.decisions.context != context:
                continue
            at = places[_key(entries, one)]
            choice = entries.choices.index(
                replace(one.choice, context=entries.scope.context_colour)
            )
            placed = _placed(entries, at, one, software)
            kinds = entries.seconds_by_kind(placed, np.zeros(1, dtype=np.int64), np.array([choice]))
            on_place = min(float(least[0]) for least in kinds.values())
            assert entries.unlimited_seconds[at] <= seconds * (1 + 1e-9)
            assert of_entries[at] <= bounds[at, choice] * (1 + 1e-9)
            assert bounds[at, choice] <= seconds * (1 + 1e-9)
            assert entries.seconds_on(placed)[0] <= on_place * (1 + 1e-9)
            if software == "xla":
                assert on_place <= seconds * (1 + 1e-9)
            checked += 1
    assert checked > 5


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "software"),
    (("layers", "xla"), ("layers", "megatron-core"), ("deep", "xla"), ("experts", "xla")),
)
def test_no_plan_is_smaller_than_its_bounds(world: str, software: str) -> None:
    prices = _prices(world, software)
    routes = _load(world, software).expert is not None
    entries, _ = _entries(world, software, routes, np.inf)
    every = np.arange(len(entries))
    of_entries = entries.least_bytes(every)
    of_pairs = entries.pairs(every, minimum_memory=True)
    places = _index(entries)
    bounds = {
        (int(entry), int(choice)): least
        for entry, choice, least in zip(
            of_pairs.entries, of_pairs.choices, of_pairs.bound, strict=True
        )
    }
    least = defaultdict[tuple[int, int], float](lambda: np.inf)
    for one, _, size in prices:
        if one.routes == routes:
            pair = (
                places[_key(entries, one)],
                entries.choices.index(replace(one.choice, context=entries.scope.context_colour)),
            )
            least[pair] = min(least[pair], size)
    assert len(least) > 5
    for pair, size in least.items():
        assert of_entries[pair[0]] <= bounds[pair] * (1 + 1e-9) <= size * (1 + 2e-9)
    assert (
        max(bounds[pair] / size for pair, size in least.items()) > 0.5
    )  # and it is not an empty bound


def test_a_mixture_lies_on_the_line_between_policies() -> None:
    seconds = np.array([[1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 1.0]])  # none and full, by candidate
    sizes = np.array([[10.0, 10.0, 4.0, 10.0], [2.0, 6.0, 2.0, 2.0]])
    expected = [1 + 5 / 8, np.inf, 1.0, 1.0]
    np.testing.assert_allclose(fastest_mixture(seconds, sizes, 5.0), expected)


def test_the_fullest_stage_has_whole_layers() -> None:
    busy, layers = np.array([7.0]), np.array([6.0])  # six layers, and a second outside of them
    none = np.zeros(1)
    tick = MicrobatchBounds.of(np.stack([busy, busy, busy, none, none, busy, none, layers]))
    stages, micro = np.array([4]), np.array([8])
    pipelines = Pipelines(stages=stages, chunks=np.ones(1), microbatches=micro)
    overhead = pipeline_overhead(tick, pipelines, named("1f1b"), 0.0, (6,))
    seconds = step_seconds(tick, stages, micro, overhead)
    np.testing.assert_allclose(seconds, (8 + 3) * (2 + 1 / 4))


def test_pairs_come_in_the_order_of_their_bounds() -> None:
    pairs = Pairs.joined(
        [
            Pairs(entries=np.array([3, 1]), choices=np.array([0, 1]), bound=np.array([2.0, 5.0])),
            Pairs(entries=np.array([3, 2]), choices=np.array([2, 2]), bound=np.array([1.0, 4.0])),
        ]
    )
    below = pairs.below(5.0)
    assert list(below.entries) == [3, 3, 2] and list(below.choices) == [2, 0, 2]
    assert list(below.firsts().choices) == [2, 2]
    assert list(below.first(1).entries) == [3]
    assert list(below.after(1).entries) == [3, 2]
    assert len(below.after(7)) == 0
