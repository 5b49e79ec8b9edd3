"""How much work is a step at least, however many devices share it?"""

from __future__ import annotations

import itertools
from dataclasses import replace

from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.abilities import ANYTHING
from shardlib.decisions.pins import Pins
from shardlib.hardware.topology import Topology
from shardlib.planning.decisions.dtypes import combinations, effective
from shardlib.planning.search.uncut import Uncut
from shardlib.planning.space.attention import strategies
from shardlib.planning.space.space import build
from shardlib.planning.space.workload import Workload


def least_device_seconds(load: Workload, topology: Topology, pins: Pins) -> float:
    """Seconds of a step times devices that no plan on the machine beats: those of the kernels of
    the step where nothing is sharded, under the cheapest remat policy, kernel of attention and
    dtypes that may be chosen. Communication, waiting and launches are not in it.
    """
    able = load.framework.able if load.framework is not None else ANYTHING
    all_dtypes = dict.fromkeys(
        effective(combination, load.problem, load.profile, pins.dtypes)
        for combination in combinations(pins.dtypes, pins.allow)
    )
    all_strategies = strategies(load.problem, pins, load.profile, topology.chip, able)
    seconds: list[float] = []
    for dtypes, strategy in itertools.product(all_dtypes, all_strategies):
        decisions = replace(strategy.decisions, dtypes=dtypes)
        workload = load.under(dtypes, decisions.fused)
        space = build(workload, pins, None, replace(strategy, decisions=decisions))
        seconds.append(
            Uncut(load=workload, space=space, pricer=Pricer(topology, workload.profile)).seconds
        )
    return min(seconds)
