"""What does `shardlib explain` answer beyond the explanation?"""

from __future__ import annotations

from shardlib.planning.answers.answers import Answers
from shardlib.planning.plan import Plan


def answers(
    plan: Plan, *, alternatives: bool = False, sensitivity: bool = False, kernels: bool = False
) -> Answers:
    """Asks a plan with its source.

    Args:
        plan: the plan.
        alternatives: which plans come next, and what holds this one back.
        sensitivity: what more memory and faster links are worth, and the regret if a figure is
            lower.
        kernels: of a step, beside the roofline.
    """
    return Answers(
        alternatives=plan.alternatives() if alternatives else None,
        constraints=plan.constraints() if alternatives else None,
        sensitivity=plan.sensitivity() if sensitivity else None,
        kernels=plan.kernels() if kernels else None,
    )
