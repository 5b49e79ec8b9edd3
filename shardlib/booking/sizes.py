"""The sizes in which a kind of machine is had.

GPUs come in full fast domains, or one part of a domain; TPUs in slices, up to the largest, and in
several of the largest. Sizes are at most an eighth apart, where there are such machines.

>>> [machine.name for machine in machines("h100:8", 48)]
['h100:1', 'h100:2', 'h100:4', 'h100:8', '2*h100:8', '3*h100:8', '4*h100:8', '5*h100:8', '6*h100:8']
>>> [machine.name for machine in machines("v6e", 1024)][-4:]
['v6e:16x16', '2*v6e:16x16', '3*v6e:16x16', '4*v6e:16x16']
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from shardlib.errors import ArgumentError, TopologyError
from shardlib.hardware import topology as parse_topology
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.family import CUBE, of_size
from shardlib.hardware.topology import Topology

#: Steps of a doubling.
STEPS = 8


def spelled(text: str) -> str:
    """A member of a family, where only its chip is named: "v5p" is "v5p:4x4x4"."""
    return CATALOG[text].example if text in CATALOG else text


def machines(family: str | Topology, largest: int) -> list[Topology]:
    """Machines of a family, ascending."""
    member = parse_topology(spelled(family) if isinstance(family, str) else family)
    if "@" in member.name:
        raise ArgumentError(
            f"{member.name} names the link between its parts, and its sizes are not listed\nTry: a"
            " chip, or one fast domain of it: h100:8"
        )
    by_devices = {
        machine.devices: machine
        for devices in _counts(member, largest)
        if (machine := _member(member, devices)) is not None
    }
    if not by_devices:
        raise ArgumentError(
            f"{member.name} has no machine of at most {largest:,} devices\nTry: a larger limit"
        )
    return [by_devices[devices] for devices in sorted(by_devices)]


def _member(member: Topology, devices: int) -> Topology | None:
    """The machine of that size; None where there is none, or only in needlessly small slices."""
    try:
        machine = of_size(member, devices)
    except TopologyError:
        return None
    product = CATALOG.get(member.chip.name)
    if product is None or product.dims == 1 or machine.devices <= _slice(member):
        alone = ":" in machine.name and "*" not in machine.name
        return machine if product is None or product.dims == 1 or alone else None
    return machine if machine.devices % _slice(member) == 0 else None


def _slice(member: Topology) -> int:
    """Devices of the largest part inside of which links are fast, as the family is counted."""
    product = CATALOG.get(member.chip.name)
    if product is None or product.dims == 1:
        return member.devices // member.tiers[0].devices if len(member.tiers) > 1 else 1
    limit, per_chip = product.most, member.chip.devices_per_chip
    chips = max(
        (1 << power for power in range(limit.bit_length()) if 1 << power <= limit), default=1
    )
    while chips > 1:
        name = _name(member, chips * per_chip)
        if name is not None and "*" not in name:
            return chips * per_chip
        chips //= 2
    return per_chip


def _name(member: Topology, devices: int) -> str | None:
    try:
        return of_size(member, devices).name
    except TopologyError:
        return None


def _counts(member: Topology, largest: int) -> Iterator[int]:
    """Numbers of devices to ask for, whether or not there are such machines."""
    product = CATALOG.get(member.chip.name)
    if product is None:  # a machine of one's own, by its outermost parts
        yield from (unit for unit in _multiples(_slice(member), largest))
        return
    per_chip = member.chip.devices_per_chip
    if product.dims == 1:
        domain = member.tiers[-1].devices if len(member.tiers) > 1 else product.most
        yield from (n for n in _powers() if n < domain and n <= largest)
        yield from _multiples(domain, largest)
        return
    full = _slice(member)
    yield from (n * per_chip for n in _powers() if n * per_chip <= min(full, largest))
    if product.dims == 3:  # slices are made of cubes
        yield from _multiples(CUBE * per_chip, min(full, largest))
    yield from _multiples(full, largest)


def _powers() -> Iterator[int]:
    return (1 << power for power in itertools.takewhile(lambda p: p < 40, itertools.count()))


def _multiples(unit: int, largest: int) -> Iterator[int]:
    """Multiples of a unit up to a limit: all of the first, then at most an eighth apart."""
    count = 1
    while count * unit <= largest:
        yield count * unit
        count += max(1, (1 << int(math.log2(count))) // STEPS)
