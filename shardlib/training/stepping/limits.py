"""What a policy needs of a program: the metric that it judges, and, to leave spikes out, the limit
above which a step leaves its loss out, of one island or of several.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from shardlib.errors import ModelError
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.islands.learned import first_of
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.program.guards import limited
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.training.stepping.numbers import named_metrics
from shardlib.training.stepping.task import Task
from shardlib.training.validation.combining import is_metric

S = TypeVar("S", TrainState, IslandsState)


def require_judged(task: Task) -> None:
    """Makes sure that a program has what its policy needs."""
    policy, program = task.settings.policy, task.program
    if policy.action == "skip" and not has_limit(program):
        raise ModelError(
            "the policy leaves out steps whose loss is a spike, and the program has no guard that"
            " could\nTry: shardlib.compile(..., guards=shardlib.Guards(spike=True))"
        )
    if not isinstance(program, StepProgram):
        return
    names = [
        name
        for name, one in named_metrics(program.traced.metrics).items()
        if is_metric(one) or not getattr(one, "shape", ())
    ]
    if policy.metric not in names:
        raise ModelError(
            f"the step returns no metric {policy.metric!r}; it returns"
            f" {', '.join(names) or 'no scalars'}\nTry: Settings(policy=Policy(metric=...)) with"
            " the one that falls while the run is well; Policy is in"
            " shardlib.training.measures.judge"
        )


def has_limit(program: Program | IslandsProgram | StepProgram) -> bool:
    """Whether a program has a guard that leaves spikes out."""
    if isinstance(program, StepProgram):
        return False
    guard = first_of(program).state.guard
    return guard is not None and guard.limit is not None


def limited_to(state: S, limit: float) -> S:
    """The state with a limit for the loss of the next step, the same on all islands."""
    if isinstance(state, IslandsState):
        return replace(state, islands=tuple(limited(one, limit) for one in state.islands))
    return limited(state, limit)
