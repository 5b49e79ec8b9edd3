"""Which collectives does a compiled program run, how often, and how many bytes do they move?

Reads the text of optimised HLO (`compiled.as_text()`), follows calls, weighs the bodies of loops by their known trip counts,
and takes the larger branch of a conditional.

>>> text = '''
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
... }
... '''
>>> collectives(text)
[HloCollective(kind='all-reduce', bytes=128, group=4, count=1)]
>>> collectives(text.replace("[2,4]<=[8]", "mesh['data'=2,'tensor'=4], device_ids=([4,2]T(1,0)) {'tensor'}"))
[HloCollective(kind='all-reduce', bytes=128, group=4, count=1)]
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all", "collective-broadcast")
ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*(\((?:[^()]|\([^()]*\))*\)|\S+)\s+([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True, order=True)
class HloCollective:
    """Collectives of one kind and size.

    Attributes:
        kind: as XLA calls it.
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
        """Bytes that a device sends in all executions, by ring algorithms (NCCL tests, doc/PERFORMANCE.md)."""
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "reduce-scatter": self.group - 1.0, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.bytes * self.count


def collectives(text: str) -> list[HloCollective]:
    """All collectives of a program, alike ones counted together.

    Raises:
        ValueError: the text has no entry computation, or a loop with collectives has no known trip count.
    """
    computations, entry = _split(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    counted: Counter[HloCollective] = Counter()
    for found in _walk(entry, computations):
        everyone = int(partitions[1]) if partitions else 1  # what an empty list of groups means
        counted[replace(found, count=1, group=found.group or everyone)] += found.count
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


def _split(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current:
            computations[current].append(line)
    if not entry:
        raise ValueError("the text has no ENTRY computation; pass compiled.as_text()")
    return computations, entry


def _walk(name: str, computations: dict[str, list[str]]) -> Iterator[HloCollective]:
    for line in computations.get(name, []):
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        shape, opcode, rest = match.groups()
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            yield _collective(kind, shape, rest, started=opcode != kind)
        elif opcode == "conditional":
            yield from max((list(_walk(branch, computations)) for branch in _branches(rest)), key=lambda found: sum(c.bytes * c.count for c in found))
        elif opcode not in ("reduce", "sort", "scatter", "map", "reduce-window", "select-and-scatter"):
            trips = _TRIPS.search(rest) if opcode == "while" else None
            for called in _CALLED.findall(rest):
                for found in _walk(called, computations):
                    if opcode == "while" and trips is None:
                        raise ValueError(f"a loop with a {found.kind} in {called!r} has no known trip count")
                    yield replace(found, count=found.count * (int(trips[1]) if trips else 1))


def _branches(rest: str) -> list[str]:
    match = _BRANCHES.search(rest)
    assert match, rest
    return [name.strip().lstrip("%") for name in match[1].split(",")] if match[1] else [match[2], match[3]]


def _collective(kind: str, shape: str, rest: str, *, started: bool) -> HloCollective:
    sizes = [ITEMSIZE[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in _ARRAY.findall(shape)]
    size = sizes[-1] if started and kind in ("all-gather", "collective-permute") else sum(sizes)
    return HloCollective(kind, size, _group(kind, rest))


def _group(kind: str, rest: str) -> int:
    if kind == "collective-permute":
        return 2
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return len(listed[1].split(","))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return math.prod(_part(axis, sizes) for axis in mesh[2].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if not iota and "replica_groups={}" not in rest:
        raise ValueError(f"the groups of a {kind} are spelled in a way that is not known: {rest[:200]}")
    return int(iota[1]) if iota else 0


def _part(axis: str, sizes: dict[str, int]) -> int:
    """Size of "'x'", or of the sub-axis "'x':(2)4", whose own size stands last."""
    name, _, part = axis.strip().partition(":")
    return int(part.rpartition(")")[2]) if part else sizes[name.strip("'")]
