"""What does `shardlib explain` answer beyond the explanation?"""

from __future__ import annotations

from shardlib.planning.answers.answers import Answers
from shardlib.planning.plan import Plan


def answers(
    plan: Plan, *, alternatives: bool = False, sensitivity: bool = False, kernels: bool = False
) -> Answers:
    """Asks a plan with its source."""
    return Answers(
        alternatives=plan.alternatives() if alternatives else None,
        constraints=plan.constraints() if alternatives else None,
        sensitivity=plan.sensitivity() if sensitivity else None,
        kernels=plan.kernels() if kernels else None,
    )
