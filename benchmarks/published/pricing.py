"""Prices cases with shardlib's own cost model: the traced reference model, its plan pinned.

A case is priced on a machine of boundless memory, so that runs that do not fit have a price too; whether they fit is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import optax

from benchmarks.published.cases import Case
from benchmarks.published.software import memory_of
from shardlib.annotation import activations
from shardlib.annotation.read import read as read_model
from shardlib.graph.problem import Problem
from shardlib.hardware.topology import Topology
from shardlib.models.config import TransformerConfig
from shardlib.models.transformer import build, example_batch
from shardlib.planning.plan import Plan
from shardlib.planning.search import prepare, search
from shardlib.planning.workload import Workload
from shardlib.tracing.trace import trace

#: Memory that everything fits into, bytes.
BOUNDLESS = 1 << 60


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


class Bench:
    """Traced models and their workloads, each made once."""

    def __init__(self) -> None:
        self._problems: dict[tuple[TransformerConfig, int, int, float], Problem] = {}
        self._loads: dict[tuple[int, Any, str], Workload] = {}

    def predict(self, case: Case) -> Prediction:
        """Prices a case.

        Raises:
            ShardlibError: the planner has no such plan.
        """
        plan = self.plan(case, case.pins, boundless(case.topology))
        arrays = float(plan.estimate.device_bytes.peak)
        needed = memory_of(arrays, case.software.runtime, "nvidia-smi")
        return Prediction(step_s=plan.estimate.step_seconds, arrays=arrays, fits=needed <= case.topology.chip.hbm_bytes, plan=plan)

    def plan(self, case: Case, pins: Mapping[str, Any], machine: Topology) -> Plan:
        """The best plan of a case under some pins."""
        problem = self._problem(case)
        key = (id(problem), case.software.stack, machine.chip.vendor)
        if key not in self._loads:
            self._loads[key] = prepare(problem, machine.chip.vendor, case.software.stack)
        return search(problem, machine, pins, load=self._loads[key], stack=case.software.stack)

    def _problem(self, case: Case) -> Problem:
        key = (case.config, case.batch, case.seq, case.software.state_bytes)
        if key not in self._problems:
            self._problems[key] = _traced(case)
        return self._problems[key]


def boundless(machine: Topology) -> Topology:
    """The machine with memory without end."""
    return replace(machine, name=f"{machine.name} without end of memory", chip=replace(machine.chip, hbm_bytes=BOUNDLESS, reserved_bytes=0))


def _traced(case: Case) -> Problem:
    init, loss = build(case.config)
    with activations.no_mesh():
        model = read_model(init)
        problem = trace(model, loss, example_batch(case.config, case.batch, case.seq), optimizer=optax.adam(1e-4)).problem
    parameters = tuple(replace(p, state_bytes_per_element=case.software.state_bytes) for p in problem.parameters)
    return replace(problem, model=case.config.name, parameters=parameters)
