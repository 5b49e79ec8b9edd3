"""What is trained? What the user says with `wrt`, in Flax's word and with Flax's filters.

NNX takes what `nnx.DiffState` takes: a type of variables (`nnx.LoRAParam`), `nnx.Any`, `nnx.All`,
`nnx.Not`, a path predicate (path, variable) -> bool. Linen and plain pytrees have no types of
variables: they take a predicate (path, leaf) -> bool, whose path is a tuple of strings, ("layers",
"0", "lora_a").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.annotation.trees.paths import Path, Tree, path_parts, path_text
from shardlib.errors import AnnotationError, raise_all
from shardlib.jax_types import KeyPath, Leaf
from shardlib.report import Finding, diagnostic

#: What a user may give as `wrt`.
Filter = Any
#: (path, variable or leaf) -> whether it is trained.
Predicate = Callable[[tuple[Any, ...], Any], bool]

#: Arrays that an error lists of each kind.
_LISTED = 6


def nnx_predicate(wrt: Filter) -> Predicate:
    """A filter of Flax NNX as a predicate."""
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise AnnotationError(
            f"wrt is a {type(wrt).__name__}, {wrt!r}, and no filter of Flax\nTry: a type of"
            " variables such as nnx.LoRAParam, nnx.Any(...), nnx.All(...), nnx.Not(...), or a"
            " predicate (path, variable) -> bool"
        ) from error


def path_predicate(wrt: Filter, front: str) -> Predicate:
    """A predicate over paths of a model whose arrays have no types."""
    if not callable(wrt) or isinstance(wrt, type) or type(wrt).__module__.startswith("flax"):
        what = wrt.__name__ if isinstance(wrt, type) else repr(wrt)
        raise AnnotationError(
            f"wrt is {what}, and arrays of a {front} model have no types that a filter of NNX could"
            ' ask for\nTry: a predicate over paths, wrt=lambda path, leaf: "lora_a" in path'
        )
    return lambda path, leaf: bool(wrt(path, leaf))


def selected(
    predicate: Predicate,
    leaves: Mapping[Path, Leaf],
    kinds: Mapping[Path, str] | None = None,
) -> frozenset[Path]:
    """The paths of what a predicate chooses.

    Args:
        leaves: by path; their dtypes decide whether they can be trained.
    """
    paths: list[tuple[Any, ...]] = []
    for path, leaf in leaves.items():
        try:
            chosen = predicate(path, leaf)
        except Exception as error:
            raise AnnotationError(
                f"wrt failed when called with the path {path!r}: {type(error).__name__}: {error}"
            ) from error
        if chosen:
            paths.append(path)
    if not paths:
        raise AnnotationError(
            "wrt chooses nothing: every array would be frozen, and nothing would be trained\n"
            + _listed(leaves, kinds or {})
            + "\nTry: a filter that chooses some of these"
        )
    fixed = [
        f"{_dotted(path)} has dtype {leaves[path].dtype}"
        for path in paths
        if not jnp.issubdtype(leaves[path].dtype, jnp.inexact)
    ]
    if fixed:
        raise_all(
            AnnotationError,
            "wrt chooses arrays that have no gradient",
            fixed,
            hint="a filter that leaves out what is not floating-point",
        )
    return frozenset(paths)


def frozen_leaves(wrt: Filter, params: Tree, front: str) -> frozenset[str]:
    """Dotted paths of the leaves of params that `wrt` does not choose; where there is no `wrt`, of
    those that have no gradient.

    Args:
        wrt: what is trained; None for all that has a gradient.
    """
    if wrt is None:
        return frozenset(
            path_text(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
    leaves = {
        tuple(map(str, path_parts(path))): (path_text(path) or "params", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    trained = selected(
        path_predicate(wrt, front), {path: leaf for path, (_, leaf) in leaves.items()}
    )
    return frozenset(text for path, (text, _) in leaves.items() if path not in trained)


@diagnostic
def base_is_trained(trained: Mapping[Path, object]) -> tuple[Finding, ...]:
    """What the user should know who has adapters beside a base, and did not say what to train."""
    adapters = [path for path, variable in trained.items() if isinstance(variable, nnx.LoRAParam)]
    others = len(trained) - len(adapters)
    if not adapters or not others:
        return ()
    return (
        Finding(
            code="base-trained",
            severity="warning",
            where=_short([_dotted(path) for path in adapters]),
            message=(
                f"the model has {len(adapters)} nnx.LoRAParam beside {others} other parameters, and"
                " all are trained: the base has gradients and optimizer state, too."
            ),
            hint=(
                "wrt=nnx.LoRAParam trains the adapters alone; wrt=nnx.Param says that all are to be"
                " trained"
            ),
        ),
    )


def _listed(leaves: Mapping[Path, Leaf], kinds: Mapping[Path, str]) -> str:
    """What there is, by kind."""
    groups: dict[str, list[str]] = {}
    for path in leaves:
        groups.setdefault(kinds.get(path, ""), []).append(_dotted(path))
    lines = [f"  {f'{kind}: ' if kind else ''}{_short(paths)}" for kind, paths in groups.items()]
    return "\n".join(["the model has:", *lines]) if lines else "the model has no arrays"


def _short(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_LISTED]) + (
        f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    )


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "params"
