"""What does a Flax Linen model look like as a `Model`?

Boxes are read (see `names.py`) and taken off. The collection
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
from flax.core import unfreeze

from shardlib import _jax_compat
from shardlib.annotation.keys import key_of
from shardlib.annotation.linen_state import loss_metrics_and_updates
from shardlib.annotation.model import Free, Model, PureLoss, as_it_is
from shardlib.annotation.names import fitted, written
from shardlib.annotation.trees.exact import op_by_op
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import Filter, frozen_leaves
from shardlib.errors import AnnotationError
from shardlib.jax_types import Index


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


@_jax_compat.unsharded_variables()
def from_linen(described: LinenInit, wrt: Filter = None, free: Free = as_it_is) -> Model:
    """Reads a Linen model.

    Args:
        wrt: predicate over paths of the collection "params" that says which are trained; None for
            all.
    """
    name = described.module.name or type(described.module).__name__

    @free
    def boxed(seed: Index) -> dict[str, Any]:
        inputs = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
            described.inputs,
        )
        return unfreeze(described.module.init(key_of(seed), *inputs, **described.options))

    @_jax_compat.unsharded_variables()
    def init(seed: Index) -> tuple[Tree, Tree]:
        variables = nn.unbox(boxed(seed))
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
    boxed_params = boxes.pop("params")
    params, state = nn.unbox(boxed_params), nn.unbox(boxes)
    axes, findings = fitted(params, written(boxed_params))
    state_axes, others = fitted(state, written(boxes))
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


def _binder(stateful: bool) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            result = loss({"params": params, **state} if stateful else params, batch)
            value, metrics, updates = loss_metrics_and_updates(result, state, nn.unbox)
            return value, (metrics, {**state, **updates})

        return pure

    return bind
