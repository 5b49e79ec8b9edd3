"""Which part of what a Linen loss returns is a metric, and which is a mutated collection of the
model?

`module.apply(..., mutable=["batch_stats"])` gives updates: a mapping from collections to their new
variables. They are told from metrics by structure alone: what stands under the name of a collection
of the model, and has its variables, is an update; metrics are arrays. Whatever is neither is
refused, so that no statistics are lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
from flax.core import FrozenDict, unfreeze

from shardlib.annotation.result import scalar_and_metrics
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import TracingError, raise_all

#: What a loss may return; (metrics, updates) may be in the other order too.
FORMS = (
    "loss",
    "(loss, metrics)",
    "(loss, updates)",
    "(loss, metrics, updates)",
    "(loss, (metrics, updates))",
    '(loss, {"metrics": metrics, **updates})',
    "(loss, {**metrics, **updates})",
)


def loss_metrics_and_updates(
    result: Tree, state: Tree, unboxed: Callable[[Tree], Tree]
) -> tuple[Tree, dict[str, Tree], dict[str, Tree]]:
    """Splits what a Linen loss returned."""
    value, *parts = result if isinstance(result, tuple) else (result,)
    if len(parts) == 1 and isinstance(parts[0], tuple):
        parts = list(parts[0])
    if len(parts) > 2 or not all(isinstance(part, Mapping) for part in parts):
        _refused(result, state, [f"found {_described(result)}"])
    metrics: dict[str, Any] = {}
    updates: dict[str, Tree] = {}
    failures: list[str] = []
    kinds: list[str] = []
    for part in parts:
        named_metrics, collections, wrong = _sorted(part, state, unboxed)
        failures += wrong + [
            f"{name!r} is returned twice"
            for name in (*named_metrics, *collections)
            if name in metrics or name in updates
        ]
        kinds += (
            ["both" if named_metrics and collections else "metrics" if named_metrics else "updates"]
            if named_metrics or collections
            else []
        )
        metrics, updates = {**metrics, **named_metrics}, {**updates, **collections}
    if len(parts) == 2 and kinds in (
        ["updates", "updates"],
        ["metrics", "metrics"],
        ["both", "both"],
    ):
        failures.append(f"two mappings of {kinds[0]}")
    if failures:
        _refused(result, state, failures)
    return *scalar_and_metrics(value, metrics, result), updates


def _sorted(
    part: Mapping[str, Any], state: Tree, unboxed: Callable[[Tree], Tree]
) -> tuple[dict[str, Any], dict[str, Tree], list[str]]:
    """(metrics, updates, what is wrong) of one mapping."""
    metrics: dict[str, Any] = {}
    updates: dict[str, Tree] = {}
    wrong: list[str] = []
    for name, entry in part.items():
        if name in state:
            updates[name] = unboxed(
                unfreeze(entry) if isinstance(entry, (FrozenDict, dict)) else entry
            )
            wrong += _misfits(name, updates[name], state[name])
        elif name == "metrics" and isinstance(entry, Mapping):
            metrics.update(entry)
        elif name == "params":
            wrong.append("'params' are what the optimizer trains; a loss cannot return them")
        elif isinstance(entry, Mapping) and state:
            wrong.append(
                f"{name!r} holds variables and is no collection that the model is initialised with"
            )
        else:
            metrics[name] = entry
    wrong += [
        f"the metric {name!r} is a {type(entry).__name__}"
        for name, entry in metrics.items()
        if isinstance(entry, (tuple, list))
    ]
    return metrics, updates, wrong


def _misfits(name: str, returned: Tree, expected: Tree) -> list[str]:
    """Where a collection is not what the model has."""

    def spelt(tree: Tree) -> dict[str, str]:
        return {
            path_text((jax.tree_util.DictKey(name), *path)): (
                f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
            )
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    ours, theirs = spelt(expected), spelt(returned)
    return [
        f"{path}: {theirs.get(path, 'nothing')} returned, the model has"
        f" {ours.get(path, 'no such variable')}"
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    ]


def _described(result: Tree) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(map(_described, result))})"
    return (
        f"mapping of {', '.join(map(str, result)) or 'nothing'}"
        if isinstance(result, Mapping)
        else type(result).__name__
    )


def _refused(result: Tree, state: Tree, failures: list[str]) -> NoReturn:
    names = ", ".join(map(repr, state)) or "none beside 'params'"
    raise_all(
        TracingError,
        "the loss returned what is neither metrics nor updated collections of the Linen model (it"
        f" has {names})",
        failures,
        hint=(
            f"one of {'; '.join(FORMS)}, with metrics a dict of scalars and updates what"
            " module.apply(..., mutable=[...]) returns, of collections that the model has from its"
            " initialisation"
        ),
    )
