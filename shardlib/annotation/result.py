"""What may a user's loss return?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import TracingError
from shardlib.functions.mean import WeightedMean
from shardlib.jax_types import Metrics, Value


def loss_and_metrics(result: Tree) -> tuple[Value, Metrics]:
    """Splits `loss` or `(loss, metrics)`."""
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    return scalar_and_metrics(value, metrics, result)


def scalar_and_metrics(value: Tree, metrics: Tree, result: Tree) -> tuple[Value, Metrics]:
    """The two parts of what a loss returned, checked; see `loss_and_metrics`."""
    if not _is_number(value) or not isinstance(metrics, Mapping):
        raise TracingError(
            f"the loss returned {_shape(result)}; expected a scalar or a pair (scalar, dict of"
            ' metrics)\nTry: return jnp.mean(...), or return jnp.mean(...), {"name": metric}'
        )
    if "loss" in metrics:
        raise TracingError(
            "the loss returned a metric called 'loss'; that name is taken by the loss itself\nTry:"
            " another name"
        )
    return _divided(value), {name: _divided(metric) for name, metric in metrics.items()}


def _is_number(value: Any) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (int, float, complex, WeightedMean))


def _divided(result: Tree) -> Any:
    return result.value() if isinstance(result, WeightedMean) else result


def _shape(result: Tree) -> str:
    if result is None:
        return "None"
    return (
        f"a tuple of {len(result)} ({', '.join(type(part).__name__ for part in result)})"
        if isinstance(result, tuple)
        else type(result).__name__
    )
