"""Seconds that a compiled program waits for its collectives, by the TPU compiler's schedule.

A collective that has a start and a done hides behind the kernels between the two, for as long as
the compiler estimates that these take; of one that fusions with matmuls carry along, start and done
are the first and the last fusion with its `chain_id`. All others are waited for. That two of them
may share the same kernels, or the same links, is not seen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from shardlib.verification.hlo import Computation, Instruction, Module
from shardlib.verification.report import Key
from shardlib.verification.traffic import InstructionTraffic

#: What the TPU compiler writes where it has no estimate.
NO_ESTIMATE = 2**63 - 1


def waited_seconds(
    module: Module,
    found: Iterable[InstructionTraffic],
    seconds: Callable[[InstructionTraffic], float],
    cycles_per_s: float,
) -> dict[Key, float]:
    """Seconds of a step in which no kernel runs because of a collective, by kind and mesh axes;
    `seconds` are those of one execution of a collective.
    """
    hidden, waited = windows(module), defaultdict[Key, float](float)
    for one in found:
        behind = hidden.get(one.name, 0) / cycles_per_s
        waited[one.kind, one.axes] += one.count * max(0.0, seconds(one) - behind)
    return dict(waited)


def windows(module: Module) -> dict[str, int]:
    """Cycles of the kernels that a collective hides behind, by the name of the collective."""
    return {
        name: cycles
        for body in module.computations.values()
        for at in range(len(body.instructions))
        for name, cycles in _started(module, body, at)
    }


def _started(module: Module, body: Computation, at: int) -> Iterator[tuple[str, int]]:
    """The collectives that an instruction starts, with the cycles until they are done."""
    start, later = body.instructions[at], body.instructions[at + 1 :]
    if start.opcode.endswith("-start"):
        done = _first(
            later, lambda one: one.opcode.endswith("-done") and start.name in one.operands
        )
        between = sum(map(_cycles, later[:done]))
        yield start.name, between
        if (inner := module.computations.get(start.called.get("calls", ""))) is not None:
            yield from ((one.name, between) for one in inner.instructions)
    elif start.opcode == "fusion":
        for name, chain in _chains(module, start, "AsyncCollectiveStart").items():
            done = _first(
                later,
                lambda one, chain=chain: (
                    chain in _chains(module, one, "AsyncCollectiveDone").values()
                ),
            )
            yield name, sum(map(_cycles, (start, *later[: done + 1])))


def _chains(module: Module, fusion: Instruction, target: str) -> dict[str, str]:
    """Name -> chain of the collectives that a custom call inside of a fusion starts or ends."""
    inner = module.computations.get(fusion.called.get("calls", ""))
    if inner is None:
        return {}
    found: dict[str, str] = {}
    for one in inner.instructions:
        if one.attribute("custom_call_target") == f'"{target}"':
            for name in one.operands:
                told = inner.by_name.get(name)
                chain = told and re.search(r'chain_id="(\d+)"', told.rest)
                if chain:
                    found[name] = chain[1]
        elif one.opcode == "fusion":
            found |= _chains(module, one, target)
    return found


def _first(later: tuple[Instruction, ...], is_it: Callable[[Instruction], bool]) -> int:
    return next((at for at, one in enumerate(later) if is_it(one)), 0)


def _cycles(instruction: Instruction) -> int:
    found = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else 0
