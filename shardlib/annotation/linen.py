"""What does a Flax Linen model look like as a `Model`?

Boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`) are read and never changed. The collection "params" is trained; other
collections ("batch_stats", ...) are model state. The user's loss takes the params tree; a model that has state hands
its loss the whole variables dict instead, and the loss may return `(loss, metrics, updates)` with the mutated
collections, as `module.apply(..., mutable=[...])` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta, unfreeze

from shardlib.annotation.exact import op_by_op
from shardlib.annotation.model import Model, PureLoss, Tree
from shardlib.annotation.names import fitted
from shardlib.annotation.result import loss_and_metrics
from shardlib.errors import AnnotationError


@dataclass(frozen=True, kw_only=True)
class LinenInit:
    """A Linen module and what to call it with; made by `linen`."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def linen(module: nn.Module, *sample_inputs: Any, **options: Any) -> LinenInit:
    """Describes how a Linen model is initialised.

    Args:
        module: the module.
        sample_inputs: arrays or `jax.ShapeDtypeStruct`; only their shapes and dtypes matter.
        options: keyword arguments of the module's call, e.g. `train=False`; kept static.

    Raises:
        AnnotationError: `module` is no Linen module.
    """
    if not isinstance(module, nn.Module):
        raise AnnotationError(f"shardlib.linen needs a flax.linen.Module, found {type(module).__name__}")
    return LinenInit(module=module, inputs=sample_inputs, options=options)


def _is_box(value: Any) -> bool:
    return isinstance(value, meta.AxisMetadata)


def _names(box: Any) -> Any:
    if not _is_box(box):
        return None
    if hasattr(box, "names"):
        return box.names
    metadata = getattr(box, "metadata", {})
    return metadata.get("out_sharding") or metadata.get("sharding") or metadata.get("sharding_names")


def _unboxed(tree: Tree) -> Tree:
    def unbox(box: Any) -> Any:
        while _is_box(box):
            box = box.unbox(apply_constraint=False) if isinstance(box, meta.Partitioned) else box.unbox()
        return box

    return jax.tree.map(unbox, tree, is_leaf=_is_box)


def from_linen(described: LinenInit) -> Model:
    """Reads a Linen model.

    Raises:
        AnnotationError: the module fails to initialise, has no params, or its names do not fit.
    """
    name = described.module.name or type(described.module).__name__

    def boxed(seed: Any) -> dict[str, Any]:
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, described.inputs)
        return unfreeze(described.module.init(jax.random.key(seed), *inputs, **described.options))

    def init(seed: Any) -> tuple[Tree, Tree]:
        variables = _unboxed(boxed(seed))
        return variables.pop("params"), variables

    try:
        abstract = jax.eval_shape(lambda: boxed(0))
    except Exception as error:
        raise AnnotationError(f"Linen module {name!r} failed to initialise on {len(described.inputs)} sample inputs: "
                              f"{type(error).__name__}: {error}") from error
    if not abstract.get("params"):
        raise AnnotationError(f"Linen module {name!r} has no params; collections found: {', '.join(abstract) or 'none'}")
    leaves = jax.tree_util.tree_leaves_with_path(abstract["params"], is_leaf=_is_box)
    shapes = {path: _unboxed(leaf).shape for path, leaf in leaves}
    axes, findings = fitted({path: _names(leaf) for path, leaf in leaves}, shapes, stacks=True)
    state = _unboxed(abstract)
    params = state.pop("params")
    return Model(name=name, init=op_by_op(init), params=params, state=state, axes=axes, bind=_binder(bool(jax.tree.leaves(state))),
                 rebuild=lambda params, state: {"params": params, **state} if jax.tree.leaves(state) else params, findings=findings)


def _binder(stateful: bool) -> Callable[[Callable[..., Any]], PureLoss]:
    def bind(loss: Callable[..., Any]) -> PureLoss:
        def pure(params: Tree, state: Tree, batch: Tree) -> Any:
            result = loss({"params": params, **state} if stateful else params, batch)
            updates: Mapping[str, Any] = {}
            if stateful and isinstance(result, tuple) and len(result) == 3:
                *result, updates = result
                result = tuple(result)
            value, metrics = loss_and_metrics(result)
            return value, (metrics, {**state, **{key: _unboxed(unfreeze(value)) for key, value in updates.items() if key in state}})

        return pure

    return bind
