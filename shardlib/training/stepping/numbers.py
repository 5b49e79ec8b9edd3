"""The numbers of a step as they are written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.exchanges.values import DiLoCo, Exact
from shardlib.lowering.islands.state import IslandMetrics
from shardlib.planning.plan import Plan
from shardlib.training.validation.combining import is_metric, named_numbers


@dataclass(kw_only=True)
class Pending:
    """A step whose metrics have not been read.

    Attributes:
        step: which, from 1 on.
        metrics: on the devices.
        times: seconds by name.
    """

    step: int
    metrics: Tree
    times: dict[str, float]


def numbers_of(metrics: Tree, judged: str = "loss") -> dict[str, float]:
    """The scalars among the metrics of a step, by name; of several islands the means, and the loss
    of each. Waits for the step.
    """
    found = {
        name: number
        for outer, value in named_metrics(metrics).items()
        for name, number in named_numbers(outer, value).items()
    }
    if judged in found:
        found.setdefault("loss", found[judged])
    if isinstance(metrics, IslandMetrics):
        for number, one in enumerate(metrics.islands, 1):
            found[f"loss_of_island_{number}"] = float(one["loss"])
    return found


def named_metrics(metrics: Tree) -> dict[str, Tree]:
    """The metrics of a step by name."""
    if isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics):
        return {
            f"{name}.{inner}".removesuffix("."): one
            for name, value in metrics.items()
            for inner, one in (
                named_metrics(value).items() if isinstance(value, Mapping) else [("", value)]
            )
        }
    return {
        path_text(path) or "loss": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric)
    }


def meetings(plan: Plan, step: int) -> dict[str, int]:
    """How often islands have met, what they sent having arrived, by name; nothing where there is
    one.
    """
    exchange = plan.exchange
    if isinstance(exchange, Exact):
        return {}
    if isinstance(exchange, DiLoCo):
        return {"meetings": max(0, step - exchange.delay) // exchange.between}
    return {"meetings": step // exchange.every}
