"""Collectives of a compiled program that overlap with matrix products.

A compiler that hides a collective splits it in two, a start and a done, and schedules work between
them. The text of a compiled program is in the order of its schedule, so what stands between is what
the collective hides behind. A collective that is not split is waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import KINDS
from shardlib.verification.hlo.asynchronous import result_shape
from shardlib.verification.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from shardlib.verification.hlo.hlo import Computation, Instruction, Module, parse
from shardlib.verification.hlo.shapes import HloError, array_bytes

_CALLED = re.compile(r"gemm|matmul|cublas|conv", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One collective of a schedule, as often as it stands in the text: loops are not counted out.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that its groups span; () where they are no product of axes.
        bytes: that a device holds of the result.
        split: whether it has a start and a done.
        matmuls: kernels with matmuls between the two.
        cycles: that the compiler estimates for all between the two; 0 where it estimates nothing.
        operation: what of the user's program it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    split: bool
    matmuls: int
    cycles: int
    operation: str


def scheduled(text: str | Module, mesh: MeshShape) -> tuple[Scheduled, ...]:
    """The collectives of a compiled program, in the order of its text."""
    reader = _Reader(module=parse(text) if isinstance(text, str) else text, mesh=mesh)
    return tuple(
        collective
        for body in reader.module.computations.values()
        for collective in reader.collectives(body)
    )


@dataclass
class _Reader:
    module: Module
    mesh: MeshShape
    known: dict[str, bool] = field(default_factory=dict[str, bool])

    def collectives(self, body: Computation) -> Iterator[Scheduled]:
        """The collectives that stand in one computation."""
        for start, instruction in enumerate(body.instructions):
            inner = self._collective(instruction)
            if inner is None:
                continue
            between: list[Instruction] = []
            split = instruction.opcode.endswith("-start")
            if split:
                done = next(
                    (
                        i
                        for i in range(start + 1, len(body.instructions))
                        if instruction.name in body.instructions[i].operands
                        and body.instructions[i].opcode.endswith("-done")
                    ),
                    start,
                )
                between = list(body.instructions[start + 1 : done])
            kind = inner.opcode.removesuffix("-start")
            yield Scheduled(
                kind=kind,
                axes=self._axes(inner, kind),
                bytes=_bytes(inner),
                split=split,
                matmuls=sum(map(self._multiplies, between)),
                cycles=sum(map(_cycles, between)),
                operation=inner.op_name,
            )

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, or that it starts."""
        if instruction.opcode.removesuffix("-start") in KINDS:
            return instruction
        if instruction.opcode == "async-start":
            body = self.module.computations.get(instruction.called.get("calls", ""))
            return next((i for i in body.instructions if i.opcode in KINDS), None) if body else None
        return None

    def _axes(self, instruction: Instruction, kind: str) -> tuple[str, ...]:
        try:
            if kind == "collective-permute":
                return (
                    axes_of_pairs(
                        source_target_pairs(
                            instruction.attribute("source_target_pairs"), self.mesh.devices
                        ),
                        self.mesh,
                    )
                    or ()
                )
            return (
                axes_of_groups(
                    np.asarray(
                        replica_groups(instruction.attribute("replica_groups"), self.mesh.devices)
                    ),
                    self.mesh,
                )
                or ()
            )
        except HloError:
            return ()

    def _multiplies(self, instruction: Instruction) -> bool:
        """Whether an instruction computes a matmul."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return bool(_CALLED.search(instruction.attribute("custom_call_target")))
        name = instruction.called.get("calls", "")
        if not name or name not in self.module.computations:
            return False
        if name not in self.known:
            self.known[name] = False
            self.known[name] = any(
                map(self._multiplies, self.module.computations[name].instructions)
            )
        return self.known[name]


def _bytes(instruction: Instruction) -> int:
    try:
        return array_bytes(result_shape(instruction))
    except HloError:
        return 0


def _cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(match[1]) if match and int(match[1]) < 2**63 - 1 else 0
