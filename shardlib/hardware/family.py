"""Smaller and larger machines of the same kind.

A topology stands for its family: GPUs in fast domains of the same size, or slices of the same TPU.
`of_size` gives the member with so many devices, in the shape in which such machines are had: as
many full NVLink domains as needed; the slice nearest to a cube (or square), and several slices
beyond the largest.

>>> [of_size("16*h100:8", n).name for n in (4, 8, 64)]
['h100:4', 'h100:8', '8*h100:8']
>>> of_size("v5e:16x16", 32).name, of_size("v5p:4x4x4", 8192).name
('v5e:4x8', '2*v5p:16x16x16')
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shardlib.errors import TopologyError
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.products import Product
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.hardware.topology import topology as parse_topology

#: Longest side of a slice in a pod of 4x4x4 cubes, chips: the shortest of a v5p pod of 16x20x28
#: (jax-ml/scaling-book, tpus.md), and all of a v4 pod's.
LONGEST_SIDE = 16
#: From so many chips on, slices of three dims are made of 4x4x4 cubes, whose rings close
#: (jax-ml/scaling-book, tpus.md).
CUBE = 64


def of_size(member: TopologyLike, devices: int) -> Topology:
    """The machine of the same family with another number of devices."""
    machine = parse_topology(member)
    if devices < 1:
        raise TopologyError(f"a machine of {devices} devices was asked for; it has at least 1")
    if devices == machine.devices:
        return machine
    product = CATALOG.get(machine.chip.name)
    if (
        product is None
        or product.chip != machine.chip
        or ":" not in machine.name
        or machine != parse_topology(machine.name)
    ):
        return _resized(machine, devices)
    return parse_topology(
        _slices(product, devices) if product.dims > 1 else _domains(machine, product, devices)
    )


def _domains(machine: Topology, product: Product, devices: int) -> str:
    """GPUs: domains as large as the family's, or the fewest equal ones where they do not divide."""
    size = machine.tiers[-1].devices if len(machine.tiers) > 1 else product.most
    count = next(
        number for number in range(math.ceil(devices / size), devices + 1) if devices % number == 0
    )
    return (
        f"{count}*{product.chip.name}:{devices // count}"
        if count > 1
        else f"{product.chip.name}:{devices}"
    )


def _slices(product: Product, devices: int) -> str:
    """TPUs: one slice where there is one, else the fewest equal slices."""
    per_chip = product.chip.devices_per_chip
    chips, remainder = divmod(devices, per_chip)
    if remainder:
        raise TopologyError(
            f"{product.chip.name} has {per_chip} devices a chip, and {devices} devices are no whole"
            " number of chips"
        )
    for count in (number for number in range(1, chips + 1) if chips % number == 0):
        shape = _shape(product, chips // count)
        if shape is not None:
            spelled = f"{product.chip.name}:{'x'.join(map(str, shape))}"
            return f"{count}*{spelled}" if count > 1 else spelled
    raise AssertionError("one chip is a slice")


def _shape(product: Product, chips: int) -> tuple[int, ...] | None:
    """The shape of a slice nearest to a cube or square, its sides ascending; None where no slice
    has so many chips.
    """
    longest = product.full_ring or LONGEST_SIDE
    candidates = [sides for sides in _sides(chips, product.dims, longest) if chips <= product.most]
    if product.dims == 3 and chips >= CUBE:
        candidates = [sides for sides in candidates if all(side % 4 == 0 for side in sides)]
    return min(candidates, key=lambda sides: sides[::-1], default=None)


def _sides(number: int, dims: int, longest: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """Every ascending product of `dims` factors of at most `longest`."""
    if dims == 1:
        if smallest <= number <= longest:
            yield (number,)
        return
    for first in (side for side in range(smallest, longest + 1) if number % side == 0):
        for factors in _sides(number // first, dims - 1, longest, first):
            yield (first, *factors)


def _resized(machine: Topology, devices: int) -> Topology:
    """A machine of one's own, with more or fewer of its outermost parts."""
    outer, inner = machine.tiers[0], machine.tiers[1:]
    domain = machine.devices // outer.devices
    if len(outer.shape) > 1 or devices % domain:
        what = (
            f"{domain} devices each"
            if len(outer.shape) == 1
            else "a torus, whose size does not change alone"
        )
        raise TopologyError(
            f"{machine.name} has no member of {devices} devices: its outermost parts are"
            f" {what}\nTry: a multiple of {domain}"
        )
    return replace(
        machine,
        name=f"{machine.name} ({devices} devices)",
        tiers=(replace(outer, shape=(devices // domain,)), *inner),
    )
