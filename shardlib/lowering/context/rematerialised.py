"""Attention of arrays that one device has, with a backward pass that makes scores again: nothing of
their size is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardlib.jax_types import Value
from shardlib.lowering.context.block import Incoming, Part, Scores
from shardlib.lowering.context.blocks import attend, attend_back
from shardlib.lowering.context.mask import ALL_BEFORE, Given, Sight, Tokens


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
        inputs: Given,
    ) -> Part:
        """Attention as a part, before it is cast."""
        return attend(query, key, value, rows, columns, self._sight(inputs), self.scores)

    def backward(
        self,
        query: Value,
        key: Value,
        value: Value,
        rows: Tokens,
        columns: Tokens,
        inputs: Given,
        incoming: Incoming,
    ) -> tuple[Value, ...]:
        """Gradients of queries, keys and values, and of what distances add, in float32."""
        return attend_back(
            query, key, value, rows, columns, self._sight(inputs), self.scores, incoming
        )

    def _sight(self, inputs: Given) -> Sight:
        return inputs.sight(self.window, causal=self.causal)


def attention(
    scores: Scores,
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    sight: Sight = ALL_BEFORE,
) -> Value:
    """Attention of queries to keys, with gradients.

    Args:
        scores: how scores are made, in blocks of which size.
        query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V], with H a multiple of G.
        rows, columns: where queries and keys stand.
        sight: which keys a query sees.

    Returns:
        [B, Q, H, V], of the dtype of the values.
    """
    window, inputs = sight.split
    return _attention(
        Local(scores=scores, causal=sight.causal, window=window),
        query,
        key,
        value,
        rows,
        columns,
        inputs,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    local: Local,
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    inputs: Given,
) -> Value:
    return local.forward(query, key, value, rows, columns, inputs).result.astype(value.dtype)


def _forward(local: Local, *operands: Any) -> tuple[Any, Any]:
    part = local.forward(*operands)
    result = part.result.astype(
        operands[2].dtype
    )  # what follows often keeps it as well, so that it is held once
    return result, (*operands, result, part.total)


def _backward(local: Local, saved: tuple[Any, ...], cotangent: Value) -> tuple[Any, ...]:
    query, key, value, rows, columns, inputs, result, total = saved
    incoming = Incoming.of(result, total, cotangent)
    gradients = local.backward(query, key, value, rows, columns, inputs, incoming)
    return (
        *(
            gradient.astype(leaf.dtype)
            for gradient, leaf in zip(gradients[:3], saved, strict=False)
        ),
        None,
        None,
        inputs.cotangent(*gradients[3:]),
    )


_attention.defvjp(_forward, _backward)
