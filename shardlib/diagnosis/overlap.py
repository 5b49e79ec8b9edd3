"""What hides each collective in the compiler's schedule, or why nothing does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology
from shardlib.verification.hlo import Computation, HloError, Instruction, Module, elements
from shardlib.verification.schedule import Rates, Schedule, schedule
from shardlib.verification.traffic import (
    InstructionTraffic,
    Scheduled,
    ScheduleReader,
    Traffic,
    once,
    result_shape,
)

_CHAIN = re.compile(r"chain_id=\"?(\w+)")
#: GPU programs split every collective; of one that waits at once the compiler says so.
_WAITS = '"is_sync":true'


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What hides a collective.

    Attributes:
        seconds: on the links, in all executions; 0 without a topology.
        exposed: of those, behind nothing; None where the compiler's text gives no times.
        sentence: what it hides behind, or why nothing hides it.
    """

    seconds: float
    exposed: float | None
    sentence: str


def overlaps(
    module: Module,
    traffic: Traffic,
    mesh: MeshShape,
    *,
    axes: tuple[str, ...],
    topology: Topology | None,
    cycles_per_s: float,
    slices: int = 1,
) -> tuple[Mapping[str, Overlap], float]:
    """What hides every collective, by the name of its instruction, and the seconds of all kernels;
    0 where they are not known.

    Args:
        axes: order of the mesh axes on the links.
        cycles_per_s: of a chip whose compiler estimates cycles; 0 for others.
        slices: TPU slices; the text of a program for several is that of one.
    """
    seconds = once(traffic, mesh, topology, axes) if topology else dict[str, float]()
    reader = _Reader(module=module, mesh=mesh, vendor=topology.chip.vendor if topology else "")
    split = {} if slices > 1 else reader.scheduled()
    run = None
    if topology is not None and (cycles_per_s or reader.vendor == "nvidia"):
        run = schedule(module, Rates.of(topology, cycles_per_s), seconds)
    return {
        item.name: reader.overlap(item, split.get(item.name), seconds, run)
        for item in traffic.found
    }, run.kernels if run else 0.0


@dataclass
class _Reader:
    """Attributes:
    vendor: of the chips; "" where that is not known.
    """

    module: Module
    mesh: MeshShape
    vendor: str

    def __post_init__(self) -> None:
        self.schedule = ScheduleReader(module=self.module, mesh=self.mesh)
        self.where: dict[str, tuple[Instruction, Computation]] = {}
        self.callers: dict[str, str] = {}
        self.chains: dict[str, list[Instruction]] = defaultdict(list)
        for body in self.module.computations.values():
            for instruction in body.instructions:
                self.where[instruction.name] = instruction, body
                if instruction.opcode in ("fusion", "async-start"):
                    self.callers[instruction.called.get("calls", "")] = instruction.name
        for instruction, body in self.where.values():
            link = _CHAIN.search(instruction.attribute("frontend_attributes"))
            if link and body.name in self.callers:
                self.chains[link[1]].append(self.where[self.callers[body.name]][0])

    def scheduled(self) -> dict[str, Scheduled]:
        """The collectives as they stand in the text, by name."""
        bodies = self.module.computations.values()
        return {one.name: one for body in bodies for one in self.schedule.collectives(body)}

    def overlap(
        self,
        item: InstructionTraffic,
        split: Scheduled | None,
        times: Mapping[str, float],
        run: Schedule | None,
    ) -> Overlap:
        instruction, _ = self.where[item.name]
        seconds = times.get(item.name, 0.0) * item.count
        exposed = run.waited.get(item.name, seconds) if run else None
        link = _CHAIN.search(instruction.attribute("frontend_attributes"))
        if link and (chain := self.chains[link[1]]):
            said = f"asynchronous, carried along by {len(chain)} kernels"
        elif split is None or not split.split or _WAITS in instruction.rest:
            exposed, said = seconds, f"synchronous: {self.why_synchronous(item)}"
        elif split.matmuls:
            said = f"asynchronous, behind {split.matmuls} kernels with matmuls"
        elif split.cycles:
            said = "asynchronous, behind other work"
        else:
            said = f"asynchronous, behind no matmul: {self.why_synchronous(item)}"
        return Overlap(seconds=seconds, exposed=exposed, sentence=said)

    def why_synchronous(self, item: InstructionTraffic) -> str:
        """Why no matmul hides a collective, as far as the text tells."""
        if self.vendor == "cpu":
            return "the CPU compiler splits no collective"
        instruction, body = self.where[item.name]
        while body.name in self.callers:
            instruction, body = self.where[self.callers[body.name]]
        matmuls = [i for i in body.instructions if self.schedule.multiplies(i)]
        if not matmuls:
            return "no independent work: there is no matmul beside it"
        related = {*_ancestors(instruction, body), *_descendants(instruction, body)}
        free = [i for i in matmuls if i.name not in related and i is not instruction]
        combined = _combined(self.where[item.name][0])
        if not free and combined > 1:
            return f"combined from {combined} arrays, which every matmul beside it makes or needs"
        if not free:
            return "no independent work: every matmul beside it makes its operand or needs it"
        return (
            f"the compiler put none of the {len(free)} independent kernels with matmuls beside it"
        )


def _combined(instruction: Instruction) -> int:
    """Arrays that a collective moves."""
    try:
        return len(elements(result_shape(instruction)))
    except HloError:
        return 1


def _ancestors(instruction: Instruction, body: Computation) -> Iterator[str]:
    waiting = [*instruction.operands]
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name not in seen and name in body.by_name:
            seen.add(name)
            yield name
            waiting += body.by_name[name].operands


def _descendants(instruction: Instruction, body: Computation) -> Iterator[str]:
    reached = {instruction.name}
    for other in body.instructions:  # operands come before their users
        if not reached.isdisjoint(other.operands):
            reached.add(other.name)
            yield other.name
