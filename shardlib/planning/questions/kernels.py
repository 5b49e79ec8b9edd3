"""Which kernels does a step have, and how near are they to the roofline?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.machine.roofline import kernel_seconds
from shardlib.cost.tables.quantities import Q
from shardlib.cost.terms.local_sizes import local
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Amount, Compute
from shardlib.errors import InfeasibleError
from shardlib.exchanges.values import Exact
from shardlib.graph import Op
from shardlib.hardware.islands import island_of
from shardlib.planning.answers.kernels import Kernels, KernelTime
from shardlib.planning.assembly.candidate_price import OnMachine
from shardlib.planning.islands.spread import inside
from shardlib.planning.plan import Plan, source_of
from shardlib.planning.questions.counterfactual import pinned, roomy
from shardlib.planning.space.programs import Program

Array = np.ndarray


def kernels(plan: Plan) -> Kernels:
    """The kernels of a step of a plan, equal ones added up, the slowest first. Their seconds add up
    to the plan's `estimate.seconds.compute`.
    """
    machine = _on_machine(plan)
    sums: dict[tuple[str, ...], KernelTime] = {}
    for program, shares in machine.programs():
        for kernel in _of(program, shares, machine):
            key = kernel.name, kernel.kind, kernel.phase, kernel.dtype, f"{kernel.intensity:.4g}"
            sums[key] = _added(sums[key], kernel) if key in sums else kernel
    chip = machine.pricer.topology.chip
    dtypes = dict.fromkeys(kernel.dtype for kernel in sums.values())
    return Kernels(
        chip=chip.name,
        peak_flops_per_s=tuple((dtype, chip.peak(dtype)) for dtype in dtypes),
        bytes_per_s=chip.hbm_bytes_per_s,
        kernels=tuple(sorted(sums.values(), key=lambda kernel: (-kernel.seconds, kernel.name))),
    )


def _on_machine(plan: Plan) -> OnMachine:
    """The plan as the search knows it."""
    source = source_of(plan)
    topology, pins = source.topology, pinned(plan)
    if not isinstance(pins.exchange, Exact):
        topology, pins = island_of(topology, pins.exchange.islands), inside(pins)
    first = next(source.under(pins).ranked(roomy(topology), slack=1.0), None)
    if first is None:  # it was priced before
        raise InfeasibleError("the plan cannot be priced again")
    return OnMachine.of(source.load, topology, first.candidate)


@dataclass(frozen=True, kw_only=True)
class _Local:
    """What one device has of an amount."""

    at: OnMachine

    def __call__(self, amount: Amount) -> Array:
        return local(amount, self.at.c.shapes)


def _of(program: Program, shares: Array, machine: OnMachine) -> Iterator[KernelTime]:
    """The kernels of a program in the part of the layers that it runs."""
    facts, pricer, decisions = program.facts, machine.pricer, machine.candidate.decisions
    here = _Local(at=machine)
    factor = pricer.factors.get(Q.COMPUTE, 1.0)
    for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
        part = float(shares[item.segment])
        if not part:
            continue
        outside = item.segment in (OUTSIDE_LAYERS, len(shares) + OUTSIDE_LAYERS)
        constants = pricer.outside if outside else pricer.constants
        for term in item.terms(machine.candidate.choice):
            if not isinstance(term, Compute):
                continue
            if term.heads is not None and not term.heads.counts(decisions.mesh["tensor"]):
                continue
            once = replace(term, trips=1)
            times = term.trips * part * decisions.microbatches / decisions.mesh["stage"]
            seconds = kernel_seconds(once, here, pricer.topology.chip, constants)
            yield KernelTime(
                name=_name(facts.graph.ops[kernel.op], term, here),
                kind=term.kind,
                phase=_phase(facts.graph.ops[kernel.op]),
                dtype=term.dtype,
                count=times,
                flops=float(here(term.flops)[0]) * times,
                bytes=sum(float(here(amount)[0]) for amount in term.traffic) * times,
                seconds=float(seconds[0]) * factor * times,
            )


def _added(first: KernelTime, second: KernelTime) -> KernelTime:
    return replace(
        first,
        count=first.count + second.count,
        flops=first.flops + second.flops,
        bytes=first.bytes + second.bytes,
        seconds=first.seconds + second.seconds,
    )


def _phase(op: Op) -> str:
    if "rematted" in op.scope or "checkpoint" in op.scope:
        return "rematerialised"
    return "backward" if "transpose(" in op.scope else "forward"


def _name(op: Op, term: Compute, here: _Local) -> str:
    """The op's place in the model without what differentiation adds, and what it computes."""
    words = op.scope.replace("transpose(", "").replace("jvp(", "").replace(")", "")
    place = "/".join(
        part for part in words.split("/") if part and part not in ("rematted_computation", "remat")
    )
    what = op.kind
    if term.matmul is not None:
        rows, columns, depth = (round(float(here(amount)[0])) for amount in term.matmul.dims)
        what = f"matmul {rows:,} x {depth:,} x {columns:,}"
    return f"{place}/{what}" if place else what
