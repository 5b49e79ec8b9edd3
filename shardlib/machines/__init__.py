"""Machines: chips, the links between them, and the placement of a mesh on the links.

catalog.py   the catalogue of chips and links, each figure with its source
chips.py     chips, tiers of links, and products of both
topology.py  topologies: spelling, mesh axes on links, islands, slices, clusters
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
