"""Experts that all tokens of a program visit together.

Every device computes for the tokens of its group those experts, or those parts of all experts,
whose weights it has; one all-reduce adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from shardlib.errors import ModelError
from shardlib.functions.experts import ExpertForm, visited
from shardlib.jax_types import Value
from shardlib.lowering.serving.grid import SHARED, Grid


def visiting(form: ExpertForm, grid: Grid) -> Callable[..., tuple[Value, Value]]:
    """The function that takes the place of a call of `visit` for one token; mapped over tokens it
    sorts all of them by expert, once. No token is dropped: how many an expert may take depends on
    the other rows of a batch, of which a request knows nothing.
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
        return _visited(dropless, grid, tokens, arrays[3:]), (True, False)

    return visit


def _visited(
    form: ExpertForm, grid: Grid, tokens: list[Value], parameters: tuple[Value, ...]
) -> tuple[Value, Value]:
    count, _, inner = parameters[0].shape
    devices, data = grid.ways(SHARED), PartitionSpec("data")
    by_expert = count % devices == 0
    if not by_expert and inner % devices:
        return visited(form, *tokens, *parameters)
    up, down = (
        (PartitionSpec(SHARED), PartitionSpec(SHARED))
        if by_expert
        else (PartitionSpec(None, None, SHARED), PartitionSpec(None, SHARED))
    )

    def local(x: Value, weights: Value, chosen: Value, *parameters: Value) -> Value:
        if by_expert and devices > 1:
            first = grid.first(SHARED, parameters[0].shape[0])
            weights, chosen, parameters = _mine(weights, chosen - first, parameters)
        result, _ = visited(form, x, weights, chosen, *parameters)
        return jax.lax.psum(result, SHARED) if devices > 1 else result

    specs = (up, down, up)[: len(parameters)]
    result = grid.local(local, (data, data, data, *specs), data)(*tokens, *parameters)
    return result, jnp.zeros((), jnp.int32)


def _mine(
    weights: Value, chosen: Value, parameters: tuple[Value, ...]
) -> tuple[Value, Value, tuple[Value, ...]]:
    """The choices that a device has the experts of; others count nothing, at its last expert."""
    last = parameters[0].shape[0] - 1
    here = (chosen >= 0) & (chosen <= last)
    return jnp.where(here, weights, 0), jnp.where(here, chosen, last), parameters
