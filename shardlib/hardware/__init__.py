"""What machines look like: chips, the links between them, and how a mesh lies on the links."""

from shardlib.hardware.chip import Chip
from shardlib.hardware.cluster import Device, cluster
from shardlib.hardware.placement import Placement, Span, device_order, place
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology, topology

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
