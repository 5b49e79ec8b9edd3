"""Which front end reads what the user gave?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from shardlib.annotation.linen import LinenInit, from_linen
from shardlib.annotation.model import Free, Model, as_it_is
from shardlib.annotation.nnx import from_nnx
from shardlib.annotation.tree import TreeInit, from_tree
from shardlib.annotation.trees.parts import is_array
from shardlib.annotation.trees.wrt import Filter
from shardlib.errors import AnnotationError

#: What makes a model: a callable `nnx.Rngs -> nnx.Module`, a description by `shardlib.linen` or
#: `shardlib.tree`, or a model that has been read already.
Init = Callable[..., Any] | LinenInit | TreeInit | Model


def _built(init: Any) -> str | None:
    """The name of the class of a module that is a pytree, where init is one rather than what makes
    one.
    """
    built = (
        not isinstance(init, type)
        and not jax.tree_util.all_leaves([init])
        and any(map(is_array, jax.tree.leaves(init)))
    )
    return type(init).__name__ if built and callable(init) else None


def read(init: Init, wrt: Filter = None, *, free: Free = as_it_is) -> Model:
    """Reads a model in any of the spellings that `shardlib.compile` takes as `init`.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or the result of `shardlib.linen` or
            `shardlib.tree`.
        wrt: what is trained, see `shardlib.annotation.trees.wrt`; None for all parameters.
    """
    if isinstance(init, Model):
        if wrt is not None:
            raise AnnotationError(
                "init is a model that has been read already, and what it trains with it\nTry: wrt"
                " where the model is read"
            )
        return init
    if isinstance(init, LinenInit):
        return from_linen(init, wrt, free)
    if isinstance(init, TreeInit):
        return from_tree(init, wrt, free)
    if isinstance(init, nn.Module):
        raise AnnotationError(
            f"init is the Linen module {type(init).__name__}, which needs sample inputs\nTry:"
            " shardlib.linen(module, *sample_inputs)"
        )
    if isinstance(init, nnx.Module):
        kind = type(init).__name__
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: lambda rngs: {kind}(..., rngs=rngs)"
        )
    if (kind := _built(init)) is not None:
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: shardlib.tree(lambda key: {kind}(..., key=key)); its functions and flags"
            " stay as they are (eqx.partition is not needed), and the loss gets the whole module"
        )
    if callable(init):
        return from_nnx(init, wrt, free)  # pyright: ignore[reportArgumentType]
    raise AnnotationError(
        f"init is a {type(init).__name__}; expected a callable nnx.Rngs -> nnx.Module, "
        "shardlib.linen(module, *sample_inputs) or shardlib.tree(key_to_params, axes)"
    )
