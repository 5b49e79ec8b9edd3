"""What machines look like: chips, the links between them, and how a mesh lies on the links.

catalog.py   the catalogue
chips.py     chips
topology.py  the machine that a plan is for, and how it is spelled
"""

from __future__ import annotations

from shardlib.machines.chips import Chip, Tier
from shardlib.machines.topology import (
    Device,
    Placement,
    Span,
    Topology,
    cluster,
    device_order,
    place,
    topology,
)

__all__ = [
    "Chip",
    "Device",
    "Placement",
    "Span",
    "Tier",
    "Topology",
    "cluster",
    "device_order",
    "place",
    "topology",
]
