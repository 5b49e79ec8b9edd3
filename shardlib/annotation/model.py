"""A user's model as one value, whichever library it was written in.

Every front end (`nnx.py`, `linen.py`, `tree.py`) turns what the user has into a `Model`: pure
functions over two pytrees. `params` is what the optimizer trains, and what is frozen; `state` is
what the model itself updates (random streams, batch statistics) and may be empty. Tree paths are
written with dots: "layers.mlp.up.kernel".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.jax_types import Index
from shardlib.report import Finding

__all__ = ["Model", "PureLoss", "Tree", "UserLoss", "UserModule", "path_text"]

#: A user's own model, as their loss takes it: an nnx module, a params tree, a variables dict.
UserModule = Any
#: A user's own loss: (model, batch) -> scalar, or -> (scalar, dict of metrics).
UserLoss = Callable[[UserModule, Tree], Tree]
#: (params, state, batch) -> (loss, (metrics, new state)); loss is a float scalar, metrics a dict of
#: scalars.
PureLoss = Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Mapping[str, jax.Array], Tree]]]
#: What is done to a function before it is called.
Free = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(value: Any) -> Any:
    """What it is given."""
    return value


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be initialised, traced and trained.

    Attributes:
        name: for people.
        init: seed (an int or an int32 scalar tracer) -> (params, state), pure and jittable; the
            numbers are those that the user's own constructor gives for that seed.
        params: abstract arrays that are trained or frozen (`jax.ShapeDtypeStruct` leaves, no
            shardings).
        state: abstract model state, same form.
        axes: logical axes per dotted path of `params`; paths without names are absent.
        bind: user's loss -> `PureLoss`.
        rebuild: (params, state) -> what the user's loss takes as its first argument (an nnx module,
            a params tree).
        findings: what reading the model noticed.
        evaluating: what the user's loss takes -> the same in the mode of an evaluation; as it is
            where the library has no modes.
        frozen: dotted paths of `params` that are not trained.
        state_axes: logical axes per dotted path of `state`; paths without names are absent.
    """

    name: str
    init: Callable[[Index], tuple[Tree, Tree]]
    params: Tree
    state: Tree
    axes: Mapping[str, LogicalAxes]
    bind: Callable[[Callable[..., Tree]], PureLoss]
    rebuild: Callable[[Tree, Tree], Tree]
    findings: tuple[Finding, ...] = ()
    evaluating: Callable[[Tree], Tree] = as_it_is

    @property
    def has_modes(self) -> bool:
        """Whether the library knows of models that train and models that are evaluated."""
        return self.evaluating is not as_it_is

    def evaluated(self, loss: Callable[..., Tree]) -> PureLoss:
        """The user's loss as a `PureLoss` in the mode of an evaluation."""
        return self.bind(lambda model, batch: loss(self.evaluating(model), batch))

    frozen: frozenset[str] = frozenset()
    state_axes: Mapping[str, LogicalAxes] = field(default_factory=dict[str, LogicalAxes])

    @cached_property
    def partition(self) -> Partition:
        """Which of `params` are trained."""
        return Partition.of(self.params, self.frozen)
