"""What does `shardlib explain` answer beyond the explanation?"""

from __future__ import annotations

from typing import Any

from shardlib.planning.alternatives import alternatives_text
from shardlib.planning.plan import Plan


def answers(plan: Plan, *, alternatives: bool = False, sensitivity: bool = False) -> tuple[dict[str, Any], str]:
    """Answers about a plan with its source, as plain data and as text.

    Args:
        plan: the plan.
        alternatives: which plans come next, and what holds this one back.
        sensitivity: what more memory and faster links are worth, and the regret if a figure is lower.
    """
    data: dict[str, Any] = {}
    texts: list[str] = []
    if alternatives:
        found, held = plan.alternatives(), plan.constraints()
        data |= {"alternatives": [one.to_json() for one in found], "constraints": held.to_json()}
        texts += [alternatives_text(found), str(held)]
    if sensitivity:
        answer = plan.sensitivity()
        data["sensitivity"] = answer.to_json()
        texts.append(str(answer))
    return data, "\n".join(texts)
