"""The error where nothing fits: what is missing, and the smallest change that would help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardlib.cost.machine.corrections import fitting_bytes, margin
from shardlib.cost.pricing.totals import Totals
from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, TopologyError
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.assembly.candidate_price import price
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.space.workload import Workload
from shardlib.planning.units.quantity import bytes_text, percent_text


def infeasible(
    load: Workload,
    topology: Topology,
    pins: Pins,
    candidate: Candidate,
    fits: Callable[[Topology, Pins], bool],
) -> InfeasibleError:
    """The error for a problem that does not fit: how much is missing, and which single change would
    do.
    """
    totals, memory_margin = price(load, topology, candidate), margin(topology)
    capacity = fitting_bytes(topology)
    mesh, summary = candidate.mesh, candidate.summary
    peak = float(totals.peak_bytes[0])
    parts = sorted(
        ((float(values[0]), name) for name, values in totals.device_bytes.items()), reverse=True
    )
    shares = ", ".join(f"{name} {bytes_text(size)}" for size, name in parts if size > 0.01 * peak)
    hints = [
        f"leaving {name} to the planner"
        for name, others in pins.without().items()
        if fits(topology, others)
    ]
    hints += _larger(topology, lambda machine: fits(machine, pins))
    smaller = _smaller_batch(totals, capacity)
    hints += [smaller] if smaller else []
    return InfeasibleError(
        f"{load.problem.model} does not fit on {topology.name}: the leanest plan"
        f" ({mesh}{', ' + summary if summary else ''}) needs {bytes_text(peak)} on each device,"
        f" {bytes_text(peak - capacity)} more than {_room(topology)}"
        f" ({shares})\nTry:"
        f" {'; or '.join(hints) if hints else 'a larger topology and a smaller batch together'}",
        short_bytes=math.ceil(peak * memory_margin - topology.chip.usable_bytes),
    )


def _room(topology: Topology) -> str:
    """The memory that a plan may fill, in words."""
    memory_margin, usable = margin(topology), topology.chip.usable_bytes
    if memory_margin == 1:
        return f"the {bytes_text(usable)} it has"
    return (
        f"the {bytes_text(fitting_bytes(topology))} that a plan may fill of {bytes_text(usable)},"
        f" as a program may need {percent_text(memory_margin - 1)} more than predicted"
    )


def _larger(topology: Topology, fits: Callable[[Topology], bool]) -> list[str]:
    """The smallest doubling of the number of fast domains that fits, if one up to 64 times the size
    does; of each of the machines that a slow link joins.
    """
    joined, separator, inner = topology.name.partition("@")
    link, _, inner = inner.partition("*") if separator else ("", "", joined)
    count, star, domain = inner.partition("*")
    number, domain = (int(count), domain) if star else (1, inner)
    front = f"{joined}@{link}*" if separator else ""
    for factor in (2, 4, 8, 16, 32, 64):
        try:
            larger = replace(
                parse_topology(f"{front}{number * factor}*{domain}"), chip=topology.chip
            )
        except TopologyError:
            return []
        if fits(larger):
            return [f"the topology {larger.name} ({larger.devices} devices)"]
    return []


def _smaller_batch(totals: Totals, capacity: float) -> str:
    """How much smaller the batch must be, if everything that grows with it shrinks in
    proportion.
    """
    scaling = sum(
        float(totals.device_bytes[name][0]) for name in ("activations", "temporaries", "batch")
    )
    fixed = float(totals.peak_bytes[0]) - scaling
    if fixed >= capacity or scaling <= 0:
        return ""
    share = (capacity - fixed) / scaling
    return (
        f"a batch or sequence at most {f'{share:.0%}' if share >= 0.01 else f'{share:.1g}'} of"
        " this one"
    )
