"""Single collective instructions of a compiled program: how large, along which axes, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from shardlib.axes import MeshShape
from shardlib.verification.hlo.asynchronous import result_shape
from shardlib.verification.hlo.causes import Causes, short_name
from shardlib.verification.hlo.found import Executions, Found
from shardlib.verification.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from shardlib.verification.hlo.hlo import Computation, Instruction, Module
from shardlib.verification.hlo.shapes import HloError, array_bytes, arrays, elements

#: What the runtime that joins TPU slices calls its transfers. A program for several slices is that
#: of one slice: it numbers the devices of the slice, and what crosses to other slices is a pair of
#: send and receive.
ACROSS_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


class Instructions:
    """What is known of the collective instructions of a program, and what could not be read."""

    def __init__(
        self,
        module: Module,
        mesh: MeshShape,
        arguments: Sequence[str],
        slices: Sequence[Sequence[int]],
    ):
        self.module, self.mesh = module, mesh
        #: Mesh positions [slices, devices that the program numbers].
        self.positions = np.array(
            (
                slices
                if len(slices) > 1 and module.partitions == len(slices[0])
                else [range(mesh.devices)]
            ),
            np.int64,
        )
        self.problems: list[str] = list(module.problems)
        self.causes = Causes(module, arguments)
        self.devices = self.positions.shape[1]

    def collective(
        self, instruction: Instruction, kind: str, result: Instruction, body: Computation
    ) -> Executions:
        try:
            shape = result_shape(result)
            if kind == "collective-permute":
                pairs = source_target_pairs(
                    instruction.attribute("source_target_pairs"), self.devices
                )
                axes, members = (
                    axes_of_pairs(self.positions[0][pairs], self.mesh),
                    (2 if len(pairs) else 1),
                )
            else:
                groups = replica_groups(instruction.attribute("replica_groups"), self.devices)
                axes, members = (
                    axes_of_groups(self.positions[0][groups], self.mesh),
                    groups.shape[1],
                )
            if members < 2:
                return Executions()
            if axes is None:
                self.problems.append(
                    f"the groups of {instruction.name} are no product of mesh axes:"
                    f" {instruction.attribute('replica_groups')[:80]}"
                )
            collective = Found(
                kind=kind,
                bytes=array_bytes(shape),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays(shape)})),
                axes=axes or (),
                members=members,
                count=1,
                op_name=self.causes.of(instruction, body),
                name=result.name,
            )
        except HloError as error:
            self.problems.append(f"{instruction.name}: {error}")
            return Executions()
        return Executions((collective,))

    def across_slices(self, instruction: Instruction) -> Executions:
        """A collective between the devices that have the same number in every slice."""
        word = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
        kind = ACROSS_SLICES.get(word[1]) if word else None
        axes = axes_of_groups(self.positions.T, self.mesh)
        try:
            if kind is None or axes is None or len(self.positions) < 2:
                raise HloError(
                    "an unknown transfer between slices,"
                    f" {instruction.attribute('frontend_attributes')[:120]}"
                )
            shape = elements(instruction.shape)[0]
            collective = Found(
                kind=kind,
                bytes=array_bytes(shape),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays(shape)})),
                axes=axes,
                members=len(self.positions),
                count=1,
                op_name=short_name(instruction.op_name),
                name=instruction.name,
            )
        except HloError as error:
            self.problems.append(f"{instruction.name}: {error}")
            return Executions()
        return Executions((collective,))
