"""Collective instructions of a compiled program with their executions, and what they come to.

>>> wire_bytes("all-reduce", 800, members=8)
1400.0
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from shardlib.collective import Collective


def wire_bytes(kind: str, size: int, members: int) -> float:
    """Bytes that a device sends for one collective, by ring algorithms (NVIDIA/nccl-tests
    doc/PERFORMANCE.md).

    Args:
        size: bytes that a device holds of the result.
    """
    share = (members - 1) / members
    return size * {
        "all-reduce": 2 * share,
        "reduce-scatter": members - 1.0,
        "collective-permute": 1.0,
    }.get(kind, share)


#: Collectives that add up.
REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Collectives of one instruction.

    Attributes:
        kind: one of `KINDS`.
        bytes: bytes that a device holds of the result.
        dtypes: element types of the result.
        axes: mesh axes; empty where the groups are no product of axes.
        members: devices of a group; 2 for a permute.
        count: executions in one step.
        op_name: the operation of the user's program.
        name: the instruction.
    """

    kind: str
    bytes: int
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    members: int
    count: int
    op_name: str
    name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return wire_bytes(self.kind, self.bytes, self.members) * self.count


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a program communicates and how long its compiler thinks it computes.

    Attributes:
        found: every collective instruction with its executions.
        cycles: the compiler's own estimate of a step, `estimated_cycles` weighted by trip counts; 0
            where it gives none.
        aliased: results that take the place of an argument.
        problems: what could not be read.
    """

    found: tuple[Found, ...]
    cycles: int
    aliased: int
    problems: tuple[str, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Alike ones counted together, the most bytes first."""
        counts: Counter[Collective] = Counter()
        for item in self.found:
            counts[
                Collective(
                    kind=item.kind, axes=item.axes, bytes=item.bytes, count=0, cause=item.op_name
                )
            ] += item.count
        merged = [replace(collective, count=count) for collective, count in counts.items()]
        return tuple(sorted(merged, key=lambda c: (-c.total_bytes, c.kind, c.axes, c.cause)))

    @property
    def reductions(self) -> tuple[tuple[str, tuple[str, ...], str, int], ...]:
        """(kind, axes, dtype, bytes of the results of a step) of every kind of reduction; of
        reductions of several dtypes at once, all of them.
        """
        sizes = Counter[tuple[str, tuple[str, ...], str]]()
        for item in self.found:
            if item.kind in REDUCTIONS:
                sizes[item.kind, item.axes, "+".join(item.dtypes)] += item.bytes * item.count
        return tuple((*key, size) for key, size in sorted(sizes.items()))


@dataclass(frozen=True)
class Executions:
    """Collectives and cycles of a part of a program, which add up and multiply by trip counts."""

    found: tuple[Found, ...] = ()
    cycles: int = 0

    def __add__(self, other: Executions) -> Executions:
        return Executions(self.found + other.found, self.cycles + other.cycles)

    def __mul__(self, times: int) -> Executions:
        return Executions(
            tuple(replace(item, count=item.count * times) for item in self.found),
            self.cycles * times,
        )

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(item.bytes * item.count for item in self.found)
