"""Prices cases with shardlib's own cost model: the traced reference model, its plan pinned.

A case is priced on a machine of boundless memory, so that runs that do not fit have a price too;
whether they fit is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import optax

from benchmarks.published.cases import Case
from benchmarks.published.software import memory_of
from shardlib.annotation.model import no_mesh
from shardlib.annotation.model import read as read_model
from shardlib.cost.pricing import combine
from shardlib.cost.stages import Meshes, Plans, step_costs
from shardlib.cost.tables import Pricer
from shardlib.graph import Problem
from shardlib.machines.topology import Topology, place
from shardlib.models.config import TransformerConfig
from shardlib.models.transformer import build, example_batch
from shardlib.planner.assembly import price
from shardlib.planner.parts import Candidate
from shardlib.planner.plan import Plan
from shardlib.planner.search import ranked, search
from shardlib.planner.workload import Workload, prepare
from shardlib.tracing.trace import trace

#: Memory that everything fits into, bytes.
BOUNDLESS = 1 << 60
#: Stacks whose kernels a compiler fuses.
COMPILED: frozenset[str] = frozenset({"maxtext-tpu", "maxtext-gpu", "alpa"})
#: Starts of the names of stacks that launch a program as a whole, and not kernel by kernel.
LAUNCHED_WHOLE: tuple[str, ...] = ("maxtext", "pax", "alpa")
#: Logical axes that a tensor axis cuts.
TENSOR: tuple[str, ...] = ("heads", "kv_heads", "mlp", "vocab")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is predicted of a case.

    Attributes:
        step_s: seconds of a step.
        arrays: bytes of a device that arrays take at the peak.
        fits: whether arrays and the runtime fit into the device.
        plan: what was priced.
    """

    step_s: float
    arrays: float
    fits: bool
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A case whose decisions are made, to be priced again under other figures.

    Attributes:
        load: the prepared model.
        topology: the machine, of boundless memory.
        candidate: the published plan.
        eight_bit, routed: whether some matmuls run in 8 bits, and whether there are experts.
    """

    load: Workload
    topology: Topology
    candidate: Candidate
    eight_bit: bool
    routed: bool

    def seconds(self, values: Mapping[str, Any]) -> float:
        """Predicted seconds of a step with some figures of
        `shardlib.cost.roofline.Efficiency` replaced; as `price`, without the memory where
        seconds do not depend on it.
        """
        one, load = self.candidate, self.load
        how = one.decisions
        topology = replace(self.topology, efficiency=values)
        if how.remat_layers or how.offload:
            return float(price(load, topology, one).step_seconds[0])
        pricer = Pricer(topology, load.profile)
        placed = place(how.mesh, pricer.topology, how.axis_order)
        assert placed is not None, "the candidate was priced on this machine"
        c = Meshes.placed([(how.mesh, placed)], [how.microbatches], pricer.topology)
        work, rest = (
            pricer.tally_terms(
                ((item.segment, term) for item in items for term in item.terms(one.choice)),
                c.degrees,
                len(load.layer_counts),
            )
            for items in (load.programs[how.remat, one.routes].work, load.stored)
        )
        plan = Plans(decisions=how, model=load.model, pricer=pricer, meshes=c)
        return float(
            combine(step_costs(work, rest, [], load.model, pricer, c), plan).step_seconds[0]
        )

    def figures(self) -> tuple[str, ...]:
        """Figures of `shardlib.cost.roofline.Efficiency` that the price depends on."""
        name = self.load.profile.name
        eager = (
            *(() if name in COMPILED else ("unfused",)),
            *(() if name.startswith(LAUNCHED_WHOLE) else ("dispatch_s", "gap_s")),
        )
        return (
            "matmul",
            *eager,
            "memory",
            "attention",
            "microbatch_s",
            "fast",
            "slow",
            *(("misaligned",) if not self.routed else ()),
            *(("eight_bit",) if self.eight_bit else ()),
            *(("grouped",) if self.routed else ()),
        )


class Bench:
    """Traced models and their workloads, each made once."""

    def __init__(self) -> None:
        self._problems: dict[tuple[TransformerConfig, int, int, float], Problem] = {}
        self._loads: dict[tuple[int, Any, str], Workload] = {}

    def predict(self, case: Case) -> Prediction:
        """Prices a case."""
        plan = self.plan(case, case.pins, boundless(case.topology))
        arrays = float(plan.estimate.device_bytes.peak)
        needed = memory_of(arrays, case.software.runtime, "nvidia-smi")
        return Prediction(
            step_s=plan.estimate.step_seconds,
            arrays=arrays,
            fits=needed <= case.topology.chip.hbm_bytes,
            plan=plan,
        )

    def quote(self, case: Case) -> Quote:
        """Finds the decision of a case."""
        machine = boundless(case.topology)
        load = self._load(case, machine)
        first = next(
            ranked(
                load.problem,
                machine,
                {"attention": "traced", **case.pins, **published_rules(load, case.pins)},
                workload=load,
                profile=case.software.stack,
            )
        )
        return Quote(
            load=load,
            topology=machine,
            candidate=first.candidate,
            eight_bit=bool(case.software.stack.matmul_dtype),
            routed=case.config.experts is not None,
        )

    def plan(self, case: Case, pins: Mapping[str, Any], machine: Topology) -> Plan:
        """The best plan of a case under some pins."""
        load = self._load(case, machine)
        return search(
            load.problem,
            machine,
            {"attention": "traced", **pins, **published_rules(load, pins)},
            workload=load,
            profile=case.software.stack,
        )

    def _load(self, case: Case, machine: Topology) -> Workload:
        problem = self._problem(case)
        key = (id(problem), case.software.stack, machine.chip.vendor)
        if key not in self._loads:
            self._loads[key] = prepare(problem, machine.chip.vendor, case.software.stack)
        return self._loads[key]

    def _problem(self, case: Case) -> Problem:
        key = (case.config, case.batch, case.seq, case.software.state_bytes)
        if key not in self._problems:
            self._problems[key] = _traced(case)
        return self._problems[key]


def published_rules(load: Workload, pins: Mapping[str, Any]) -> dict[str, Any]:
    """What a published tensor axis cuts, as a pin: heads, the hidden width of feed-forward layers
    and the vocabulary (Megatron-LM, arXiv:1909.08053, section 3); and what `pins` add.

    Nothing is pinned where no tensor axis is, or where it does not divide them.
    """
    ways = pins.get("mesh", {}).get("tensor", 1)
    colouring = load.colouring
    cut = [name for name in TENSOR if name in colouring.colours]
    if (
        ways == 1
        or colouring.batch_colour is None
        or any(colouring.colours[name].divisor % ways for name in cut)
    ):
        return {}
    rules: dict[str, Any] = {
        colouring.batch_colour: ("data", "fsdp", "expert"),
        **dict.fromkeys(cut, "tensor"),
    }
    if pins.get("sequence_parallel") and colouring.sequence_colour is not None:
        rules[colouring.sequence_colour] = "tensor"
    return {"rules": rules | pins.get("rules", {})}


def boundless(machine: Topology) -> Topology:
    """The machine with memory without end."""
    return replace(
        machine,
        name=f"{machine.name} without end of memory",
        chip=replace(machine.chip, hbm_bytes=BOUNDLESS, reserved_bytes=0),
    )


def _traced(case: Case) -> Problem:
    init, loss = build(case.config)
    with no_mesh():
        model = read_model(init)
        problem = trace(
            model,
            loss,
            example_batch(case.config, case.batch, case.seq),
            optimizer=optax.adam(1e-4),
        ).problem
    parameters = tuple(
        replace(p, state_bytes_per_element=case.software.state_bytes) for p in problem.parameters
    )
    return replace(problem, model=case.config.name, parameters=parameters)
