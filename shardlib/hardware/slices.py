"""How many devices of a machine a mesh may use, and the slice that part of a TPU machine is.

>>> from shardlib.hardware.topology import topology
>>> slice_of(topology("v5e:2x4"), 4).name, slice_of(topology("2*v5e:4x4"), 16).name
('v5e:2x2', 'v5e:4x4')
>>> slice_of(topology("v5e:2x4"), 2) is None
True
>>> device_counts(topology("3*a100:2")), device_counts(topology("v5e:4x4"))
((6, 4, 3, 2, 1), (16, 8, 4, 2, 1))
"""

from __future__ import annotations

import itertools
import math

from shardlib.hardware.placement import divisors, used_shapes
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology

#: Machines of no more devices may be used with any number of them.
SMALL = 64


def slice_of(machine: Topology, devices: int) -> Topology | None:
    """The slice of a TPU machine that so many devices are, where a mesh leaves others idle: a
    program runs on that, and the compiler takes no part of a slice. None where all are used, or
    where it knows no slice of that size (its hosts have 2 x 2 chips).
    """
    used = used_shapes(devices, machine) if machine.chip.vendor == "google" else None
    torus_tiers = [i for i, tier in enumerate(machine.tiers) if tier.kind == "torus"]
    if used is None or len(torus_tiers) != 1 or devices == machine.devices:
        return None
    shape, chips = machine.tiers[torus_tiers[0]].shape, math.prod(used[torus_tiers[0]])
    sizes = [[n for n in range(1, side + 1) if chips % n == 0] for side in shape]
    blocks = [
        block
        for block in itertools.product(*sizes)
        if math.prod(block) == chips and block[0] % 2 == block[1] % 2 == 0
    ]
    if not blocks:
        return None
    block = "x".join(map(str, min(blocks, key=lambda shape: (max(shape), shape))))
    slices = math.prod(math.prod(shape) for shape in used[: torus_tiers[0]])
    return parse_topology(f"{f'{slices}*' if slices > 1 else ''}{machine.chip.name}:{block}")


def device_counts(topology: Topology, batch: int = 1) -> tuple[int, ...]:
    """Numbers of devices that meshes are tried on, the largest first: on a small machine all that
    have a place on its links, on a large one those that divide all of them, and the largest product
    of a divisor of the batch and a power of two. Part of a TPU slice that does not divide it is
    none, but where it is a slice of its own, which the compiler knows.

    The numbers do not depend on pins, so that what pins leave is part of what is searched without
    them.
    """
    total = topology.devices
    torus = any(tier.kind == "torus" for tier in topology.tiers)

    def usable(devices: int) -> bool:
        has_slice = not torus or total % devices == 0 or slice_of(topology, devices) is not None
        return has_slice and used_shapes(devices, topology) is not None

    if total <= SMALL:
        return tuple(n for n in range(total, 0, -1) if usable(n))
    sizes = {n for n in divisors(total) if usable(n)}
    others = {
        odd << twos
        for odd in divisors(batch, total)
        if odd % 2
        for twos in range((total // odd).bit_length())
    }
    along = next((n for n in sorted(others, reverse=True) if usable(n)), 1)
    return tuple(sorted({*sizes, along}, reverse=True))
