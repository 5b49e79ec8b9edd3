"""A machine in islands: equal parts whose devices are neighbours.

>>> from shardlib.hardware.topology import topology
>>> island_of(topology("2*v5e:4x4"), 2).name, island_of(topology("16*h100:8"), 4).name
('v5e:4x4', '4*h100:8')
>>> island_of(topology("cpu:8"), 2).name
'cpu:4'
>>> island_of(topology("2@10gbit*16*h100:8"), 2).name, island_of(topology("4@1gbit*h100:8"), 2).name
('16*h100:8', '2@1gbit*h100:8')
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.errors import TopologyError
from shardlib.hardware.placement import used_shapes
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology


def island_of(machine: Topology, islands: int) -> Topology:
    """The machine that each of so many islands has; all of them are at work."""
    if islands == 1:
        return machine
    outer = machine.tiers[0]
    size = outer.devices
    if machine.name.endswith(".toml") or ":" not in machine.name:
        raise TopologyError(
            f"islands need a machine that has a spelling, and {machine.name!r} is described by a"
            " file\nTry: its spelling, such as '2*h100:8'"
        )
    if outer.kind == "torus":
        raise TopologyError(
            f"islands are whole slices, and {machine.name} is one\nTry:"
            f" topology='{islands}*{machine.name}', or a smaller slice {islands} times"
        )
    if size % islands:
        what = "devices" if len(machine.tiers) == 1 else "domains"
        raise TopologyError(
            f"{islands} islands do not divide the {size} {what} of {machine.name}\nTry: a number of"
            f" islands that divides {size}"
        )
    left = size // islands
    tiers = (*_of(outer, left, inner=len(machine.tiers) > 1), *machine.tiers[1:])
    part = replace(machine, name=_spelled(machine, left), tiers=tiers, alone=1.0)
    return replace(part, alone=min(machine.alone, float(part.devices)))


def used_by(machine: Topology, islands: int, devices: int) -> Topology:
    """The machine of the devices that islands use: where some of each idle, the others alone, so
    that what islands lie on stays what joins them.
    """
    island = island_of(machine, islands)
    if devices == island.devices:
        return machine
    used = used_shapes(devices, island)
    assert used is not None, f"{devices} devices are no part of {island.name}"
    outer = machine.tiers[0]
    if len(used) == len(machine.tiers):
        shapes = ((islands * used[0][0],), *used[1:])
    else:  # an island has nothing of what joins them
        shapes = ((islands,), *used)
    tiers = tuple(
        replace(tier, shape=shape, wrap=()) if tier.kind != "torus" or shape != tier.shape else tier
        for tier, shape in zip((outer, *machine.tiers[1:]), shapes, strict=True)
    )
    return replace(machine, tiers=tiers, alone=min(machine.alone, float(islands * devices)))


def _of(outer: Tier, left: int, *, inner: bool) -> tuple[Tier, ...]:
    """What an island has of the outermost tier; nothing of a network that it does not cross."""
    return () if left == 1 and inner else (replace(outer, shape=(left,)),)


def _spelled(machine: Topology, left: int) -> str:
    """The spelling of an island that has so many places of the outermost tier."""
    joined, star, inner = machine.name.partition("*")
    if "@" in joined:
        return inner if left == 1 else f"{left}@{joined.partition('@')[2]}{star}{inner}"
    domain = machine.name.rpartition("*")[2]
    if len(machine.tiers) == 1 or "*" not in machine.name:
        return f"{domain.partition(':')[0]}:{left}"
    return domain if left == 1 else f"{left}*{domain}"
