"""One marked loss as a model with a loss, as `shardlib.compile` has them.

Its params are those that the step gives it, and the weights among the rest, which are frozen; its
batch is all else. Dims have the names that the step's colouring gave them, so that the rules of the
step's plan are rules of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation import activations
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.frontend.traced_model import Loss, TracedModel
from shardlib.graph.rows import Dependence, Rows
from shardlib.jax_types import Value
from shardlib.propagation.colours import Colouring
from shardlib.tracing.steps.marked_losses import FoundLoss
from shardlib.tracing.steps.parts import tied_rows
from shardlib.tracing.steps.traced_step import TracedStep
from shardlib.tracing.trace import trace

#: Of a loss that gets parts of the batch of a fixed number of rows, or nothing of it.
_ROWLESS = Dependence(
    kind="coupled", why="none of its arrays grows with the rows of the batch", fixed=True
)


@dataclass(frozen=True, kw_only=True)
class SingleLoss:
    """A marked loss as a model with a loss.

    Attributes:
        found: where it stands in the step.
        model: the model, the loss, and their trace.
        params: (path, position among the leaves of the loss) of the params of the model, in the
            order of its tree.
        batch: the same of the arrays of its batch.
        names: of the dims of each array of the batch, by path.
    """

    found: FoundLoss
    model: TracedModel
    params: tuple[tuple[str, int], ...]
    batch: tuple[tuple[str, int], ...]
    names: dict[str, LogicalAxes]

    @property
    def leaves(self) -> tuple[tuple[str, str], ...]:
        """Where its arrays belong, to the "params", the "frozen" params or the "batch", and their
        paths there.
        """
        frozen = self.model.model.frozen
        places = {at: ("frozen" if path in frozen else "params", path) for path, at in self.params}
        places |= {at: ("batch", path) for path, at in self.batch}
        return tuple(places[at] for at in range(len(places)))

    def arguments(self, leaves: Sequence[Value]) -> tuple[dict[str, Value], dict[str, Value]]:
        """(params, batch) of the model for the leaves of the loss."""
        return (
            {path: leaves[at] for path, at in self.params},
            {path: leaves[at] for path, at in self.batch},
        )


def single_loss(traced: TracedStep, found: FoundLoss, colouring: Colouring) -> SingleLoss:
    """A marked loss of a step by itself."""
    names, form = colouring.forward, found.form
    shapes = form.shapes
    weights = [*found.trained, *found.frozen]
    params = _unique([(traced.paths[_root(found, at)], at) for at in weights])
    batch = _unique([(form.paths[at], at) for at in found.others])
    sizes = _rows(traced), found.rows
    axes = {
        path: _named(names[found.operands[at]], shapes[at].shape, at, *sizes) for path, at in batch
    }
    loss = _pure(found, params, batch)
    model = Model(
        name=form.name,
        init=lambda seed: ({}, {}),
        params={path: shapes[at] for path, at in params},
        state={},
        axes={path: _once(names[found.operands[at]]) for path, at in params},
        bind=lambda loss: loss,
        rebuild=lambda params, state: params,
        frozen=frozenset(path for path, at in params if at in found.frozen),
    )
    given = {path: shapes[at] for path, at in batch}
    with activations.no_mesh():
        read = trace(
            model,
            loss,
            given,
            batch_axes=axes,
            policies=("none",),
            rows=form.rows,
        )
    problem = tied_rows(read.problem)
    if not any("batch" in one for one in axes.values()) and any(
        "batch" in one for *_, one in traced.problem.batch
    ):
        problem = replace(problem, rows=Rows(loss=_ROWLESS))
    read = replace(read, problem=problem)
    return SingleLoss(
        found=found,
        model=TracedModel(
            model=model,
            traced=read,
            loss=cast(Loss, loss),
            optimizer=optax.identity(),
            batch=given,
        ),
        params=params,
        batch=batch,
        names={path: axes for path, _, _, axes in read.problem.batch},
    )


def _pure(
    found: FoundLoss, params: Sequence[tuple[str, int]], batch: Sequence[tuple[str, int]]
) -> PureLoss:
    """(params, state, batch) -> (loss, (auxiliary results by name, state))."""

    def loss(given: Tree, state: Tree, rows: Tree) -> Any:
        leaves: list[Any] = [None] * len(found.operands)
        for values, paths in ((given, params), (rows, batch)):
            for path, at in paths:
                leaves[at] = values[path]
        value, aux = found.function(leaves)
        return value, ({name: jnp.asarray(leaf) for name, leaf in _results(aux)}, state)

    return loss


def written_name(name: str) -> str:
    """The name of an auxiliary result as the user wrote it; "" of the only one."""
    return name.partition(".")[2]


def _results(aux: Tree) -> list[tuple[str, Any]]:
    """The auxiliary results by name, in an order that sorting keeps."""
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    return [
        (f"{at:04}.{path_text(path)}".rstrip("."), leaf) for at, (path, leaf) in enumerate(leaves)
    ]


def _root(found: FoundLoss, at: int) -> int:
    root = found.roots[at]
    assert root is not None
    return root


def _unique(named: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """(path, position) with other paths for what comes twice, in the order of a dict's leaves."""
    seen: dict[str, int] = {}
    for path, at in named:
        while path in seen:
            path += "'"
        seen[path] = at
    return tuple(sorted(seen.items()))


def _rows(traced: TracedStep) -> int | None:
    """The number of rows of the batch; None where arrays of it have different numbers."""
    sizes = {
        size
        for _, shape, _, names in traced.problem.batch
        for size, name in zip(shape, names, strict=True)
        if name == "batch"
    }
    return sizes.pop() if len(sizes) == 1 else None


def _named(
    names: LogicalAxes,
    shape: tuple[int, ...],
    position: int,
    count: int | None,
    rows: Mapping[int, int] | None,
) -> LogicalAxes:
    """The names of an array beside the params.

    Args:
        count: rows of the batch, None where it has several numbers.
        rows: dims of rows by position; None where they are read off names and sizes.
    """
    once = _once(names)
    if rows is not None:
        dim = rows.get(position)
        return tuple(
            "batch" if at == dim else None if name == "batch" else name
            for at, name in enumerate(once)
        )
    if "batch" in once or not shape or shape[0] != count or once[0] is not None:
        return once
    return ("batch", *once[1:])


def _once(names: LogicalAxes) -> LogicalAxes:
    """Names of which each stands once."""
    return tuple(None if name in names[:at] else name for at, name in enumerate(names))
