"""Dimensions beyond those of which every set is tried, one after the other in the fastest plans."""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.machine.corrections import fitting_bytes
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly.candidate_price import price
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.search.priced_space import PricedSpace
from shardlib.planning.space.limits import most_specific_first
from shardlib.planning.space.workload import Workload

#: How much faster a plan is at least for another dimension to be sharded.
GAIN = 1e-3
#: Meshes whose fastest plans are tried beside the fastest of all, and how many times its seconds
#: they may take.
MESHES, REACH = 3, 1.25


def fastest_with_left_out(
    load: Workload, topology: Topology, space: PricedSpace, candidate: Candidate, seconds: float
) -> tuple[Candidate, float]:
    """The fastest of the best plans of a search, in each of which the dimensions are sharded, too,
    that it left out, where that is faster and fits; and its seconds of a step.

    Args:
        seconds: of a step of that.
    """
    if not space.space.left_out:
        return candidate, seconds
    others = sorted(
        (
            (its, rival)
            for its, _, rival in space.best.by_mesh.values()
            if rival.mesh["tensor"] > 1 and its <= REACH * seconds and rival.mesh != candidate.mesh
        ),
        key=lambda pair: (pair[0], str(pair[1].mesh)),
    )
    best = candidate, seconds
    for its, start in [(seconds, candidate), *others[:MESHES]]:
        improved = with_left_out(load, topology, space, start, its)
        best = improved if improved[1] < best[1] else best
    return best


def with_left_out(
    load: Workload, topology: Topology, space: PricedSpace, candidate: Candidate, seconds: float
) -> tuple[Candidate, float]:
    """A plan with the dimensions sharded, too, that the search left out, where that is faster and
    fits; see `fastest_with_left_out`.
    """
    degree, colours = candidate.mesh["tensor"], load.colouring.colours
    for name in space.space.left_out if degree > 1 else ():
        if colours[name].divisor % degree:
            continue
        tensor = most_specific_first({*candidate.choice.tensor, name}, load.colouring)
        alternative = replace(candidate, choice=replace(candidate.choice, tensor=tensor))
        totals = price(load, topology, alternative)
        its = float(totals.step_seconds[0])
        if its < seconds * (1 - GAIN) and totals.peak_bytes[0] <= fitting_bytes(topology):
            candidate, seconds = alternative, its
    return candidate, seconds
