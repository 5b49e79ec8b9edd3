"""The numbers of a step as they are written down."""

from __future__ import annotations

from shardlib.exchanges.values import DiLoCo, Exact
from shardlib.lowering.islands.state import IslandMetrics
from shardlib.planning.plan import Plan
from shardlib.untrusted.json_types import JsonMapping


def numbers_of(metrics: JsonMapping) -> dict[str, float]:
    """The scalars among the metrics of a step, by name; of several islands the means, and the loss
    of each. Waits for the step.
    """
    found = {
        name: float(value) for name, value in metrics.items() if getattr(value, "ndim", 0) == 0
    }
    if isinstance(metrics, IslandMetrics):
        for number, one in enumerate(metrics.islands, 1):
            found[f"loss_of_island_{number}"] = float(one["loss"])
    return found


def meetings(plan: Plan, step: int) -> dict[str, int]:
    """How often islands have met, what they sent having arrived, by name; nothing where there is
    one.

    Args:
        plan: that the run has.
        step: steps that are done.
    """
    exchange = plan.exchange
    if isinstance(exchange, Exact):
        return {}
    if isinstance(exchange, DiLoCo):
        return {"meetings": max(0, step - exchange.delay) // exchange.between}
    return {"meetings": step // exchange.every}
