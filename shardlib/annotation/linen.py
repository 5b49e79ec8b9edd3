"""What does a Flax Linen model look like as a `Model`?

Boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`) are read and never changed. The collection
"params" is trained; other collections ("batch_stats", ...) are model state. The user's loss takes
the params tree; a model that has state hands its loss the whole variables dict instead, and the
loss returns the mutated collections beside its value, as `module.apply(..., mutable=[...])` gives
them; see `linen`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta, unfreeze

from shardlib.annotation.keys import key_of
from shardlib.annotation.linen_state import loss_metrics_and_updates
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.names import fitted
from shardlib.annotation.trees.exact import op_by_op
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import Filter, frozen_leaves
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError
from shardlib.jax_types import Index
from shardlib.report import Finding


@dataclass(frozen=True, kw_only=True)
class LinenInit:
    """A Linen module and what to call it with; made by `linen`."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def linen(module: nn.Module, *sample_inputs: Tree, **options: object) -> LinenInit:
    """Describes how a Linen model is initialised.

    A loss takes the params, or, where the model has other collections, the whole variables dict.
    Collections that change in a training step (statistics of `nn.BatchNorm`) are returned by the
    loss, which becomes the state of the next step:

        def loss(variables, batch):
            logits, updates = module.apply(
                variables, batch["x"], train=True, mutable=["batch_stats"]
            )
            return cross_entropy(logits, batch["y"]), updates

    It may return `loss`, `(loss, metrics)`, `(loss, updates)`, `(loss, metrics, updates)`, `(loss,
    (metrics, updates))` or one mapping for both, `(loss, {"metrics": metrics, **updates})` or
    `(loss, {**metrics, **updates})`. What stands under the name of a collection of the model must
    have exactly its variables and is an update; metrics are arrays under other names; anything else
    is refused. Collections that are not returned stay as they are.

    Args:
        module: the module, unbound.
        sample_inputs: positional arguments of its call, arrays or `jax.ShapeDtypeStruct`; only
            their shapes and dtypes matter.
        options: keyword arguments of the module's call, e.g. `train=False`; kept static.

    Returns:
        The description, for `init` of `shardlib.plan`, `compile` and the like; nothing is
        initialised yet.

    Raises:
        AnnotationError: `module` is no Linen module.
    """
    if not isinstance(module, nn.Module):
        raise AnnotationError(
            f"shardlib.linen needs a flax.linen.Module, found {type(module).__name__}"
        )
    return LinenInit(module=module, inputs=sample_inputs, options=options)


def _is_box(value: Any) -> bool:
    return isinstance(value, meta.AxisMetadata)


def _names(box: Any) -> Any:
    if not _is_box(box):
        return None
    if hasattr(box, "names"):
        return box.names
    metadata = getattr(box, "metadata", {})
    return (
        metadata.get("out_sharding") or metadata.get("sharding") or metadata.get("sharding_names")
    )


def _unboxed(tree: Tree) -> Tree:
    def unbox(box: Any) -> Any:
        while _is_box(box):
            box = (
                box.unbox(apply_constraint=False)
                if isinstance(box, meta.Partitioned)
                else box.unbox()
            )
        return box

    return jax.tree.map(unbox, tree, is_leaf=_is_box)


def from_linen(described: LinenInit, wrt: Filter = None) -> Model:
    """Reads a Linen model.

    Args:
        described: the module and what to call it with.
        wrt: predicate over paths of the collection "params" that says which are trained; None for
            all.

    Raises:
        AnnotationError: the module fails to initialise, has no params, its names do not fit, or the
            predicate does not.
    """
    name = described.module.name or type(described.module).__name__

    def boxed(seed: Index) -> dict[str, Any]:
        inputs = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
            described.inputs,
        )
        return unfreeze(described.module.init(key_of(seed), *inputs, **described.options))

    def init(seed: Index) -> tuple[Tree, Tree]:
        variables = _unboxed(boxed(seed))
        return variables.pop("params"), variables

    try:
        abstract = jax.eval_shape(lambda: boxed(0))
    except Exception as error:
        raise AnnotationError(
            f"Linen module {name!r} failed to initialise on {len(described.inputs)} sample inputs: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not abstract.get("params"):
        raise AnnotationError(
            f"Linen module {name!r} has no params; collections found:"
            f" {', '.join(abstract) or 'none'}"
        )
    boxes = dict(abstract)
    axes, findings = _fitted(boxes.pop("params"))
    state_axes, others = _fitted(boxes)
    state = _unboxed(abstract)
    params = state.pop("params")
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=_binder(bool(jax.tree.leaves(state))),
        rebuild=lambda params, state: (
            {"params": params, **state} if jax.tree.leaves(state) else params
        ),
        findings=(*findings, *others),
        frozen=frozen_leaves(wrt, params, "Linen"),
        state_axes=state_axes,
    )


def _fitted(boxes: Tree) -> tuple[dict[str, LogicalAxes], tuple[Finding, ...]]:
    """The logical axes of boxed arrays by dotted path, and what the user should know of them."""
    leaves = jax.tree_util.tree_leaves_with_path(boxes, is_leaf=_is_box)
    return fitted(
        {path: _names(leaf) for path, leaf in leaves},
        {path: _unboxed(leaf).shape for path, leaf in leaves},
        stacks=True,
    )


def _binder(stateful: bool) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            result = loss({"params": params, **state} if stateful else params, batch)
            value, metrics, updates = loss_metrics_and_updates(result, state, _unboxed)
            return value, (metrics, {**state, **updates})

        return pure

    return bind
