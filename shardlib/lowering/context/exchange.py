"""Keys and values are gathered, or devices exchange parts of the sequence for heads.

Gathered, every device has all keys and values for its own queries. Exchanged (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509), every device has the whole sequence for its share of the heads:
four all-to-alls of a device's part of the activations, whatever the number of devices. Where there are fewer groups of keys and values than devices, groups are repeated first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import LayoutError
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.cut import Cut
from shardlib.lowering.context.local import attention
from shardlib.lowering.context.sight import Tokens


def gathered(cut: Cut, scores: Scores, query: Any, key: Any, value: Any, segments: Any = None, *, causal: bool = True, window: Any = None) -> Any:
    """Attention of this device's queries to gathered keys; arguments and result as those of `Ring.attention`."""
    def whole(array: Any) -> Any:
        return jax.lax.all_gather(array, cut.axis, axis=1, tiled=True)

    rows = Tokens(position=cut.positions(cut.device(), query.shape[1]), document=segments)
    columns = Tokens(position=_positions(cut, query.shape[1]), document=None if segments is None else whole(segments))
    return attention(scores, query, whole(key), whole(value), rows, columns, causal=causal, window=window)


def exchanged(cut: Cut, scores: Scores, query: Any, key: Any, value: Any, segments: Any = None, *, causal: bool = True, window: Any = None) -> Any:
    """Attention to the whole sequence for this device's share of the heads; arguments and result as those of `Ring.attention`.

    Raises:
        LayoutError: the devices do not divide the heads.
    """
    heads, groups, ways = query.shape[2], key.shape[2], cut.ways
    if heads % ways or (groups % ways and ways % groups):
        raise LayoutError(f"{heads} heads with {groups} groups of keys and values cannot be exchanged over {cut.axis}={ways}\nTry: a {cut.axis} axis that divides both, or a ring")
    if groups % ways:
        key, value = (jnp.repeat(array, ways // groups, axis=2) for array in (key, value))

    def exchange(array: Any, *, back: bool = False) -> Any:
        return jax.lax.all_to_all(array, cut.axis, split_axis=1 if back else 2, concat_axis=2 if back else 1, tiled=True)

    documents = None if segments is None else jax.lax.all_gather(segments, cut.axis, axis=1, tiled=True)
    tokens = Tokens(position=_positions(cut, query.shape[1]), document=documents)
    return exchange(attention(scores, exchange(query), exchange(key), exchange(value), tokens, tokens, causal=causal, window=window), back=True)


def _positions(cut: Cut, local: int) -> Any:
    """Positions of what all devices have, one after the other."""
    return jnp.concatenate([cut.positions(device, local) for device in range(cut.ways)])
