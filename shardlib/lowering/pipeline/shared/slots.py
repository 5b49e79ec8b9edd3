"""One layer of arrays that have a slot for each of several chunks, [slots, layers, ...]."""

from __future__ import annotations

import jax

from shardlib.jax_types import Index, Value


def layer_of(stack: Value, slot: Index, layer: Index) -> Value:
    """What a layer has in a slot.

    Args:
        stack: [slots, layers, ...].
    """
    shape = stack.shape[2:]
    start = (slot, layer, *(0 for _ in shape))
    return jax.lax.dynamic_slice(stack, start, (1, 1, *shape)).reshape(shape)


def with_layer(stack: Value, leaf: Value, slot: Index, layer: Index) -> Value:
    """The same with something else for a layer in a slot.

    Args:
        stack: [slots, layers, ...].
    """
    start = (slot, layer, *(0 for _ in leaf.shape))
    return jax.lax.dynamic_update_slice(stack, leaf[None, None], start)
