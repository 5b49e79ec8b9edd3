"""A step that marks its losses, as it is planned.

step -> its losses -> their sum, a problem -> names of all dims -> each loss by itself -> rows
                      search -> plan -> each loss lowered as `shardlib.compile` lowers one
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlib.decisions.pins import PinMapping
from shardlib.frontend.steps.marked.single import SingleLoss, single_loss, written_name
from shardlib.frontend.steps.marked.total import total_problem
from shardlib.frontend.steps.pins import marked_pins
from shardlib.graph.problem import Problem
from shardlib.graph.rows import Dependence, Rows
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.planner import search
from shardlib.propagation.colours import Colouring, colour
from shardlib.report import Finding, diagnostic
from shardlib.tracing.steps.traced_step import TracedStep


@dataclass(frozen=True, kw_only=True)
class MarkedStep:
    """A step that marks its losses.

    Attributes:
        traced: the step; its problem has the names of the plan.
        colouring: of that problem.
        problem: what is planned.
        losses: each by itself.
    """

    traced: TracedStep
    colouring: Colouring
    problem: Problem
    losses: tuple[SingleLoss, ...]

    @staticmethod
    def of(traced: TracedStep) -> MarkedStep:
        """A traced step as it is planned."""
        problem = total_problem(traced)
        named = _named(traced, problem)
        colouring = colour(named.problem)
        losses = tuple(single_loss(named, one, colouring) for one in named.losses)
        rows = _together([one.model.traced.problem.rows for one in losses], losses)
        return MarkedStep(
            traced=named,
            colouring=colouring,
            problem=replace(problem, rows=rows),
            losses=losses,
        )

    @property
    def unstaged(self) -> str:
        """Why the step has no pipeline stages; "" where it may have some."""
        if len(self.losses) > 1:
            return f"it marks {len(self.losses)} losses"
        [loss] = list(self.losses)
        if any(kind in loss.found.call.path for kind in ("/body/", "/branch")):
            return "its loss stands in a loop or a branch"
        if self.problem.rows.by_row:
            listed = ", ".join(name for name, _ in self.problem.rows.by_row)
            return f"its loss returns values for every row, {listed}"
        given = {path for path, _ in loss.params}
        apart = sorted({one.path for one in self.problem.parameters} - given)
        if apart:
            return f"it computes with weights that its loss does not get: {', '.join(apart[:4])}"
        return ""

    @property
    def unsharded(self) -> str:
        """Why the step has no context and expert axes; "" where it may have them."""
        if not self.traced.others:
            return ""
        return f"{', '.join(sorted(self.traced.others))} is called outside of the marked losses"

    def searched(self, machine: Topology, pin: PinMapping | None) -> tuple[MarkedStep, Plan]:
        """The plan, and the step with what the search taught of its rows."""
        pins = marked_pins(pin, self.unstaged, self.unsharded)
        plan = search(self.problem, machine, pins)
        if plan.microbatches > 1:
            found = [one.model.traced.rows_in(plan.microbatches) for one in self.losses]
            rows = _together(found, self.losses)
            if not rows.splits:
                step = replace(self, problem=replace(self.problem, rows=rows))
                return step, search(step.problem, machine, pins)
        return self, replace(plan, findings=(*plan.findings, *self._in_one_piece(plan)))

    @diagnostic
    def _in_one_piece(self, plan: Plan) -> tuple[Finding, ...]:
        """What the plan counts in microbatches, and the step does for the whole batch."""
        taken = [self.traced.paths[at] for at in self.traced.unmarked.gradients]
        if plan.microbatches == 1 or not taken:
            return ()
        return (
            Finding(
                code="unmarked-gradient",
                severity="warning",
                message=(
                    "gradients are taken outside of the marked losses, of the whole batch at once;"
                    f" the activations kept for them are counted as those of one of"
                    f" {plan.microbatches} microbatches"
                ),
                where=", ".join(taken[:4]),
                hint="shardlib.value_and_grad for their loss, too",
            ),
        )


def _named(traced: TracedStep, problem: Problem) -> TracedStep:
    """The step with the names that the colouring of the planned problem gives."""
    found = colour(problem)
    return replace(
        traced,
        problem=replace(
            traced.problem,
            parameters=tuple(
                replace(one, axes=found.parameters.get(one.path, one.axes))
                for one in traced.problem.parameters
            ),
            batch=tuple(
                (path, shape, dtype, found.batch.get(path, names))
                for path, shape, dtype, names in traced.problem.batch
            ),
        ),
    )


def _together(every: list[Rows], losses: tuple[SingleLoss, ...]) -> Rows:
    """How several losses depend on the rows of the batch, as one: the first is the loss, all else
    are metrics.
    """
    several = len(losses) > 1
    found: list[tuple[str, Dependence]] = []
    for loss, rows in zip(losses, every, strict=True):
        name = loss.found.form.name
        found.append((name, rows.loss))
        found += [
            (" ".join(filter(None, (name if several else "", written_name(path)))) or "aux", one)
            for path, one in rows.metrics
        ]
    return Rows(
        loss=found[0][1],
        metrics=tuple(found[1:]),
        asserted=all(rows.asserted for rows in every),
    )
