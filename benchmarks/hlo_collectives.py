"""The collectives that a compiled program runs, their executions and bytes.

Reads the text of optimised HLO (`compiled.as_text()`) with the reader of `shardlib.verify`,
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardlib.layout import MeshShape
from shardlib.verification.hlo import Module, parse
from shardlib.verification.traffic import read_traffic, wire_bytes


@dataclass(frozen=True, order=True)
class HloCollective:
    """Collectives of one kind and size.

    Attributes:
        kind: one of `shardlib.layout.KINDS`.
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
    """All collectives of a program, alike ones counted together."""
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


def by_overlap(
    text: str, mesh: MeshShape, slices: Sequence[Sequence[int]] = ()
) -> tuple[dict[str, dict[str, int]], int]:
    """Executions and instructions of the collectives of a compiled TPU program by kind, those that
    a device waits for and those that overlap with kernels, and the compiler's cycles of all kernels.

    Collectives overlap that have a start and a done, or that fusions carry along while they compute.
    """
    module = parse(text)
    traffic = read_traffic(module, mesh, (), slices)
    beside = _beside_kernels(module)
    words = ("waited", "overlapped", "waited_instructions", "overlapped_instructions")
    table: dict[str, dict[str, int]] = {}
    for found in sorted(traffic.found, key=lambda one: one.kind):
        row = table.setdefault(found.kind, dict.fromkeys(words, 0))
        word = "overlapped" if found.name in beside else "waited"
        row[word] += found.count
        row[f"{word}_instructions"] += 1
    return table, traffic.cycles


def _beside_kernels(module: Module) -> set[str]:
    """Names of instructions that are started, or that stand in what is started."""
    started = {
        instruction.called["calls"]
        for body in module.computations.values()
        for instruction in body.instructions
        if instruction.opcode == "async-start" and "calls" in instruction.called
    }
    found = set[str]()
    for name, body in module.computations.items():
        carried = any("AsyncCollective" in one.rest for one in body.instructions)
        found |= {
            one.name
            for one in body.instructions
            if one.opcode.endswith("-start") or carried or name in started
        }
    return found
