"""Equally fast plans: where memory is nearly full, the one with more room."""

from __future__ import annotations

import numpy as np

from shardlib.cost.machine.corrections import fitting_bytes
from shardlib.decisions.lowerings import along, facts, lowered
from shardlib.decisions.pins import Pins
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly.candidate_price import price
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.search.priced_space import PricedSpace
from shardlib.planning.space.workload import Workload
from shardlib.planning.units.quantity import TIE

#: Part of the memory that a plan may take from which on room is worth more than simplicity.
NEARLY = 0.9


def with_more_room(
    load: Workload,
    topology: Topology,
    pins: Pins,
    space: PricedSpace,
    candidate: Candidate,
    seconds: float,
) -> Candidate:
    """A plan that nearly fills the memory, with the ZeRO stage that leaves the most room among
    those that are as fast, the lowest of these.

    Args:
        seconds: of a step of it.
    """
    decisions = candidate.decisions
    if pins.zero is not None or not (1 <= decisions.zero < 3):
        return candidate
    fewest_bytes = float(price(load, topology, candidate).peak_bytes[0])
    if fewest_bytes < NEARLY * fitting_bytes(topology):
        return candidate
    stages = along({"stage": np.array([decisions.mesh["stage"]])})
    for zero in (zero for zero in space.space.limits.able.zero if zero > decisions.zero):
        alternative = candidate.but(zero=zero)
        if not lowered(facts(alternative.decisions), stages, space.space.gaps).all():
            continue
        totals = price(load, topology, alternative)
        peak, its = float(totals.peak_bytes[0]), float(totals.step_seconds[0])
        if its <= seconds * (1 + TIE) and peak < fewest_bytes * (1 - TIE):
            candidate, fewest_bytes = alternative, peak
    return candidate
