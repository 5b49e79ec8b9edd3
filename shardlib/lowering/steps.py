"""A step that a user wrote, run under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.findings import Finding
from shardlib.jax_types import Value
from shardlib.layout import Layout, LogicalAxes
from shardlib.planner.layouts import at_rest
from shardlib.planner.plan import Plan
from shardlib.propagation.colours import Colouring
from shardlib.propagation.contractions import placements
from shardlib.tracing.steps import TracedStep

# --------------------------------------------------------------------------------------------------
# Shardings of a step's state, and of the values of the step.
#
# Weights live as the plan says. What follows a weight, as moments do, has the same shape and the
# same colours, and lives as the plan says of optimizer state. Activations and operands of
# contractions are pinned as in a loss (`shardlib.propagation.contractions`); gradients, which are
# values of the step here, as the plan says of them.

#: Of values by the path of what makes them, and the index of the result.
Pinned = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True)
class StepLayouts:
    """Layouts of a step.

    Attributes:
        state: of each array of the state, between steps.
        batch: of each array of the batch.
        values: of values of the step, see `shardlib.propagation.contractions`.
    """

    state: tuple[Layout, ...]
    batch: tuple[Layout, ...]
    values: Pinned


def layouts(traced: TracedStep, plan: Plan, colouring: Colouring) -> StepLayouts:
    """The layouts of a step under a plan."""
    graph, names = traced.problem.forward, colouring.forward
    planned = {parameter.path: parameter for parameter in plan.parameters}
    state: list[Layout] = []
    alike: dict[tuple[tuple[int, ...], LogicalAxes], Layout] = {}
    for path, value in zip(traced.paths, graph.inputs, strict=False):
        if path in planned and planned[path].trained:
            alike.setdefault((graph.values[value].shape, names[value]), planned[path].state)
    followers = set(traced.roles.followers)
    for index, path in enumerate(traced.paths):
        value = graph.inputs[index]
        shape = graph.values[value].shape
        if path in planned:
            state.append(planned[path].rest)
        elif index in followers:
            layout = alike.get((shape, names[value]))
            state.append(_follower(plan, names[value], shape) if layout is None else layout)
        else:
            state.append(Layout.replicated(len(shape)))
    batch = dict(plan.batch_layouts)
    return StepLayouts(
        state=tuple(state),
        batch=tuple(batch[path] for path, *_ in traced.problem.batch),
        values={
            **placements(graph, names, plan.rules, plan.mesh, colouring.batch_colour),
            **_gradients(traced, plan),
        },
    )


def _follower(plan: Plan, names: LogicalAxes, shape: tuple[int, ...]) -> Layout:
    layout = plan.rules.resolve(names, shape, plan.mesh).layout
    return at_rest(layout, shape, plan.mesh, frozenset()) if plan.zero else layout


def _gradients(traced: TracedStep, plan: Plan) -> Pinned:
    """The gradients of weights, where they are made."""
    graph = traced.problem.forward
    producers = {
        value: (op.path, index) for op in graph.ops for index, value in enumerate(op.results)
    }
    planned = {parameter.path: parameter for parameter in plan.parameters}
    return {
        producers[value]: planned[traced.paths[index]].gradient
        for index, value in traced.roles.gradients.items()
    }


# --------------------------------------------------------------------------------------------------
# The marked losses of a step, lowered in the places of their calls.

#: Operands of a call -> value, auxiliary results, gradients of the trained leaves.
InPlace = Callable[..., Sequence[Value]]


@dataclass(frozen=True, kw_only=True)
class LoweredLosses:
    """The marked losses of a step, lowered; none in a step that marks none.

    Attributes:
        calls: what takes the place of each, by the path of its call.
        findings: what the user should know about them.
    """

    calls: Mapping[str, InPlace] = field(default_factory=dict[str, InPlace])
    findings: tuple[Finding, ...] = ()
