"""Attention of one block of queries to one block of keys, in parts that can be added up, and its
gradient.

A part is the result of attention to some of the keys and, for every query, the logarithm of the sum
of exponentials that it was divided by. Two parts make one (online softmax, Milakov and Gimelshein,
arXiv:1805.02867); with the logarithm over all keys known, every part of the backward pass can be
made on its own (FlashAttention, arXiv:2205.14135, algorithm 4).

Queries are [B, Q, H, D], keys and values [B, K, G, D] and [B, K, G, V], where each of the G groups
has H / G heads of the queries; all arithmetic is in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.graph.kernels import BLOCK
from shardlib.jax_types import Value
from shardlib.lowering.context.mask import Sight, Tokens

#: The logarithm of the sum over no keys: finite, so that differences of two of them are no NaN.
NOTHING = -1e30


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are made.

    Attributes:
        scale: what products of queries and keys are multiplied by.
        softcap: scores become cap * tanh(scores / cap); 0 leaves them.
        block: the most queries, and the most keys, whose scores are made at a time.
    """

    scale: float
    softcap: float = 0.0
    block: int = BLOCK

    def of(self, query: Value, key: Value) -> Value:
        """Scores [B, G, H / G, Q, K].

        Args:
            query: [B, Q, H, D].
            key: [B, K, G, D].
        """
        raw = (
            jnp.einsum(
                "bqghd,bkgd->bghqk",
                grouped(query, key.shape[2]),
                key,
                preferred_element_type=jnp.float32,
            )
            * self.scale
        )
        return self.softcap * jnp.tanh(raw / self.softcap) if self.softcap else raw

    def back(self, scores: Value, cotangent: Value) -> Value:
        """The cotangent of products of queries and keys, for that of scores."""
        return cotangent * (1 - (scores / self.softcap) ** 2 if self.softcap else 1.0) * self.scale


@dataclass(frozen=True, kw_only=True)
class Part:
    """Attention to some keys.

    Attributes:
        result: [B, Q, H, V] in float32; zeros where no key is seen.
        total: logarithm of the sum of exponentials, [B, Q, H].
    """

    result: Any
    total: Value

    def __add__(self, other: Part) -> Part:
        total = jnp.logaddexp(self.total, other.total)
        return Part(
            result=sum(
                part.result * jnp.exp(part.total - total)[..., None] for part in (self, other)
            ),
            total=total,
        )


jax.tree_util.register_dataclass(Part, data_fields=["result", "total"], meta_fields=[])


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """What comes back to queries, of their attention to all keys.

    Attributes:
        total: logarithm of the sum of exponentials, [B, Q, H].
        cotangent: of the result, [B, Q, H, V].
        inner: product of cotangent and result, summed over V: [B, Q, H], float32.
    """

    total: Value
    cotangent: Value
    inner: Value

    @classmethod
    def of(cls, result: Value, total: Value, cotangent: Value) -> Incoming:
        """What comes back for a result.

        Args:
            result: of attention to all keys, [B, Q, H, V].
            total: logarithm of the sum of exponentials, [B, Q, H].
        """
        return cls(
            total=total,
            cotangent=cotangent,
            inner=(cotangent.astype(jnp.float32) * result).sum(-1),
        )

    def map(self, change: Callable[[Value], Value]) -> Incoming:
        """The same for other queries: all arrays changed alike."""
        return Incoming(
            total=change(self.total),
            cotangent=change(self.cotangent),
            inner=change(self.inner),
        )


def nothing(query: Value, width: int) -> Part:
    """Attention to no keys.

    Args:
        query: [B, Q, H, D].
    """
    return Part(
        result=jnp.zeros((*query.shape[:3], width), jnp.float32),
        total=jnp.full(query.shape[:3], NOTHING, jnp.float32),
    )


def grouped(query: Value, groups: int) -> Value:
    """Heads by groups: [B, Q, H, D] -> [B, Q, G, H / G, D].

    Args:
        query: [B, Q, H, D].
    """
    return query.reshape(*query.shape[:2], groups, -1, query.shape[3])


def attend_block(
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    sight: Sight,
    scores: Scores,
) -> Part:
    """Attention of queries to keys."""
    added = sight.added(rows, columns)
    values = _hidden(_more(scores.of(query, key), added), sight.seen(rows, columns))
    largest = jnp.maximum(
        values.max(-1), NOTHING / 2
    )  # where nothing is seen, all exponentials are to be zeros
    shares = jnp.exp(values - largest[..., None])
    total = shares.sum(-1)
    result = jnp.einsum(
        "bghqk,bkgv->bqghv",
        (shares / jnp.maximum(total, 1e-30)[..., None]).astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    summed = jnp.where(total > 0, jnp.log(jnp.maximum(total, 1e-30)) + largest, NOTHING)
    return Part(
        result=result.reshape(*query.shape[:3], -1),
        total=jnp.moveaxis(summed, 3, 1).reshape(query.shape[:3]),
    )


def attend_back_block(
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    sight: Sight,
    scores: Scores,
    incoming: Incoming,
) -> tuple[Value, ...]:
    """Gradients of queries, keys and values that this part of the keys is the reason of, and of the
    array of what distances add, if they do, in float32; operands of products are of the dtype of
    queries, keys and values.
    """
    groups = key.shape[2]

    def by_group(array: Value) -> Value:
        """[B, Q, H] -> [B, G, H / G, Q, 1]."""
        return jnp.moveaxis(array.reshape(*array.shape[:2], groups, -1), 1, 3)[..., None]

    plain = scores.of(query, key)
    added, total = sight.added(rows, columns), by_group(incoming.total)
    values = _hidden(_more(plain, added), sight.seen(rows, columns))
    shares = jnp.exp(jnp.minimum(values - total, 0.0)) * (total > NOTHING / 2)
    back = grouped(incoming.cotangent, groups).astype(value.dtype)
    to_value = jnp.einsum(
        "bghqk,bqghv->bkgv", shares.astype(value.dtype), back, preferred_element_type=jnp.float32
    )
    moved = shares * (
        jnp.einsum("bqghv,bkgv->bghqk", back, value, preferred_element_type=jnp.float32)
        - by_group(incoming.inner)
    )
    products = scores.back(plain, moved)
    to_query = jnp.einsum(
        "bghqk,bkgd->bqghd", products.astype(key.dtype), key, preferred_element_type=jnp.float32
    ).reshape(query.shape)
    to_key = jnp.einsum(
        "bghqk,bqghd->bkgd",
        products.astype(query.dtype),
        grouped(query, groups),
        preferred_element_type=jnp.float32,
    )
    if added is None:
        return to_query, to_key, to_value
    to_added = moved.sum(0).reshape(added.shape)
    return to_query, to_key, to_value, *sight.offsets_back(rows, columns, to_added)


def _more(scores: Value, added: Value | None) -> Value:
    return scores if added is None else scores + added.reshape(scores.shape[1:])


def _hidden(scores: Value, seen: Value | None) -> Value:
    if seen is None:
        return scores
    return jnp.where((seen if seen.ndim == 3 else seen[None])[:, None, None], scores, NOTHING)
