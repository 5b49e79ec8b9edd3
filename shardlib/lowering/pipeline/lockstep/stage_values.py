"""What stages hold, pass on and keep, as pytrees of arrays with a leading dim of stages."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index, Value
from shardlib.lowering.pipeline.shared.chunk import Gradients
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.lowering.pipeline.shared.slots import layer_of, with_layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Held:
    """What every stage holds through all ticks.

    Attributes:
        weights: [stages, chunks, layers, ...] of each stacked parameter; sharded over the stages.
        tables: the same of each constant table.
        drawn: [microbatches, stages, chunks, layers, ...] of each array of model state with a slice
            a layer.
        shared, constant: see `Operands`.
        ready: [stages, chunks, layers, ...] of each operand that is gathered beforehand; of two
            chunks where a chunk is gathered when its round begins.
    """

    weights: Arrays
    tables: Arrays
    drawn: Arrays
    shared: Arrays
    constant: Arrays
    ready: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Hop:
    """What is on its way between stages.

    Attributes:
        next: [stages, ...], what came from the neighbour.
        waiting: [stages, ticks, ...], what waits before the first stage (backward: the last one)
            until that goes on to the next chunk; empty where nothing waits.
    """

    next: Arrays
    waiting: Arrays


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What a tick backward leaves.

    Attributes:
        hop, sums, passed: see `Stages.backward`.
        entered: cotangents of what entered the first stage, in the order of `Stages.moving`, for
            `handed_out`.
    """

    hop: Hop
    sums: Gradients
    passed: Arrays
    entered: Arrays


def slot_of(ring: Arrays, slot: Index) -> Arrays:
    """What a stage keeps in one of its slots, of arrays [its stage, slots, ...].

    Args:
        ring: activation stash, arrays [its stage, slots, ...].
    """
    return [jax.lax.dynamic_index_in_dim(slots[0], slot, 0, keepdims=False) for slots in ring]


def with_slot(ring: Arrays, arrays: Arrays, slot: Index) -> Arrays:
    """The same with something else in that slot.

    Args:
        ring: activation stash, arrays [its stage, slots, ...].
    """
    return [
        jax.lax.dynamic_update_index_in_dim(slots[0], leaf, slot, 0)[None]
        for slots, leaf in zip(ring, arrays, strict=True)
    ]


def only_if(condition: Value, array: Value) -> Value:
    """An array where a condition holds, otherwise zeros."""
    return jnp.where(condition, array, jnp.zeros_like(array))


def added_to_chunk(total: Value, gradient: Value, chunk: Index, works: Value) -> Value:
    """Adds a chunk's gradient to the sums of all chunks [chunks, ...].

    Args:
        total: [chunks, ...].
    """
    before = jax.lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(
        total, before + jnp.where(works, gradient, 0).astype(total.dtype), chunk, 0
    )


def added_layer_by_layer(totals: Arrays, gradients: Arrays, slot: Index, works: Value) -> Arrays:
    """Adds gradients of a chunk's layers to their sums, one layer after the other: at once, XLA
    would copy what all of the layers have had so far.

    Args:
        totals: arrays [its stage, slots, layers, ...].
        gradients: arrays [layers, ...].
    """
    if not totals:
        return []

    def layer(index: Index, totals: Arrays) -> Arrays:
        sums: Arrays = []
        for total, gradient in zip(totals, gradients, strict=True):
            more = jax.lax.dynamic_index_in_dim(gradient, index, 0, keepdims=False)
            before = layer_of(total, slot, index)
            after = before + jnp.where(works, more, 0).astype(total.dtype)
            sums.append(with_layer(total, after, slot, index))
        return sums

    added = jax.lax.fori_loop(0, gradients[0].shape[0], layer, [total[0] for total in totals])
    return [total[None] for total in added]
