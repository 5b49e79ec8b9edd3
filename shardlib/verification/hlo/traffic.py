"""Collectives that a compiled program runs in one step: how often, how large, along which mesh
axes and why.

Follows calls from the entry, weighs the bodies of loops by their trip counts and the branches of
conditionals by how often they are taken (where the text does not say, the branch that moves most
always is), and counts an asynchronous pair once. TPU programs hide reduce-scatters
in fusions called `all-reduce-scatter`, and in permutes (`loops/windowed_matmuls.py`).

>>> traffic = read_traffic('''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4] all-reduce(%p), replica_groups=[2,4]<=[8], metadata={op_name="args[0]"}
... }
... ''', MeshShape(data=2, tensor=4), arguments=["params.w"])
>>> found = traffic.collectives[0]
>>> found.kind, found.axes, found.bytes, found.count, found.cause
('all-reduce', ('tensor',), 128, 1, 'params.w')
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import KINDS
from shardlib.verification.hlo.asynchronous import continued, result_shape
from shardlib.verification.hlo.causes import Causes, short_name
from shardlib.verification.hlo.found import Executions, Found, Traffic
from shardlib.verification.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from shardlib.verification.hlo.hlo import Computation, Instruction, Module, parse
from shardlib.verification.hlo.loops.branches import taken, turns
from shardlib.verification.hlo.loops.trip_counts import trip_count
from shardlib.verification.hlo.loops.whole_numbers import AnyTurn, Entry, Scope
from shardlib.verification.hlo.loops.windowed_matmuls import as_reduce_scatters
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


#: Kinds that XLA has beyond those of `KINDS`, and the one that each is counted as.
ALSO = {"ragged-all-to-all": "all-to-all"}


#: Scope of loops that run where the routing of tokens is skewed, and are not in the cost of a step
#: (`shardlib.lowering.experts.overflow_rounds`).
OVERFLOW = "shardlib_overflow"


#: Opcodes whose called computation is applied to single elements.
APPLIED = frozenset(
    {
        "reduce",
        "reduce-window",
        "scatter",
        "select-and-scatter",
        "sort",
        "map",
        *KINDS,
        "all-reduce-start",
        "reduce-scatter-start",
    }
)


def read_traffic(
    text: str | Module,
    mesh: MeshShape,
    arguments: Sequence[str] = (),
    slices: Sequence[Sequence[int]] = (),
) -> Traffic:
    """Reads a compiled program."""
    return _Reader(parse(text) if isinstance(text, str) else text, mesh, arguments, slices).read()


class _Reader:
    """One walk over a program; remembers what it has read of each computation."""

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
        self.known: dict[str, Executions] = {}
        #: The computation that is read, where more is known of it; and its conditionals whose
        #: branches were counted for all turns of their loop.
        self.scope: Scope | None = None
        self.counted: dict[str, tuple[int, ...]] = {}

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

    def read(self) -> Traffic:
        if self.module.partitions not in (1, self.devices):
            self.problems.append(
                f"the program runs on {self.module.partitions} devices, the mesh {self.mesh} has"
                f" {self.mesh.devices}"
            )
        if (entry := self.module.computations.get(self.module.entry)) is not None:
            self.scope = Entry(self.module, entry)
        cost = self.computation(self.module.entry) if self.module.entry else Executions()
        return Traffic(
            found=as_reduce_scatters(cost.found, self.mesh),
            cycles=cost.cycles,
            aliased=self.module.aliased,
            problems=tuple(dict.fromkeys(self.problems)),
        )

    def computation(self, name: str) -> Executions:
        if name not in self.known:
            self.known[name] = (
                Executions()
            )  # a computation that calls itself is no HLO; this ends the walk
            body = self.module.computations.get(name)
            if body is None:
                self.problems.append(f"the computation {name!r} is called and not there")
            else:
                self.known[name] = self.known[name] + self.total(body)
        return self.known[name]

    def total(self, body: Computation) -> Executions:
        collectives: list[Found] = []
        cycles = 0
        for instruction in body.instructions:
            cost = self.instruction(instruction, body)
            collectives += cost.found
            cycles += cost.cycles
        return Executions(tuple(collectives), cycles)

    def instruction(self, instruction: Instruction, body: Computation) -> Executions:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in KINDS or kind in ALSO:
            if continued(instruction, body):
                return Executions()
            return self.collective(instruction, ALSO.get(kind, kind), instruction, body)
        if kind.startswith("collective-") and not kind.endswith("-done"):
            self.problems.append(f"a collective of the unknown kind {kind!r}: {instruction.name}")
        if opcode == "recv" and "_xla_megascale_transfer_type=" in instruction.rest:
            return self.across_slices(instruction)
        if opcode == "while":
            return self.loop(instruction, body)
        if opcode == "conditional":
            return self.conditional(instruction, body)
        executions = Executions((), _cycles(instruction))
        if opcode == "fusion":
            return executions + self.fusion(instruction, body)
        if opcode in APPLIED or opcode.endswith(("-done", "-update")):
            return executions
        inside = [
            self.computation(called)
            for word, called in instruction.called.items()
            if word in ("calls", "to_apply")
        ]
        return sum(inside, executions)

    def conditional(self, instruction: Instruction, body: Computation) -> Executions:
        if instruction.name in self.counted:
            return Executions()
        in_scope = self.scope is not None and self.scope.computation is body
        counts = taken(instruction, [self.scope] if in_scope and self.scope else (), self.module)
        if counts is not None:
            return self.branches(instruction, counts)
        return max(
            (self.computation(branch) for branch in instruction.branches),
            key=lambda cost: (cost.bytes, cost.cycles),
            default=Executions(),
        )

    def branches(self, conditional: Instruction, counts: Sequence[int]) -> Executions:
        """The branches of a conditional, each as often as it is taken."""
        return sum(
            (
                self.computation(branch) * count
                for branch, count in zip(conditional.branches, counts, strict=True)
                if count
            ),
            Executions(),
        )

    def turns(self, loop: Instruction, around: Computation, trips: int) -> Executions:
        """The body of a loop, as often as it runs."""
        name, outside = loop.called.get("body", ""), self.scope
        body, conditional_cost = self.module.computations.get(name), Executions()
        if name in self.known or body is None or outside is None:
            return self.computation(name) * trips if name else Executions()
        if outside.computation is around:
            asking = [
                instruction
                for instruction in body.instructions
                if instruction.opcode == "conditional"
            ]
            scopes = turns(loop, body, outside, trips, self.module) if asking else ()
            for conditional in asking:
                if (counts := taken(conditional, scopes, self.module)) is not None:
                    self.counted[conditional.name] = counts
                    conditional_cost += self.branches(conditional, counts)
            self.scope = AnyTurn(self.module, body, loop, outside)
        cost = self.computation(name) * trips + conditional_cost
        self.scope = outside
        return cost

    def loop(self, instruction: Instruction, body: Computation) -> Executions:
        self.causes.carry(instruction, body)
        trips = trip_count(instruction, body, self.module)
        inside = self.turns(instruction, body, 1 if trips is None else trips)
        if trips is None and OVERFLOW in instruction.op_name:
            return Executions()
        if trips is None and (inside.found or inside.cycles):
            self.problems.append(
                f"the trip count of the loop {instruction.name} is unknown; it is counted once"
            )
        return inside

    def fusion(self, instruction: Instruction, body: Computation) -> Executions:
        """Collectives inside a fusion; an all-reduce inside one that is called all-reduce-scatter
        is a reduce-scatter of the fusion's result.
        """
        name = instruction.called.get("calls", "")
        inner = self.module.computations.get(name)
        if inner is None:
            self.problems.append(
                f"the fusion {instruction.name} calls {name!r}, which is not there"
            )
            return Executions()
        if name.startswith("all-reduce-scatter"):
            reductions = [i for i in inner.instructions if i.opcode == "all-reduce"]
            if len(reductions) == 1:
                return self.collective(reductions[0], "reduce-scatter", instruction, body)
        return Executions(self.computation(name).found, 0)


#: What the TPU compiler writes where it has no estimate: the largest integer of 64 bits.
NO_ESTIMATE = 2**63 - 1


def _cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(match[1]) if match and int(match[1]) < NO_ESTIMATE else 0
