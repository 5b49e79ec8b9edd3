"""What machines look like: chips, the links between them, and how a mesh lies on the links.

chip.py        what one device does by itself
tier.py        one level of the links of a machine
topology.py    a machine: its chips and tiers
spelling.py    "16*h100:8" as chips and tiers
plain_data.py  topologies of TOML files and of JSON
catalog        the figures of chips and links, with sources
products.py    chips with the links that they are sold with
hosts.py       how many devices a host has
devices.py     the topology that JAX devices are
family.py      smaller and larger machines of a kind
placement.py   how mesh axes lie on tiers
cluster.py     clusters of unlike devices
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
