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
# Weights have the plan's stored sharding. Arrays of state that follow a weight, such as moments,
# have its shape and colours, and the plan's sharding of optimizer state. Activations and operands
# of contractions are constrained as in a loss (`shardlib.propagation.contractions`), and gradients,
# which are ordinary values of a step, to the plan's sharding of gradients.

#: Layouts of values, by the path of the equation that makes them and the index of the result.
Pinned = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True)
class StepLayouts:
    """Layouts of a step.

    Attributes:
        state: stored layout of each array of the state.
        batch: layout of each array of the batch.
        values: layouts of values of the step, see `shardlib.propagation.contractions`.
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
    """The layouts of gradients of weights, at the equations that make them."""
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
# The marked losses of a step, lowered in place of their calls.

#: Operands of a call -> value, auxiliary results, gradients of the trained leaves.
InPlace = Callable[..., Sequence[Value]]


@dataclass(frozen=True, kw_only=True)
class LoweredLosses:
    """The marked losses of a step, lowered; empty if a step marks none.

    Attributes:
        calls: replacement of each call, by its path.
        findings: findings of their lowering.
    """

    calls: Mapping[str, InPlace] = field(default_factory=dict[str, InPlace])
    findings: tuple[Finding, ...] = ()
