"""Experts that all tokens of a program visit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from shardlib.errors import ModelError
from shardlib.functions.experts import ExpertForm, visited
from shardlib.jax_types import Value


def visiting(form: ExpertForm) -> Callable[..., tuple[Value, Value]]:
    """The function that takes the place of a call of `visit` for one token; mapped over tokens it
    sorts all of them by expert, once. No token is dropped: how many an expert may take depends on
    the other rows of a batch, of which a request knows nothing.

    Args:
        form: of the call.
    """
    dropless = replace(form, capacity=None)

    @custom_vmap
    def visit(*arrays: Value) -> tuple[Value, Value]:
        return visited(dropless, *arrays)

    @visit.def_vmap
    def visit_many(
        size: int, mapped: tuple[bool, ...], *arrays: Value
    ) -> tuple[tuple[Value, Value], tuple[bool, bool]]:
        if any(mapped[3:]):
            raise ModelError("experts whose parameters depend on the token cannot be served")
        tokens = [
            array if has else jnp.broadcast_to(array, (size, *array.shape))
            for array, has in zip(arrays[:3], mapped[:3], strict=True)
        ]
        return visited(dropless, *tokens, *arrays[3:]), (True, False)

    return visit
