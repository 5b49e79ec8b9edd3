"""A tier: one level of the links of a machine, such as the ICI torus of a slice or the network
between hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.errors import TopologyError, raise_all
from shardlib.untrusted.json_types import JsonObject

KINDS: tuple[str, ...] = ("torus", "mesh", "switch", "network", "memory")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Links of one kind.

    Attributes:
        name: what people call it.
        kind: "torus" (neighbours only, one link a dim), "mesh" (a link from everyone to everyone: a
            group has those between its members), "switch" or "network" (everyone reaches everyone
            through one port), or "memory" (simulated devices of one process; the latency is that of
            a whole collective).
        shape: devices or domains along each dim; one dim unless it is a torus.
        wrap: for each dim, whether the last is a neighbour of the first; False unless it is a
            torus.
        bytes_per_s: peak rate in one direction: of the link in each dim for a torus, of a device's
            port, or of all its links in a mesh, otherwise.
        latency_s: time of one hop or step that carries no data.
        efficiency: part of the rate that large collectives reach.
        sources: where the figures come from.

    Raises:
        TopologyError: the fields do not fit each other.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes_per_s: float
    latency_s: float = 0.0
    wrap: tuple[bool, ...] = ()
    efficiency: float = 1.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "wrap", tuple(self.wrap) or (False,) * len(self.shape))
        object.__setattr__(self, "sources", tuple(self.sources))
        failures = (
            [f"kind is {self.kind!r}; kinds are {', '.join(KINDS)}"]
            if self.kind not in KINDS
            else []
        )
        if not self.shape or any(type(n) is not int or n < 1 for n in self.shape):
            failures.append(f"shape is {list(self.shape)}; it needs integers of at least 1")
        if self.kind in KINDS[1:] and len(self.shape) != 1:
            failures.append(f"shape is {list(self.shape)}; a {self.kind} has one dim")
        if len(self.wrap) != len(self.shape):
            failures.append(f"wrap has {len(self.wrap)} entries for {len(self.shape)} dims")
        if any(self.wrap) and self.kind != "torus":
            failures.append(f"wrap is set, which only a torus has; the kind is {self.kind!r}")
        if not self.bytes_per_s > 0:
            failures.append(f"bytes_per_s is {self.bytes_per_s}; it must be positive")
        if self.latency_s < 0:
            failures.append(f"latency_s is {self.latency_s}; it must not be negative")
        if not 0 < self.efficiency <= 1:
            failures.append(f"efficiency is {self.efficiency}; it must be above 0 and at most 1")
        if failures:
            raise_all(TopologyError, f"tier {self.name!r} is not usable", failures)

    @property
    def devices(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def reached_bytes_per_s(self) -> float:
        """The rate that large collectives reach."""
        return self.bytes_per_s * self.efficiency

    def to_json(self) -> JsonObject:
        """The tier as plain data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "wrap": list(self.wrap),
            "bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s,
            "efficiency": self.efficiency,
            "sources": list(self.sources),
        }
