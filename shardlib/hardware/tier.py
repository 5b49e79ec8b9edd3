"""A tier: one level of the links of a machine, such as the ICI torus of a slice or the network
between hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.collective import KINDS as COLLECTIVES
from shardlib.errors import TopologyError, raise_all
from shardlib.untrusted.json_types import JsonObject

KINDS: tuple[str, ...] = ("torus", "mesh", "switch", "network", "memory")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective as it was measured, with all devices at work.

    Attributes:
        kind: one of `shardlib.collective.KINDS`.
        ways: participants.
        latency_s: seconds of the smallest.
        seconds_per_byte: seconds that each byte of the full array adds: the gathered array, the
            operand of a reduce-scatter, the buffer, the message.

    Raises:
        TopologyError: the fields do not fit each other.
    """

    kind: str
    ways: int
    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        failures = (
            [f"kind is {self.kind!r}; kinds are {', '.join(COLLECTIVES)}"]
            if self.kind not in COLLECTIVES
            else []
        )
        if type(self.ways) is not int or self.ways < 2:
            failures.append(f"ways is {self.ways}; it needs an integer of at least 2")
        failures += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in ("latency_s", "seconds_per_byte")
            if not getattr(self, name) >= 0
        ]
        if failures:
            raise_all(TopologyError, f"exchange {self.kind!r} is not usable", failures)


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
        exchanges: collectives among the devices of a "memory" that were measured; they take the
            place of its rate and latency.
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
    exchanges: tuple[Exchange, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "exchanges", tuple(self.exchanges))
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
        if self.exchanges and self.kind != "memory":
            failures.append(
                f"exchanges are set, which only a memory has; the kind is {self.kind!r}"
            )
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
            **(
                {"exchanges": [dict(exchange.__dict__) for exchange in self.exchanges]}
                if self.exchanges
                else {}
            ),
            "sources": list(self.sources),
        }
