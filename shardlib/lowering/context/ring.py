"""Keys and values go around the devices (ring attention, Liu et al., arXiv:2310.01889).

Every device keeps its queries. In each of N turns it attends to the keys and values that it has, and hands them to its neighbour: N - 1 messages a device forward. Going back, keys and values
go around once more with their gradients, which come home with the N-th message. What a device holds does not grow with the number of devices.

Under a causal mask and in zig-zag order, what comes from an earlier device (of lower number) is seen with its first run alone, by all queries; what comes from a later one is seen whole, by the queries
of the second run alone. Either is half of a block, without a mask, so that all devices work equally in every turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.lowering.context.block import Part, Scores, attend, attend_back, nothing
from shardlib.lowering.context.cut import Cut

#: (which of the own queries, which of the keys, [queries, keys] or [B, queries, keys] whether they are seen, None for all) -> anything.
Work = Callable[[slice, slice, Any], Any]
EVERY = slice(None)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Attention around a ring.

    Attributes:
        cut: the sequence over the mesh axis.
        scores: how scores are made.
        causal: whether a query sees no later position.
    """

    cut: Cut
    scores: Scores
    causal: bool = True

    def attention(self, query: Any, key: Any, value: Any, segments: Any = None) -> Any:
        """Attention of this device's queries to all keys; inside of a region that is manual over the axis.

        Args:
            query: [B, S / N, H, D].
            key, value: [B, S / N, G, D] and [B, S / N, G, V], with H a multiple of G.
            segments: number of the document of every position, [B, S / N]: a query sees its own alone. None where there is one.

        Returns:
            [B, S / N, H, V], of the dtype of the values.
        """
        return _attention(self, query, key, value, segments)

    def forward(self, query: Any, key: Any, value: Any, segments: Any) -> Part:
        """The same as a part, before it is cast."""
        def work(given: tuple[Any, ...], rows: slice, columns: slice, seen: Any) -> Part:
            part = attend(query[:, rows], given[0][:, columns], given[1][:, columns], seen, self.scores)
            return jax.tree.map(lambda all_, some: all_.at[:, rows].set(some), nothing(query, value.shape[-1]), part)

        def turn(part: Part, number: Any, given: tuple[Any, ...]) -> Part:
            return part + self._turn(number, query.shape[1], segments, given[2:], partial(work, given), nothing(query, value.shape[-1]), query)

        def step(carry: tuple[Part, tuple[Any, ...]], number: Any) -> tuple[tuple[Part, tuple[Any, ...]], None]:
            part, given = carry
            return (turn(part, number, given), self._passed(given)), None

        start = nothing(query, value.shape[-1]), _given(key, value, segments)
        (part, given), _ = jax.lax.scan(step, start, jnp.arange(self.cut.ways - 1))
        return turn(part, self.cut.ways - 1, given)

    def backward(self, query: Any, key: Any, value: Any, segments: Any, part: Part, cotangent: Any) -> tuple[Any, Any, Any]:
        """Gradients of queries, keys and values, in float32."""
        cotangent = cotangent.astype(jnp.float32)
        inner = (cotangent * part.result).sum(-1)
        zeros = tuple(jnp.zeros(leaf.shape, jnp.float32) for leaf in (query, key, value))

        def work(given: tuple[Any, ...], rows: slice, columns: slice, seen: Any) -> tuple[Any, ...]:
            found = attend_back(query[:, rows], given[0][:, columns], given[1][:, columns], seen, self.scores, part.total[:, rows], cotangent[:, rows], inner[:, rows])
            return tuple(all_.at[:, where].set(some) for all_, some, where in zip(zeros, found, (rows, columns, columns), strict=True))

        def step(carry: tuple[tuple[Any, ...], tuple[Any, ...]], number: Any) -> tuple[tuple[tuple[Any, ...], tuple[Any, ...]], None]:
            given, gradients = carry
            more = self._turn(number, query.shape[1], segments, given[2:], partial(work, given), zeros, query)
            summed = [total + one for total, one in zip(gradients, more, strict=True)]
            return (self._passed(given), (summed[0], *self._passed(tuple(summed[1:])))), None

        (_, gradients), _ = jax.lax.scan(step, (_given(key, value, segments), zeros), jnp.arange(self.cut.ways))
        return gradients[0], gradients[1], gradients[2]

    def _passed(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        ways = self.cut.ways
        return tuple(jax.lax.ppermute(leaf, self.cut.axis, [(i, (i + 1) % ways) for i in range(ways)]) for leaf in arrays)

    def _turn(self, number: Any, local: int, segments: Any, theirs: tuple[Any, ...], work: Work, unseen: Any, beside: Any=None) -> Any:
        """The work on what has come `number` devices far, of `local` positions with the documents `theirs`; `unseen` where no query sees any of it."""
        here = self.cut.device(beside)
        owner = (here - number) % self.cut.ways

        def done(rows: slice, columns: slice, *, masked: bool = False) -> Any:
            seen = self.cut.positions(here, local)[rows, None] >= self.cut.positions(owner, local)[None, columns] if masked else None
            if theirs:
                same = segments[:, rows, None] == theirs[0][:, None, columns]
                seen = same if seen is None else same & seen
            return work(rows, columns, seen)

        if not self.causal:
            return done(EVERY, EVERY)
        order = jnp.sign(here - owner) + 1
        own, half = partial(done, EVERY, EVERY, masked=True), local // 2
        if self.cut.zigzag:
            return jax.lax.switch(order, [partial(done, slice(half, None), EVERY), own, partial(done, EVERY, slice(0, half))])
        return jax.lax.switch(order, [lambda: unseen, own, partial(done, EVERY, EVERY)])


def _given(key: Any, value: Any, segments: Any) -> tuple[Any, ...]:
    """What goes around."""
    return (key, value) if segments is None else (key, value, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: Ring, query: Any, key: Any, value: Any, segments: Any) -> Any:
    return ring.forward(query, key, value, segments).result.astype(value.dtype)


def _forward(ring: Ring, query: Any, key: Any, value: Any, segments: Any) -> tuple[Any, Any]:
    part = ring.forward(query, key, value, segments)
    return part.result.astype(value.dtype), (query, key, value, segments, part)


def _backward(ring: Ring, saved: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
    query, key, value, segments, part = saved
    found = ring.backward(query, key, value, segments, part, cotangent)
    return *(gradient.astype(leaf.dtype) for gradient, leaf in zip(found, (query, key, value), strict=True)), None


_attention.defvjp(_forward, _backward)
