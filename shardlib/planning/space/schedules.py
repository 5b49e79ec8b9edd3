"""ZeRO stages, pipeline schedules and when weights are gathered: what a space has of them, and
which candidates allow them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardlib.axes import STORED_AXES
from shardlib.cost.pricing.candidates import Candidates
from shardlib.decisions.table import Decisions
from shardlib.hardware.placement import divisors
from shardlib.planning.space.space import Space
from shardlib.schedules.none import NONE
from shardlib.schedules.schedule import Pipelines, Schedule
from shardlib.schedules.table import SCHEDULES, named, pipelines

#: Largest number of chunks of layers on a stage that is tried.
MAX_VIRTUAL = 8
#: Smallest number of chunks of layers on a stage that is tried where all microbatches go through
#: one chunk before the next: two are whole at a time.
FEWEST = 3

Array = np.ndarray


def legal_zero(space: Space, zero: int, c: Candidates) -> Array:
    """Which candidates a ZeRO stage fits: there is something to shard over, an fsdp axis shards
    something, and the framework can do it.
    """
    able = space.limits.able
    if zero:
        alone = able.has("ZeRO or replicas")
        return (c.ways(STORED_AXES) > 1) & ((c.ways(("data",)) == 1) | (not alone))
    return c.ways(STORED_AXES) == 1 if able.has("ZeRO over all") else c.fsdp == 1


def zeros_and_schedules(space: Space, policy: str, *, pipelined: bool) -> list[Decisions]:
    """Every ZeRO stage and schedule under a remat policy; whether a candidate allows them is not
    said here.
    """
    pins = space.pins
    zeros = [zero for zero in space.limits.able.zero if pins.zero in (None, zero)]
    usual = _schedules(space, policy) if pipelined else [(NONE.name, 1)]
    listed = [
        (zero, schedule, virtual, gather)
        for zero in zeros
        for schedule, virtual in usual
        for gather in space.gathers
        if gather == "use" or (zero == 3 and pipelined)
    ]
    listed += [
        (3, schedule.name, virtual, "once")
        for schedule in forward_first()
        if pins.schedule in (None, schedule.name)
        for virtual in (breadth_first(space) if pipelined else ())
    ]
    return [
        replace(
            space.strategy.decisions,
            zero=zero,
            remat=policy,
            schedule=schedule,
            virtual_stages=virtual,
            gather=gather,
            accumulation=groups(space),
        )
        for zero, schedule, virtual, gather in listed
    ]


def _schedules(space: Space, policy: str) -> list[tuple[str, int]]:
    """Schedules and chunks of layers on a stage that are tried, those of whole stages first."""
    pins, able = space.pins, space.limits.able
    tried = [
        (schedule.name, chunks)
        for schedule in SCHEDULES.values()
        if pins.schedule in (None, schedule.name) and (able.free or schedule.name in able.schedules)
        for chunks in schedule.tried(
            pinned=pins.schedule is not None or len(able.schedules) == 1,
            chunks=pins.virtual_stages,
            policy=policy,
            limit=MAX_VIRTUAL,
        )
    ]
    return sorted(tried, key=lambda pair: pair[1] > 1)


def of_policy(space: Space, policy: str) -> list[Schedule]:
    """Schedules of the space under a remat policy, but for `breadth_first`."""
    return [named(name) for name in dict.fromkeys(name for name, _ in _schedules(space, policy))]


def forward_first() -> list[Schedule]:
    """Schedules that take all microbatches through a chunk of layers before the next."""
    return [schedule for schedule in pipelines() if schedule.forward_first]


def breadth_first(space: Space) -> list[int]:
    """Chunks of layers on a stage of pipelines that take all microbatches through one chunk before
    the next, where no schedule is pinned that has them anyway.
    """
    pins = space.pins
    if (
        "once" not in space.gathers
        or pins.zero not in (None, 3)
        or pins.schedule not in (None, *(schedule.name for schedule in forward_first()))
        or (pins.schedule and pins.virtual_stages)
        or pins.pipeline == "programs"
    ):
        return []
    if pins.virtual_stages:
        return [pins.virtual_stages] if pins.virtual_stages > 1 else []
    return list(_dividing(space.limits.layers))


@lru_cache(maxsize=256)
def _dividing(layers: int) -> tuple[int, ...]:
    """Every number of chunks that divides the layers of a stage, for some number of stages."""
    return tuple(
        sorted(
            {
                chunks
                for stages in range(2, layers + 1)
                for chunks in divisors(-(-layers // stages))
                if chunks >= FEWEST
            }
        )
    )


def usual(space: Space) -> set[tuple[str, int]]:
    """Every schedule with its chunks of layers on a stage, but for `breadth_first`."""
    return {pair for policy in space.policies for pair in _schedules(space, policy)}


def first(space: Space) -> set[tuple[str, int]]:
    """Every schedule of `breadth_first` with its chunks."""
    chunks = breadth_first(space)
    return {(schedule.name, count) for schedule in forward_first() for count in chunks}


def most_rounds(space: Space, sizes: Mapping[str, Array]) -> Array:
    """The most chunks that a stage has in a pipeline of `breadth_first`, by candidate; 0 where
    there is none.
    """
    stages, micro, other_ways = (
        sizes["stage"],
        sizes["micro"],
        math.prod(sizes[axis] for axis in STORED_AXES),
    )
    limit, minimum = space.limits.layers // stages, space.pins.virtual_stages or FEWEST
    fits = (stages > 1) & (micro >= stages * groups(space)) & (other_ways > 1) & (limit >= minimum)
    return (
        np.where(fits, space.pins.virtual_stages or limit, 0)
        if breadth_first(space)
        else np.zeros_like(stages)
    )


def groups(space: Space) -> int:
    """Groups of microbatches that go through a pipeline one after the other; more than one only
    where that is pinned, and then all plans have stages.
    """
    return space.pins.accumulation or 1


def most_chunks(space: Space, policy: str, stages: Array, micro: Array) -> Array:
    """The most chunks of layers on a stage that a schedule of the space may have, by candidate."""
    limit = max((virtual for _, virtual in _schedules(space, policy)), default=1)
    return np.where(
        micro >= stages * groups(space),
        np.maximum(1, np.minimum(limit, space.limits.layers // stages)),
        1,
    )


def legal_schedule(space: Space, decisions: Decisions, c: Candidates) -> Array:
    """Which candidates a schedule fits: a layer for every chunk, and, with several chunks,
    microbatches for every stage; breadth first, as many layers in every chunk.
    """
    layers = space.limits.layers
    fits = c.stage * decisions.virtual_stages <= layers
    able, chunks = space.limits.able, decisions.virtual_stages
    if able.has("equal stages"):
        fits &= layers % (c.stage * chunks) == 0
    if able.has("chunked in groups") and chunks > 1:
        fits &= c.micro % c.stage == 0
    if able.has("a microbatch a chunk"):
        fits &= c.micro >= c.stage * chunks
    schedule = named(decisions.schedule)
    if schedule.forward_first and decisions.virtual_stages > 1 and not space.pins.virtual_stages:
        fits &= -(-layers // c.stage) % decisions.virtual_stages == 0
    return fits & schedule.fits(
        Pipelines(
            stages=c.stage,
            chunks=np.full_like(c.stage, decisions.virtual_stages),
            microbatches=c.micro // decisions.accumulation,
            lockstep=space.pins.pipeline != "programs",
        )
    )
