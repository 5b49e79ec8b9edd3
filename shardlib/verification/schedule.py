"""Seconds that a TPU or GPU waits for its collectives, by the compiler's schedule.

The text of a compiled program is in the order of its schedule. Kernels run one after the other: as
long as the TPU compiler estimates, or at the rates of the chip, for the GPU compiler estimates
nothing in its text. Collectives run one after the other beside them, each from its start on, and at
its done the kernels wait until it has ended. One without a start is waited for at once; one that
TPU fusions carry along starts with the first of them and is done with the last.

>>> from shardlib.verification.hlo import parse
>>> module = parse('''HloModule m, num_partitions=8, is_scheduled=true
...
... ENTRY %main (p: f32[1024,1024], q: f32[8]) -> f32[1024,1024] {
...   %p = f32[1024,1024]{1,0} parameter(0)
...   %q = f32[8]{0} parameter(1)
...   %s = (f32[8]{0}, f32[64]{0}) all-gather-start(%q), replica_groups=[1,8]<=[8]
...   %d = f32[1024,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
...   %e = f32[64]{0} all-gather-done(%s)
...   ROOT %n = f32[1024,1024]{1,0} negate(%d)
... }
... ''')
>>> rates = Rates(flops_per_s=lambda dtype: 2.0**31 / 3, bytes_per_s=2.0**33)
>>> run = schedule(module, rates, {"s": 4.0})
>>> run.kernels, run.waited
(3.0009765625, {'s': 1.0})
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shardlib.cost.framework import XLA
from shardlib.cost.roofline import efficiency_of
from shardlib.machines.topology import Topology
from shardlib.verification.hlo import (
    Computation,
    HloError,
    Instruction,
    Module,
    array_bytes,
    arrays,
)
from shardlib.verification.traffic import estimated_cycles, trip_count

#: Names of dtypes in HLO whose peak a chip states by another name.
_DTYPES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "s8": "int8", "f64": "float64"}
#: Instructions that run no kernel.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
_CHAIN = re.compile(r"chain_id=\"?(\w+)")
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that the kernels of a chip reach.

    Attributes:
        flops_per_s: of matmuls, by dtype.
        bytes_per_s: of memory.
        cycles_per_s: of a chip whose compiler estimates cycles; 0 for others.
    """

    flops_per_s: Callable[[str], float]
    bytes_per_s: float
    cycles_per_s: float = 0.0

    @classmethod
    def of(cls, topology: Topology, cycles_per_s: float) -> Rates:
        """The rates of a topology's chip for programs of XLA."""
        chip = topology.chip
        reached = efficiency_of(chip.name, chip.vendor, XLA.name, dict(topology.efficiency))
        return cls(
            flops_per_s=lambda dtype: chip.peak(dtype) * reached.peak_share(dtype),
            bytes_per_s=chip.hbm_bytes_per_s * reached.memory,
            cycles_per_s=cycles_per_s,
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The seconds of a compiled program.

    Attributes:
        kernels: of all kernels.
        waited: by collective instruction, in all executions: in which no kernel runs.
    """

    kernels: float
    waited: Mapping[str, float]

    @property
    def exposed(self) -> float:
        """Seconds in which no kernel runs because of a collective."""
        return sum(self.waited.values())


def schedule(module: Module, rates: Rates, seconds: Mapping[str, float]) -> Schedule:
    """Runs the schedule of a program.

    Args:
        seconds: of one execution of each collective, by the name of its instruction.
    """
    run = _Run(module=module, rates=rates, seconds=seconds)
    run.computation(module.entry, 1.0)
    return Schedule(kernels=run.kernels, waited=dict(run.waited))


@dataclass
class _Run:
    """Attributes:
    clock: seconds since the start.
    free: when the links are free.
    ends: when collectives under way end, by what starts them.
    """

    module: Module
    rates: Rates
    seconds: Mapping[str, float]
    kernels: float = 0.0
    clock: float = 0.0
    free: float = 0.0
    ends: dict[str, tuple[float, str]] = field(default_factory=dict)
    nested: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def computation(self, name: str, times: float) -> None:
        """Runs a computation, whose every execution stands for so many."""
        body = self.module.computations[name]
        last = {chain: i.name for i in body.instructions for _, chain in self.inside(i)}
        for instruction in body.instructions:
            inside = self.inside(instruction)
            for name, chain in inside:
                if name in self.seconds:
                    self.start(chain or name, name)
            self.instruction(instruction, body, times)
            for name, chain in inside:
                if not chain or last[chain] == instruction.name:
                    self.wait(chain or name, times)

    def instruction(self, instruction: Instruction, body: Computation, times: float) -> None:
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            trips = trip_count(instruction, body, self.module) or 1
            self.computation(called["body"], times * trips)
        elif opcode == "conditional":
            self.computation(instruction.branches[0], times)
        elif opcode == "call":
            self.computation(called["to_apply"], times)
        elif (name := self.started(instruction)) is not None:
            self.start(instruction.name, name)
            if not opcode.endswith("-start"):
                self.wait(instruction.name, times)
        elif opcode.endswith("-done"):
            for operand in instruction.operands:
                self.wait(operand, times)
        elif opcode not in _FREE and not opcode.endswith("-start"):
            taken = kernel_seconds(instruction, body, self.module, self.rates)
            self.kernels += taken * times
            self.clock += taken

    def started(self, instruction: Instruction) -> str | None:
        """The name of the collective that an instruction is, or starts."""
        names = [instruction.name]
        if instruction.opcode == "async-start":
            names += self.module.computations[instruction.called["calls"]].by_name
        return next((name for name in names if name in self.seconds), None)

    def inside(self, fusion: Instruction) -> tuple[tuple[str, str], ...]:
        """The collectives, and pieces of such, inside of a fusion, with their chains."""
        name = fusion.called.get("calls", "") if fusion.opcode == "fusion" else ""
        if name not in self.nested:
            body = self.module.computations.get(name)
            pairs = list[tuple[str, str]]()
            for i in body.instructions if body else ():
                is_piece = _chain(i) or i.name in self.seconds
                pairs += [(i.name, _chain(i))] if is_piece else self.inside(i)
            self.nested[name] = tuple(pairs)
        return self.nested[name]

    def start(self, start: str, name: str) -> None:
        """Starts a collective."""
        self.free = max(self.clock, self.free) + self.seconds[name]
        self.ends[start] = (self.free, name)

    def wait(self, start: str, times: float) -> None:
        """Waits for a collective that was started."""
        if start in self.ends:
            end, name = self.ends.pop(start)
            waiting = max(0.0, end - self.clock)
            self.clock += waiting
            self.waited[name] += waiting * times


def _chain(instruction: Instruction) -> str:
    """The chain of a collective that TPU fusions carry along; "" for others."""
    match = _CHAIN.search(instruction.rest)
    return f"chain {match[1]}" if match else ""


def kernel_seconds(
    instruction: Instruction, body: Computation, module: Module, rates: Rates
) -> float:
    """Seconds of a kernel: the compiler's estimate; or its matmuls at their rate, or the bytes that
    it reads and writes at that of memory, whichever takes longer.
    """
    if rates.cycles_per_s:
        return estimated_cycles(instruction) / rates.cycles_per_s
    inner = module.computations.get(instruction.called.get("calls", ""))
    parts, around = (inner.instructions, inner) if inner else ((instruction,), body)
    flops = sum(_dot_seconds(part, around, module, rates) for part in parts)
    try:
        moved = sum(_traffic(instruction, body, inner))
    except HloError:
        moved = 0.0
    return max(flops, moved / rates.bytes_per_s)


def _dot_seconds(
    instruction: Instruction, body: Computation, module: Module, rates: Rates
) -> float:
    if instruction.opcode == "fusion":  # a nested one
        inner = module.computations[instruction.called["calls"]]
        return sum(_dot_seconds(part, inner, module, rates) for part in inner.instructions)
    if instruction.opcode != "dot":
        return 0.0
    (_, dims), *_ = arrays(instruction.shape)
    (dtype, left), *_ = arrays(body.by_name[instruction.operands[0]].shape)
    contracted = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
    flops = 2.0 * math.prod(dims) * math.prod(left[int(dim)] for dim in contracted)
    return flops / rates.flops_per_s(_DTYPES.get(dtype, "bfloat16"))


def _traffic(
    instruction: Instruction, body: Computation, inner: Computation | None
) -> Iterable[int]:
    """Bytes of the operands and of the result, of each only the part that is read or written."""
    if inner is None:
        operands = () if instruction.opcode in _SLICES else instruction.operands
        shapes = (instruction.shape, *(body.by_name[name].shape for name in operands))
        yield from map(array_bytes, shapes)
        return
    updated = {
        i.operands[0]: array_bytes(inner.by_name[i.operands[1]].shape)
        for i in inner.instructions
        if i.opcode == "dynamic-update-slice"
    }
    for part in inner.instructions:
        if part.opcode == "parameter":
            users = [i for i in inner.instructions if part.name in i.operands]
            if part.name in updated:
                yield updated[part.name]
            elif users and all(i.opcode in _SLICES and part.name == i.operands[0] for i in users):
                yield sum(array_bytes(i.shape) for i in users)
            else:
                yield array_bytes(part.shape)
    yield sum(updated.values()) or array_bytes(instruction.shape)
