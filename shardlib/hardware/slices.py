"""The slice that part of a TPU machine is.

>>> from shardlib.hardware.topology import topology
>>> slice_of(topology("v5e:2x4"), 4).name, slice_of(topology("2*v5e:4x4"), 16).name
('v5e:2x2', 'v5e:4x4')
>>> slice_of(topology("v5e:2x4"), 2) is None
True
"""

from __future__ import annotations

import itertools
import math

from shardlib.hardware.placement import used_shapes
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology


def slice_of(topology: Topology, devices: int) -> Topology | None:
    """The slice of a TPU machine that so many devices are, where a mesh leaves others idle: a
    program runs on that, and the compiler takes no part of a slice. None where all are used, or
    where it knows no slice of that size (its hosts have 2 x 2 chips).

    Args:
        topology: the machine.
        devices: that a mesh uses, the innermost ones.
    """
    used = used_shapes(devices, topology) if topology.chip.vendor == "google" else None
    at = [i for i, tier in enumerate(topology.tiers) if tier.kind == "torus"]
    if used is None or len(at) != 1 or devices == topology.devices:
        return None
    shape, chips = topology.tiers[at[0]].shape, math.prod(used[at[0]])
    sizes = [[n for n in range(1, most + 1) if chips % n == 0] for most in shape]
    blocks = [
        block
        for block in itertools.product(*sizes)
        if math.prod(block) == chips and block[0] % 2 == block[1] % 2 == 0
    ]
    if not blocks:
        return None
    block = "x".join(map(str, min(blocks, key=lambda one: (max(one), one))))
    slices = math.prod(math.prod(one) for one in used[: at[0]])
    return parse_topology(f"{f'{slices}*' if slices > 1 else ''}{topology.chip.name}:{block}")
