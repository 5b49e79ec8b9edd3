"""Attention of arrays that one device has, with a backward pass that makes scores again: nothing of
their size is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardlib.jax_types import Index, Value
from shardlib.lowering.context.block import Incoming, Part, Scores
from shardlib.lowering.context.blocks import attend, attend_back
from shardlib.lowering.context.mask import Sight, Tokens, split_window


@dataclass(frozen=True, kw_only=True)
class Local:
    """Attention on one device.

    Attributes:
        scores: how scores are made.
        causal: whether a query sees no later position.
        window: how far it sees, as in `Sight`; 0 for all.
    """

    scores: Scores
    causal: bool = True
    window: int = 0

    def forward(
        self,
        query: Value,
        key: Value,
        value: Value,
        rows: Tokens,
        columns: Tokens,
        window: Index | None,
    ) -> Part:
        """Attention as a part, before it is cast."""
        return attend(query, key, value, rows, columns, self._sight(window), self.scores)

    def backward(
        self,
        query: Value,
        key: Value,
        value: Value,
        rows: Tokens,
        columns: Tokens,
        window: Index | None,
        incoming: Incoming,
    ) -> tuple[Value, Value, Value]:
        """Gradients of queries, keys and values, in float32."""
        return attend_back(
            query, key, value, rows, columns, self._sight(window), self.scores, incoming
        )

    def _sight(self, window: Index | None) -> Sight:
        return Sight(causal=self.causal, window=self.window if window is None else window)


def attention(
    scores: Scores,
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    *,
    causal: bool = True,
    window: Index | None = None,
) -> Value:
    """Attention of queries to keys, with gradients.

    Args:
        scores: how scores are made, in blocks of which size.
        query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V], with H a multiple of G.
        rows, columns: where queries and keys stand.
        causal, window: as in `Sight`.

    Returns:
        [B, Q, H, V], of the dtype of the values.
    """
    static, given = split_window(window)
    return _attention(
        Local(scores=scores, causal=causal, window=static), query, key, value, rows, columns, given
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    local: Local,
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    window: Index | None,
) -> Value:
    return local.forward(query, key, value, rows, columns, window).result.astype(value.dtype)


def _forward(local: Local, *operands: Any) -> tuple[Any, Any]:
    part = local.forward(*operands)
    result = part.result.astype(
        operands[2].dtype
    )  # what follows often keeps it as well, so that it is held once
    return result, (*operands, result, part.total)


def _backward(local: Local, saved: tuple[Any, ...], cotangent: Value) -> tuple[Any, ...]:
    query, key, value, rows, columns, window, result, total = saved
    incoming = Incoming.of(result, total, cotangent)
    found = local.backward(query, key, value, rows, columns, window, incoming)
    return (
        *(gradient.astype(leaf.dtype) for gradient, leaf in zip(found, saved, strict=False)),
        None,
        None,
        None,
    )


_attention.defvjp(_forward, _backward)
