"""Attention of tokens over the pages that one device has.

Tokens come in sets: of each request one table of pages, and so many tokens that look at it. A set
reads its pages a few at a time, as far as its last token needs them and no earlier than its window
(a softmax that is corrected as it goes, Milakov and Gimelshein, arXiv:1805.02867): what a step
reads follows from its requests, not from the longest that there may be. On a CPU, where a turn of a
loop costs more than what it reads, short sets read all they need at once.

Suffixes: A set, C token of a set, M page of a request, P token of a page, U token of a few pages, K
key head, G queries of a key head, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.functions.attention import Attention
from shardlib.jax_types import Index, Value

#: Tokens that a set reads at a time: an eighth of the most, within these bounds.
FEWEST, MOST = 64, 512
#: Key heads at most of which scores are computed together: that multiplies so many times as much,
#: and moves no keys.
TOGETHER = 8
_LOW = float(jnp.finfo(jnp.float32).min) / 2


@dataclass(frozen=True, kw_only=True)
class Sets:
    """Tokens by what they look at.

    Attributes:
        table: [A, M] pages of each set, page n of its request in column n modulo `columns`.
        columns: of the table that count, a scalar.
        position: [A, C] of each token; -1 for one that is none.
        queries: of each part, [A, C, N, H].
        everywhere: whether tokens see all in spite of the window; None where that is fixed.
        offsets: what distances add to scores, [A, C, N] or [A, C, buckets, N]; None for nothing.
    """

    table: Value
    columns: Index
    position: Value
    queries: Sequence[Value]
    everywhere: Value | None
    offsets: Value | None = None


#: Weighted values [A, C, N, V], the sum of the weights and the largest score, [A, C, N] each.
Partial = tuple[Value, Value, Value]


def over_pages(
    form: Attention,
    sets_of_tokens: Sets,
    read: Callable[[Value], tuple[Value, ...]],
    *,
    size: int,
    tokens_per_page: int,
    first: Index,
) -> Partial:
    """What tokens make of the pages that a device has.

    Args:
        read: pages [A, B] -> keys of each part [A, B, held, K, H] or [A, B, held, H], and values.
    """
    (sets, pages_per_request), (_, chunk) = (
        sets_of_tokens.table.shape,
        sets_of_tokens.position.shape,
    )
    start, end = _range(form, sets_of_tokens, size)
    needed = jnp.max(end - start, initial=0)

    def some(turn: Index, partial: Partial, few: int, together: bool = False) -> Partial:
        number = start[:, None] + turn * few + jnp.arange(few, dtype=jnp.int32)
        pages = jnp.take_along_axis(sets_of_tokens.table, number % sets_of_tokens.columns, axis=1)
        *keys, values = (
            array.reshape(sets, few * tokens_per_page, *array.shape[3:]) for array in read(pages)
        )
        within = first + jnp.arange(tokens_per_page, dtype=jnp.int32)
        column = (number[..., None] * size + within).reshape(sets, 1, few * tokens_per_page)
        seen, added = _seen(form, sets_of_tokens, column), _added(form, sets_of_tokens, column)
        if together:
            return _together(form, sets_of_tokens.queries, keys, values, seen, added)
        return _more(
            form, sets_of_tokens.queries, keys, values, seen[:, :, None, None], partial, added
        )

    shape = jax.eval_shape(read, jax.ShapeDtypeStruct((sets, 1), sets_of_tokens.table.dtype))[
        -1
    ].shape
    groups, width = shape[3], shape[4]
    heads = sets_of_tokens.queries[0].shape[2]
    shape_of_totals = (sets, chunk, groups, heads // groups)
    nothing = (
        jnp.zeros((*shape_of_totals, width), jnp.float32),
        jnp.zeros(shape_of_totals, jnp.float32),
        jnp.full(shape_of_totals, _LOW, jnp.float32),
    )

    def in_turns() -> Partial:
        few = max(
            1, min(pages_per_request, min(max(pages_per_request * size // 8, FEWEST), MOST) // size)
        )
        turns = -(-needed // few)
        return jax.lax.fori_loop(0, turns, lambda turn, so_far: some(turn, so_far, few), nothing)

    def at_once() -> Partial:
        counts = _at_once(pages_per_request, size)
        which = sum((needed > count).astype(jnp.int32) for count in counts)
        together = chunk == 1 and 1 < groups <= TOGETHER
        branches = [lambda count=count: some(0, nothing, count, together) for count in counts]
        return jax.lax.switch(
            which, branches if counts[-1] >= pages_per_request else [*branches, in_turns]
        )

    mixed, total, highest = jax.lax.platform_dependent(cpu=at_once, default=in_turns)
    return (
        mixed.reshape(sets, chunk, heads, width),
        total.reshape(sets, chunk, heads),
        highest.reshape(sets, chunk, heads),
    )


def _at_once(limit: int, size: int) -> list[int]:
    """How many pages may be read at once: doubled, up to all of a request or `MOST` tokens."""
    counts = [max(1, FEWEST // size)]
    while counts[-1] < limit and 2 * counts[-1] * size <= MOST:
        counts.append(2 * counts[-1])
    return [min(count, limit) for count in counts]


def joined(parts: Partial) -> Value:
    """Attention of tokens whose keys are in several places."""
    mixed, total, highest = parts
    factor = jnp.exp(highest - jnp.max(highest, axis=0))
    total_weight = jnp.sum(total * factor, axis=0)
    return jnp.sum(mixed * factor[..., None], axis=0) / jnp.maximum(total_weight, 1e-30)[..., None]


def _range(form: Attention, sets: Sets, size: int) -> tuple[Value, Value]:
    """The first page that a set needs, and the one after its last, [A] each."""
    end = jnp.max(sets.position, axis=1) // size + 1
    if not form.window:
        return jnp.zeros_like(end), end
    real = jnp.where(sets.position < 0, jnp.iinfo(jnp.int32).max, sets.position)
    start = jnp.maximum(jnp.min(real, axis=1) - form.window + 1, 0) // size
    if sets.everywhere is not None:
        start = jnp.where(sets.everywhere, 0, start)
    return jnp.minimum(start, end), end


def _seen(form: Attention, sets: Sets, column: Value) -> Value:
    """Which keys each token sees, [A, C, U]."""
    row = sets.position[..., None]
    seen = column <= row
    if form.window:
        near = seen & (row - column < form.window)
        seen = near if sets.everywhere is None else jnp.where(sets.everywhere, seen, near)
    return seen


def _added(form: Attention, sets: Sets, column: Value) -> Value | None:
    """What distances add to scores, [A, C, N, U]; None for nothing."""
    if form.bias is None or sets.offsets is None:
        return None
    distance = column - sets.position[..., None]
    return jax.vmap(jax.vmap(form.bias.of))(sets.offsets, distance)


def _more(
    form: Attention,
    queries: Sequence[Value],
    keys: Sequence[Value],
    values: Value,
    seen: Value,
    partial: Partial,
    added: Value | None,
) -> Partial:
    """With some more keys and values."""
    mixed, total, highest = partial
    grouped = [query.reshape(*mixed.shape[:4], query.shape[-1]) for query in queries]
    scores = sum(
        (_products(query, key) for query, key in zip(grouped, keys, strict=True)),
        start=jnp.zeros((), jnp.float32),
    )
    scores = _scaled(form, scores)
    if added is not None:
        scores = scores + added.reshape(scores.shape)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(highest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - top[..., None])
    before = jnp.exp(highest - top)
    more = jnp.einsum(
        "ackgu,aukv->ackgv",
        weights.astype(queries[-1].dtype),
        values.astype(queries[-1].dtype),
        preferred_element_type=jnp.float32,
    )
    return (
        mixed * before[..., None] + more,
        total * before + jnp.sum(weights, axis=-1),
        top,
    )


def _products(query: Value, key: Value) -> Value:
    """Products of queries [A, C, K, G, H] and keys [A, U, K, H] or [A, U, H]: [A, C, K, G, U]."""
    dims = "aukh" if key.ndim == 4 else "auh"
    return jnp.einsum(
        f"ackgh,{dims}->ackgu", query, key.astype(query.dtype), preferred_element_type=jnp.float32
    )


def _together(
    form: Attention,
    queries: Sequence[Value],
    keys: Sequence[Value],
    values: Value,
    seen: Value,
    added: Value | None,
) -> Partial:
    """What one token of each set makes of keys and values, without moving them by head: a query is
    zero for the other heads, and of what its weights make of all values it keeps its own head's.
    """
    rows, count, heads, _ = values.shape
    group = queries[0].shape[2] // heads
    same_head = jnp.eye(heads, dtype=queries[0].dtype)[:, None, :, None]

    def products(query: Value, key: Value) -> Value:
        query = query[:, 0]
        if key.ndim == 4:
            grouped = query.reshape(rows, heads, group, -1).swapaxes(2, 3)
            spread = (grouped[..., None, :] * same_head).reshape(rows, -1, heads * group)
        else:
            spread = query.swapaxes(1, 2)
        key = key.astype(query.dtype).reshape(rows, count, -1)
        return jnp.einsum("aux,axn->aun", key, spread, preferred_element_type=jnp.float32)

    scores = sum(map(products, queries, keys), start=jnp.zeros((), jnp.float32))
    scores = _scaled(form, scores)
    if added is not None:
        scores = scores + added[:, 0].swapaxes(1, 2)
    scores = jnp.where(seen.swapaxes(1, 2), scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=1), _LOW)
    weights = jnp.exp(scores - top[:, None])
    dtype = queries[-1].dtype
    sums = jnp.einsum(
        "anu,aux->anx",
        jax.lax.optimization_barrier(weights.astype(dtype).swapaxes(1, 2)),
        values.astype(dtype).reshape(rows, count, -1),
        preferred_element_type=jnp.float32,
    ).reshape(rows, heads, group, heads, -1)
    mixed = jnp.sum(sums * same_head.astype(sums.dtype), axis=3)
    shape = (rows, 1, heads, group)
    return mixed[:, None], jnp.sum(weights, axis=1).reshape(shape), top.reshape(shape)


def _scaled(form: Attention, scores: Value) -> Value:
    scores = scores * form.scale
    return form.softcap * jnp.tanh(scores / form.softcap) if form.softcap else scores
