"""Matmuls over tensor in loops: where they are pinned, or left to the planner and faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.decisions.pins import Pins
from shardlib.errors import PinError
from shardlib.hardware.placement import divisors
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly.candidate_price import OnMachine, price
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.offers.ranking import Ranking
from shardlib.planning.search.priced_space import PricedSpace, priced_space
from shardlib.planning.space.workload import Workload, prepare

#: Most plans that are priced with loops over tensor, where the planner decides for them.
MOST_LOOPS = 32
#: Largest tensor axis whose best plan is looked for on its own to be priced with loops.
MOST_TENSOR = 32


def with_loops(
    load: Workload, topology: Topology, candidate: Candidate, pins: Pins, step_seconds: float
) -> tuple[Candidate, float]:
    """The candidate with matmuls over tensor in loops, where that is pinned, or left to the planner
    and predicted to be faster; and its seconds of a step.

    Args:
        step_seconds: predicted for the candidate.
    """
    if pins.collective_matmul not in ("loop", "any") or (
        pins.collective_matmul == "any" and not hides(load, topology, candidate.mesh)
    ):
        return candidate, step_seconds
    loop = candidate.but(collective_matmul="loop")
    saved = OnMachine.of(load, topology, loop).saving()
    seconds = step_seconds - (saved.seconds if saved else 0.0)
    return (
        (loop, seconds)
        if pins.collective_matmul == "loop" or seconds < step_seconds
        else (candidate, step_seconds)
    )


def hides(load: Workload, topology: Topology, mesh: MeshShape) -> bool:
    """Whether loops over tensor can be faster on a mesh: in a program of JAX without stages, and
    where links work beside compute, which those of simulated devices do not.
    """
    return (
        load.profile.name == XLA.name
        and mesh["tensor"] > 1
        and mesh["stage"] == 1
        and all(tier.kind != "memory" for tier in topology.tiers)
    )


def with_any_loops(
    load: Workload, topology: Topology, pins: Pins, space: PricedSpace
) -> tuple[Candidate, float, float]:
    """The fastest candidate with or without loops over tensor, its seconds of a step, and seconds
    that none can beat.

    The fastest plan for each size of the tensor axis is priced with loops. With all collectives
    over tensor hidden, every plan is at least as fast as with loops: others are priced in the order
    of that bound, until it is no less than the seconds of the best plan, or `MOST_LOOPS` have been.
    """
    assert space.best.fastest is not None
    best = with_loops(load, topology, space.best.fastest, pins, space.best.seconds)
    for sharded in _by_tensor(load, topology, pins):
        assert sharded.best.fastest is not None
        best = min(
            best,
            with_loops(load, topology, sharded.best.fastest, pins, sharded.best.seconds),
            key=lambda pair: pair[1],
        )
    hidden = prepare(load.problem, topology.chip.vendor, replace(load.profile, tensor_overlap=1.0))
    fastest = priced_space(hidden, topology, pins).best.seconds
    ranking, priced = Ranking[Candidate](), 0
    everywhere = priced_space(hidden, topology, pins, ranking, max(1.0, best[1] / fastest))
    for entry in ranking.ordered(everywhere.simplicity):
        if entry.seconds >= best[1] or priced == MOST_LOOPS:
            return *best, min(best[1], entry.seconds)
        candidate = everywhere.candidate(entry)
        if hides(load, topology, candidate.mesh):
            alternative = with_loops(
                load,
                topology,
                candidate,
                pins,
                float(price(load, topology, candidate).step_seconds[0]),
            )
            best, priced = min(best, alternative, key=lambda pair: pair[1]), priced + 1
    return *best, best[1]


def _by_tensor(load: Workload, topology: Topology, pins: Pins) -> Iterator[PricedSpace]:
    """The priced spaces of every size of the tensor axis and no stages in which a plan fits, where
    pins leave that open.
    """
    fixed = dict(pins.axes)
    if pins.mesh is not None or "tensor" in fixed or pins.staged:
        return
    for degree in (n for n in divisors(topology.devices) if 1 < n <= MOST_TENSOR):
        try:
            axes = tuple(sorted({**fixed, "tensor": degree, "stage": 1}.items()))
            space = priced_space(load, topology, pins.but(axes=axes))
        except PinError:
            continue
        if space.best.fastest is not None:
            yield space
