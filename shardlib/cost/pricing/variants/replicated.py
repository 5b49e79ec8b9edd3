"""Matmuls and convolutions that every device along a mesh axis computes in whole.

An axis of several devices that divides none of the FLOPs of an op makes no part of it faster: all
devices along it compute the same. Read from the same items that a step is priced by, so it holds
for any op and any reason: a dim that the axis does not divide, a dim with no colour, a rule that
leaves it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from shardlib.axes import BATCH_AXES, CONTEXT, EXPERT, TENSOR, MeshShape
from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.machine.roofline import kernel_seconds
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.stage_shares import shares_of
from shardlib.cost.pricing.sums import Model
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.local_sizes import local
from shardlib.cost.terms.terms import Amount, Compute, Term
from shardlib.graph import Op
from shardlib.propagation.assignment import Choice

Array = np.ndarray


def replicated(
    work: Iterable[tuple[Facts, Array]],
    choice: Choice,
    knobs: Knobs,
    mesh: MeshShape,
    c: Candidates,
    model: Model,
    pricer: Pricer,
) -> Mapping[tuple[str, ...], Mapping[str, float]]:
    """Seconds a step of matmuls and convolutions on one device, by the mesh axes that do not divide
    them and by what they are.
    """
    assert len(c) == 1
    shares = shares_of(knobs, model, c, pricer.profile)[:, 0]
    by_axes: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for facts, parts in work:
        names = _parameters(facts)
        for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
            op = facts.graph.ops[kernel.op]
            part = float(parts[item.segment]) * float(shares[item.segment])
            if op.category not in ("matmul", "convolution") or not part:
                continue
            for term in item.terms(choice):
                axes = _undivided(term, mesh)
                if axes and isinstance(term, Compute):
                    seconds = kernel_seconds(
                        term,
                        lambda amount: local(amount, c.shapes),
                        pricer.topology.chip,
                        pricer.constants,
                    )
                    by_axes[axes][_name(op, facts, names)] += (
                        float(seconds[0]) * term.trips * part * int(c.micro[0])
                    )
    return by_axes


def _undivided(term: Term, mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes of several devices that divide none of a kernel's FLOPs; stages divide layers, not
    ops.
    """
    if not isinstance(term, Compute):
        return ()
    flops: Amount = term.flops
    divides = {
        **dict.fromkeys(BATCH_AXES, flops.batch),
        EXPERT.name: flops.batch or flops.expert,
        CONTEXT.name: flops.context,
        TENSOR.name: flops.tensor,
    }
    return tuple(axis for axis, divided in divides.items() if mesh[axis] > 1 and not divided)


def _parameters(facts: Facts) -> dict[int, str]:
    """Paths of the parameters that values are views of."""
    return {value: facts.graph.values[source].path for value, source in facts.weights.items()}


def _name(op: Op, facts: Facts, parameters: Mapping[int, str]) -> str:
    """What an op is to people: the parameter that it uses, or else where the model has it."""
    if facts.gradients & set(op.results):
        return "gradients of weights"
    return (
        next((parameters[value] for value in op.operands if value in parameters), "")
        or op.scope
        or f"{op.kind} at equation {op.path}"
    )
