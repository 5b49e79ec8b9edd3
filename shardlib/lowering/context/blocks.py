"""Attention over blocks of queries and keys: what is held at a time are the scores of one block of
queries and one of keys.

Blocks of which no query sees any key are left out. Sequences that no block divides are filled up
with tokens that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index, Value
from shardlib.lowering.context.block import (
    Incoming,
    Part,
    Scores,
    attend_back_block,
    attend_block,
    nothing,
)
from shardlib.lowering.context.mask import Sight, Tokens

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A sequence in equal blocks.

    Attributes:
        length: of the sequence.
        size: of a block.
    """

    length: int
    size: int

    @classmethod
    def of(cls, length: int, limit: int) -> Blocks:
        """As few blocks of at most `limit` positions as there can be, as short as they can be.

        >>> Blocks.of(10, 4)
        Blocks(length=10, size=4)
        >>> Blocks.of(9, 4).size, Blocks.of(3, 4).size, Blocks.of(9, 4).missing
        (3, 3, 0)

        Args:
            length: positions of the sequence.
            limit: positions of a block.
        """
        return cls(length=length, size=-(-length // -(-length // limit)))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.length // self.size)

    @property
    def missing(self) -> int:
        """Positions that the last block lacks."""
        return self.count * self.size - self.length

    def full(self, array: Value, dim: int = 1) -> Value:
        """An array whose last block is filled up, with its last value."""
        return (
            jnp.pad(
                array,
                [(0, self.missing if i == dim else 0) for i in range(array.ndim)],
                mode="edge",
            )
            if self.missing
            else array
        )

    def full_tokens(self, tokens: Tokens) -> Tokens:
        """The same for tokens; those that are added are not real."""
        real = jnp.arange(self.count * self.size) < self.length if self.missing else None
        return Tokens(
            position=self.full(tokens.position, 0),
            document=None if tokens.document is None else self.full(tokens.document),
            real=real,
        )

    def at(self, number: Index, array: Value, dim: int = 1) -> Value:
        """The block of a number, of an array that is full."""
        return jax.lax.dynamic_slice_in_dim(array, number * self.size, self.size, dim)

    def tokens_at(self, number: Index, tokens: Tokens) -> Tokens:
        """The same for tokens."""
        position = self.at(number, tokens.position, 0)
        real = None if tokens.real is None else self.at(number, tokens.real, 0)
        return Tokens(
            position=position,
            document=None if tokens.document is None else self.at(number, tokens.document),
            real=real,
        )

    def added(self, number: Index, array: Value, more: Value) -> Value:
        """A full array with a block added to.

        Args:
            array: [B, positions, ...], whose last block is filled up.
            more: [B, size, ...].
        """
        return jax.lax.dynamic_update_slice_in_dim(
            array, self.at(number, array) + more, number * self.size, 1
        )

    def joined(self, blocks: Value) -> Value:
        """[count, B, size, ...] -> [B, length, ...]."""
        sequence = jnp.moveaxis(blocks, 0, 1)
        return sequence.reshape(sequence.shape[0], -1, *sequence.shape[3:])[:, : self.length]


def attend(
    query: Value,
    key: Value,
    value: Value,
    rows: Tokens,
    columns: Tokens,
    sight: Sight,
    scores: Scores,
) -> Part:
    """Attention of queries to keys.

    Args:
        query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V].
    """
    query, rows, columns = _beside(query, rows, columns)
    query_blocks, all_ = (
        Blocks.of(query.shape[1], scores.block),
        Blocks.of(key.shape[1], scores.block),
    )
    if query_blocks.count == all_.count == 1:
        return attend_block(query, key, value, rows, columns, sight, scores)
    query, key, value, rows, columns = (
        query_blocks.full(query),
        all_.full(key),
        all_.full(value),
        query_blocks.full_tokens(rows),
        all_.full_tokens(columns),
    )

    def block(_: None, row: Value) -> tuple[None, Part]:
        queries, these = query_blocks.at(row, query), query_blocks.tokens_at(row, rows)

        def step(part: Part, column: Value) -> tuple[Part, None]:
            those = all_.tokens_at(column, columns)
            return (
                _where_seen(
                    sight.some(these, those),
                    lambda: (
                        part
                        + attend_block(
                            queries,
                            all_.at(column, key),
                            all_.at(column, value),
                            these,
                            those,
                            sight,
                            scores,
                        )
                    ),
                    part,
                ),
                None,
            )

        return None, jax.lax.scan(step, nothing(queries, value.shape[-1]), jnp.arange(all_.count))[
            0
        ]

    return jax.tree.map(
        query_blocks.joined, jax.lax.scan(block, None, jnp.arange(query_blocks.count))[1]
    )


def attend_back(
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
    array of what distances add to scores, if they do, in float32.
    """
    query, rows, columns = _beside(query, rows, columns)
    query_blocks, all_ = (
        Blocks.of(query.shape[1], scores.block),
        Blocks.of(key.shape[1], scores.block),
    )
    if query_blocks.count == all_.count == 1:
        return attend_back_block(query, key, value, rows, columns, sight, scores, incoming)
    lengths = query.shape[1], key.shape[1]
    incoming = _full(query_blocks, incoming)
    query, key, value, rows, columns = (
        query_blocks.full(query),
        all_.full(key),
        all_.full(value),
        query_blocks.full_tokens(rows),
        all_.full_tokens(columns),
    )

    arrays = () if sight.offsets is None else (sight.offsets.array,)

    def block(gradients: tuple[Value, ...], row: Value) -> tuple[tuple[Value, ...], Value]:
        ours, these = query_blocks.at(row, query), query_blocks.tokens_at(row, rows)
        back = incoming.map(lambda array: query_blocks.at(row, array))

        def step(carry: tuple[Value, ...], column: Value) -> tuple[tuple[Value, ...], None]:
            those, keys, values = (
                all_.tokens_at(column, columns),
                all_.at(column, key),
                all_.at(column, value),
            )
            more = _where_seen(
                sight.some(these, those),
                lambda: attend_back_block(ours, keys, values, these, those, sight, scores, back),
                _zeros(ours, keys, values, *arrays),
            )
            return (
                carry[0] + more[0],
                all_.added(column, carry[1], more[1]),
                all_.added(column, carry[2], more[2]),
                *(before + addend for before, addend in zip(carry[3:], more[3:], strict=True)),
            ), None

        to_query, *gradients_ = jax.lax.scan(
            step, (*_zeros(ours), *gradients), jnp.arange(all_.count)
        )[0]
        return tuple(gradients_), to_query

    (to_key, to_value, *to_arrays), to_query = jax.lax.scan(
        block, _zeros(key, value, *arrays), jnp.arange(query_blocks.count)
    )
    last = lengths[1]
    return query_blocks.joined(to_query), to_key[:, :last], to_value[:, :last], *to_arrays


def _full(blocks: Blocks, incoming: Incoming) -> Incoming:
    """The same for queries whose last block is filled up: what fills it has a cotangent of zeros,
    and adds nothing to gradients of keys.
    """
    cotangent, inner = (
        jnp.pad(array, [(0, 0), (0, blocks.missing), *[(0, 0)] * (array.ndim - 2)])
        for array in (incoming.cotangent, incoming.inner)
    )
    return Incoming(total=blocks.full(incoming.total), cotangent=cotangent, inner=inner)


def _beside(query: Value, rows: Tokens, columns: Tokens) -> tuple[Value, Tokens, Tokens]:
    """The same, with positions that seem to depend on queries: masks of known positions, of all
    blocks together, would be taken out of a loop over layers, by JAX where it differentiates one.
    """
    return jax.lax.optimization_barrier((query, rows, columns))


def _zeros(*arrays: Value) -> Any:
    return tuple(jnp.zeros(array.shape, jnp.float32) for array in arrays)


def _where_seen(seen: Value | None, work: Callable[[], T], unseen: T) -> T:
    """The work, or what is there without it where no query sees any key."""
    return work() if seen is None else jax.lax.cond(seen, work, lambda: unseen)
