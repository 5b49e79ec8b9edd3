"""A user's model as one value, whichever library it was written in.

Every front end (`nnx.py`, `linen.py`, `tree.py`) turns what the user has into a `Model`: pure functions over two
pytrees. `params` is what the optimizer trains; `state` is what the model itself updates (random streams, batch
statistics) and may be empty. Tree paths are written with dots: "layers.mlp.up.kernel".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.axes import LogicalAxes
from shardlib.report import Finding

#: A pytree of arrays, tracers or `jax.ShapeDtypeStruct`, without boxes or metadata.
Tree = Any
#: (params, state, batch) -> (loss, (metrics, new state)); loss is a float scalar, metrics a dict of scalars.
PureLoss = Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Mapping[str, jax.Array], Tree]]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be initialised, traced and trained.

    Attributes:
        name: for people.
        init: seed (an int or an int32 scalar tracer) -> (params, state), pure and jittable; the numbers are those
            that the user's own constructor gives for that seed.
        params: abstract trained arrays (`jax.ShapeDtypeStruct` leaves, no shardings).
        state: abstract model state, same form.
        axes: logical axes per dotted path of `params`; paths without names are absent.
        bind: user's loss -> `PureLoss`.
        rebuild: (params, state) -> what the user's loss takes as its first argument (an nnx module, a params tree).
        findings: what reading the model noticed.
    """

    name: str
    init: Callable[[Any], tuple[Tree, Tree]]
    params: Tree
    state: Tree
    axes: Mapping[str, LogicalAxes]
    bind: Callable[[Callable[..., Any]], PureLoss]
    rebuild: Callable[[Tree, Tree], Any]
    findings: tuple[Finding, ...] = ()


def path_text(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` as dotted text, without brackets or quotes.

    >>> leaves = jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1.0}]})
    >>> path_text(leaves[0][0])
    'layers.0.kernel'
    """
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
