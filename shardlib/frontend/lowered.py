"""The program of a plan for a traced loss, and the loss of its evaluations."""

from __future__ import annotations

from dataclasses import replace

import jax

from shardlib.errors import PAGES
from shardlib.findings import Finding
from shardlib.frontend.model import TracedModel, state_stays
from shardlib.layout import Rules
from shardlib.lowering.collective_matmul import activation_sources as activations_of
from shardlib.lowering.collective_matmul import weight_matmuls
from shardlib.lowering.context.dispatch import with_head_layouts
from shardlib.lowering.contractions import Interleaving
from shardlib.lowering.loss import interleaving
from shardlib.lowering.loss_layouts import ValueLayouts
from shardlib.lowering.program import BuildOption, BuildOptions, PlannedLoss, Program, build_program
from shardlib.lowering.random_keys import draws_numbers
from shardlib.lowering.uses import LossFacts, LossJaxpr
from shardlib.planner.plan import Plan
from shardlib.planner.workload import batch_size
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.contractions import layout_constraints
from shardlib.tracing.trace import Traced


def lower(model: TracedModel, plan: Plan, **where: BuildOption) -> Program:
    """Lowers a plan onto devices or onto a mesh."""
    traced = model.traced
    return build_program(
        plan,
        model.model,
        model.model.bind(model.loss),
        model.optimizer,
        model.batch,
        batch_axes={path: axes for path, _, _, axes in traced.problem.batch},
        planned=PlannedLoss(
            traced=LossJaxpr(closed_jaxpr=traced.closed_jaxpr, out_tree=traced.out_tree),
            value_layouts=placements_of(traced, plan, plan.rules),
            outside_layers=(
                placements_of(traced, plan, _around(traced, plan))
                if plan.mesh["stage"] > 1
                else None
            ),
            rows=traced.problem.rows,
            interleaving=interleaving_of(traced, plan),
        ),
        options=BuildOptions(**where),
    )


def placements_of(traced: Traced, plan: Plan, rules: Rules) -> ValueLayouts:
    """The layouts of values of a traced loss under a plan."""
    colouring, parameters = _colouring(traced, plan), _parameters(traced)
    loss = LossFacts(program=traced.program, num_parameters=parameters)
    values = dict(loss.operand_sources)
    if plan.collective_matmul == "loop":
        values |= activations_of(weight_matmuls(loss))
    graph, names = traced.problem.forward, colouring.forward
    layouts = layout_constraints(graph, names, rules, plan.mesh, colouring.batch_colour, values)
    return with_head_layouts(layouts, graph, loss.calls.values(), plan)


def _parameters(traced: Traced) -> int:
    """Arrays among the params of a model."""
    return len(jax.tree.leaves(traced.in_tree.unflatten(range(traced.in_tree.num_leaves))[0]))


def interleaving_of(traced: Traced, plan: Plan) -> Interleaving:
    """Returns what a traced loss does otherwise where fused dims are interleaved."""
    names, problem = _colouring(traced, plan).forward, traced.problem
    return interleaving(
        problem.forward, problem.pieces, names, plan, traced.program, _parameters(traced)
    )


def _around(traced: Traced, plan: Plan) -> Rules:
    """The rules outside of the layers of a pipeline: the sequence is sharded over the stages,
    inside of the axes that it is sharded over already. Where tensor is one of these, the batch is,
    if it divides: gathered over tensor alone, the sequence would be in another order.
    """
    colouring = _colouring(traced, plan)
    sequence, batch = colouring.sequence_colour, colouring.batch_colour or ""
    if sequence is None:
        return plan.rules
    over = dict(reversed(plan.rules.entries))
    rows = batch_size(traced.problem, colouring) // plan.microbatches
    shards = plan.mesh.ways((*over.get(batch, ()), "stage"))
    spread = batch if "tensor" in over.get(sequence, ()) and rows % shards == 0 else sequence
    entries: list[tuple[str, tuple[str, ...]]] = []
    for name, axes in plan.rules.entries:
        if name == spread and axes:
            # Where that does not divide, the next one holds.
            entries.append((name, (*axes, "stage")))
        entries.append((name, axes))
    return Rules((*entries, (spread, ("stage",))))


def _colouring(traced: Traced, plan: Plan) -> Colouring:
    """The colours that the plan was searched with; found here for a plan that was given."""
    return (
        plan.source.workload.colouring
        if plan.source is not None and plan.source.workload.problem is traced.problem
        else colour(traced.problem)
    )


# --------------------------------------------------------------------------------------------------
# The default loss of evaluations: that of the step, with a finding where a step does what an
# evaluation should not.


def evaluated_as_trained(of: TracedModel) -> TracedModel:
    """The same, with a finding where evaluations are to use a loss that trains: it draws random
    numbers, or changes the state of a model that has no mode for evaluations.
    """
    model, traced = of.model, of.traced
    what = [
        *(["draws random numbers"] if draws_numbers(traced.closed_jaxpr) else []),
        *([] if state_stays(model, traced) else [f"updates {', '.join(model.state)}"]),
    ]
    if model.has_modes or not what:
        return of
    finding = Finding(
        code="evaluation-as-trained",
        severity="warning",
        where="program.evaluate",
        message=f"program.evaluate uses the loss of the step, which {' and '.join(what)}.",
        hint=(
            "shardlib.compile(..., evaluation=loss_without_dropout_and_with_running_averages),"
            f" see {PAGES}/evaluation.html"
        ),
    )
    return replace(of, model=replace(model, findings=(*model.findings, finding)))
