"""Which collectives does a compiled program run, how often, and how many bytes do they move?

Reads the text of optimised HLO (`compiled.as_text()`) with the reader of `shardlib.verification`,
without regard to mesh axes, so that programs of different meshes can be compared.

>>> text = '''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
... }
... '''
>>> collectives(text)
[HloCollective(kind='all-reduce', bytes=128, group=4, count=1)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardlib.axes import MeshShape
from shardlib.verification.hlo.found import wire_bytes
from shardlib.verification.hlo.hlo import parse
from shardlib.verification.hlo.traffic import read_traffic


@dataclass(frozen=True, order=True)
class HloCollective:
    """Collectives of one kind and size.

    Attributes:
        kind: one of `shardlib.collective.KINDS`.
        bytes: bytes that a device holds of the result.
        group: devices in a group.
        count: executions of one run of the program.
    """

    kind: str
    bytes: int
    group: int
    count: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return wire_bytes(self.kind, self.bytes, self.group) * self.count


def collectives(text: str) -> list[HloCollective]:
    """All collectives of a program, alike ones counted together.

    Raises:
        ValueError: some part of the text could not be read.
    """
    traffic = read_traffic(text, MeshShape(data=parse(text).partitions))
    if traffic.problems:
        raise ValueError(
            f"the compiled program could not be read: {'; '.join(traffic.problems[:3])}"
        )
    counted: Counter[HloCollective] = Counter()
    for found in traffic.found:
        counted[HloCollective(found.kind, found.bytes, found.members, 0)] += found.count
    return sorted(replace(found, count=count) for found, count in counted.items())


def summary(found: Iterable[HloCollective]) -> dict[str, dict[str, float]]:
    """Count, result bytes and wire bytes by kind, and the sum under "total"."""
    table: dict[str, dict[str, float]] = {}
    for item in found:
        for key in (item.kind, "total"):
            row = table.setdefault(key, {"count": 0, "bytes": 0, "wire_bytes": 0.0})
            row["count"] += item.count
            row["bytes"] += item.bytes * item.count
            row["wire_bytes"] += item.wire_bytes
    return table
