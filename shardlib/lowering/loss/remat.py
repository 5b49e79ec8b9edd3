"""Which layers of a loss recompute, where a plan does not say the same of all of them?

A plan names layer groups by what the paths of their parameters begin with, as planning does.
Here the loops of the traced loss, and layers that are written out, are found under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import PlanError
from shardlib.lowering.reading.loss import LossReading
from shardlib.planning.plan import Plan
from shardlib.planning.space.remat_policies import names_of_classes
from shardlib.tracing.program import Program, has_matmul
from shardlib.tracing.rewriting.repeats import find_repeats


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one class in a traced loss.

    Attributes:
        path: of their loop, or of the first equation of layers that are written out.
        count: how many there are.
        parameters: which they use.
    """

    path: str
    count: int
    parameters: frozenset[int]


def apart(
    plan: Plan, program: Program, loss: LossReading, paths: Sequence[str]
) -> Mapping[str, tuple[str, int]]:
    """Policy, and the number of layers that follow it, of all layers by their path; empty where all
    follow `plan.remat`. With stages, the numbers are of the fullest stage.
    """
    if not plan.remat_layers and not plan.remat_classes:
        return {}
    groups = layers(program, loss)
    if not plan.remat_classes:
        here = [fullest_stage(plan, group.count) for group in groups]
        share = plan.remat_layers / sum(here)
        return {
            group.path: (plan.remat, math.ceil(share * count - 1e-9))
            for group, count in zip(groups, here, strict=True)
        }
    names = names_of_classes([[paths[i] for i in sorted(group.parameters)] for group in groups])
    classes = {name: (policy, count) for name, policy, count in plan.remat_classes}
    lost = sorted(classes.keys() ^ set(names))
    if lost:
        raise PlanError(
            f"the plan rematerialises by layer group ({', '.join(classes)}), and the loss of"
            f" {plan.model} has the classes {', '.join(names) or 'none'}\nTry: another plan for"
            " this model, or one policy for all layers: remat"
        )
    return {group.path: classes[name] for group, name in zip(groups, names, strict=True)}


def fullest_stage(plan: Plan, count: int) -> int:
    """How many of a number of layers the stage has that has the most; all where there are none."""
    virtual = plan.virtual_stages if plan.mesh["stage"] > 1 else 1
    return virtual * math.ceil(count / (plan.mesh["stage"] * virtual))


def layers(program: Program, loss: LossReading) -> list[Layers]:
    """The layers of a loss, by loop and by stretch of repeated equations, in their order."""
    groups: list[Layers] = []
    reads: dict[str, set[int]] = {}
    for step in loss.steps:
        if step.program is loss.program:
            reads.setdefault(step.equation.path, set()).update(
                view.parameter for view in step.views if view is not None
            )
    runs = {program.equations[run.start].path: run for run in find_repeats(program)}
    inside = {
        equation.path
        for run in runs.values()
        for equation in program.equations[run.start : run.stop]
    }
    for equation in program.equations:
        if equation.path in runs:
            run = runs[equation.path]
            used = frozenset(
                i
                for inner in program.equations[run.start : run.stop]
                for i in reads.get(inner.path, ())
            )
            groups.append(Layers(path=equation.path, count=run.count, parameters=used))
        elif equation.name == "scan" and equation.path not in inside and has_matmul(equation.eqn):
            groups.append(
                Layers(
                    path=equation.path,
                    count=equation.params["length"],
                    parameters=frozenset(reads.get(equation.path, ())),
                )
            )
    return [group for group in groups if group.parameters]
