"""Metrics of batches put together to those of the whole set, exactly.

What a metric is - a mean over rows, a sum, a ratio of sums - is proven from what its function
computes (`shardlib.tracing.rows`); metrics that know it themselves, as those of `clu` do, are asked
(`merge`, `compute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlib.annotation.model import UserLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.functions.mean import WeightedMean
from shardlib.graph.rows import Dependence, Rows

#: What the parts of a ratio of sums are called among the metrics of a batch.
TOTAL, WEIGHT = "of the total: ", "of the weight: "


def with_parts(loss: UserLoss) -> UserLoss:
    """A loss that returns the two sums of every `shardlib.WeightedMean` as metrics, too.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
    """

    def parted(model: Tree, batch: Tree) -> Tree:
        found = loss(model, batch)
        value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(metrics, Mapping):
            return found
        ratios = {
            name: one
            for name, one in {"loss": value, **metrics}.items()
            if isinstance(one, WeightedMean)
        }
        if not ratios:
            return found
        return value, {
            **metrics,
            **{TOTAL + name: one.total for name, one in ratios.items()},
            **{WEIGHT + name: one.weight for name, one in ratios.items()},
        }

    return parted


def is_metric(value: object) -> bool:
    """Whether a metric knows itself how it is put together, as those of `clu` do."""
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def named_numbers(name: str, value: Tree) -> dict[str, float]:
    """The numbers of a metric by name; none where it is an array."""
    found = value.compute() if is_metric(value) else value
    if isinstance(found, Mapping):
        return {
            key: number
            for inner, one in found.items()
            for key, number in named_numbers(f"{name}.{inner}", one).items()
        }
    return {name: float(found)} if getattr(found, "ndim", 0) == 0 else {}


@dataclass(kw_only=True)
class Combination:
    """Metrics of the batches that were seen so far."""

    _batches: list[tuple[int, Mapping[str, Tree]]] = field(
        default_factory=list[tuple[int, Mapping[str, Tree]]]
    )

    def add(self, rows: int, metrics: Mapping[str, Tree]) -> None:
        """Takes the metrics of a batch."""
        values = {
            name: one if is_metric(one) else float(one)
            for name, one in metrics.items()
            if is_metric(one) or getattr(one, "ndim", 0) == 0
        }
        self._batches.append((rows, values))

    def result(self, proof: Callable[[], Rows]) -> dict[str, float]:
        """The metrics of all rows, by name."""
        if not self._batches:
            raise BatchError("the validation has no rows\nTry: at least one batch")
        names = [name for name in self._batches[0][1] if not name.startswith((TOTAL, WEIGHT))]
        if len(self._batches) == 1:
            found = {name: self._batches[0][1][name] for name in names}
        else:
            found = self._combined(names, proof())
        return {
            key: number
            for name, one in found.items()
            for key, number in named_numbers(name, one).items()
        }

    def _combined(self, names: list[str], rows: Rows) -> dict[str, Any]:
        known = {"loss": rows.loss, **dict(rows.metrics)}
        found: dict[str, Any] = {}
        failures: list[str] = []
        for name in names:
            if is_metric(self._batches[0][1][name]):
                one, why = self._merged(name)
            else:
                how = known.get(name)
                one, why = self._added(name, how), how or "nothing is known of its rows"
            if one is None:
                failures.append(f"{name}: {why}")
            found[name] = one
        if failures:
            raise_all(
                BatchError,
                "metrics of the validation cannot be put together from batches",
                failures,
                hint=(
                    "shardlib.WeightedMean(total=..., weight=...) for a ratio of sums, or"
                    " Validation(rows=None), which evaluates all rows at once"
                ),
            )
        return found

    def _merged(self, name: str) -> tuple[Any, str]:
        """A metric that knows how it is put together, or None and why it does not."""
        merged: Any = None
        for _, metrics in self._batches:
            one = metrics[name]
            try:
                merged = one if merged is None else merged.merge(one)
            except NotImplementedError:
                return None, f"{type(one).__name__}.merge is not implemented"
        return merged, ""

    def _added(self, name: str, how: Dependence | None) -> float | None:
        """A scalar of all rows; None where batches do not say it."""
        values = [metrics[name] for _, metrics in self._batches]
        if TOTAL + name in self._batches[0][1]:
            total, weight = (self._sum(part + name) for part in (TOTAL, WEIGHT))
            return total / weight if weight else math.nan
        if how is None:
            return None
        if how.kind == "mean":
            rows = [count for count, _ in self._batches]
            pairs = zip(rows, values, strict=True)
            return math.fsum(count * value for count, value in pairs) / sum(rows)
        if how.kind == "sum":
            return math.fsum(values)
        return values[0] if how.kind == "constant" else None

    def _sum(self, name: str) -> float:
        return math.fsum(metrics[name] for _, metrics in self._batches)
