"""Which front end reads what the user gave?"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from flax import nnx

from shardlib.annotation.linen import LinenInit, from_linen
from shardlib.annotation.model import Model
from shardlib.annotation.nnx import from_nnx
from shardlib.annotation.tree import TreeInit, from_tree
from shardlib.errors import AnnotationError


def read(init: Any) -> Model:
    """Reads a model in any of the spellings that `shardlib.compile` takes as `init`.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or the result of `shardlib.linen` or `shardlib.tree`.

    Raises:
        AnnotationError: none of these, or its names do not fit its arrays.
    """
    if isinstance(init, Model):
        return init
    if isinstance(init, LinenInit):
        return from_linen(init)
    if isinstance(init, TreeInit):
        return from_tree(init)
    if isinstance(init, nn.Module):
        raise AnnotationError(f"init is the Linen module {type(init).__name__}, which needs sample inputs\nTry: shardlib.linen(module, *sample_inputs)")
    if isinstance(init, nnx.Module):
        kind = type(init).__name__
        raise AnnotationError(f"init is a {kind} that is built already; shardlib builds it sharded from the start\nTry: lambda rngs: {kind}(..., rngs=rngs)")
    if callable(init):
        return from_nnx(init)  # pyright: ignore[reportArgumentType]
    raise AnnotationError(f"init is a {type(init).__name__}; expected a callable nnx.Rngs -> nnx.Module, "
                          "shardlib.linen(module, *sample_inputs) or shardlib.tree(key_to_params, axes)")
