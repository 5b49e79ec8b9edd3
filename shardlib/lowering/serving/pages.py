"""Attention of tokens over the pages of their requests.

Suffixes: T token, M page of a request, P token of a page, U = M P key, K key head, G queries of a
key head, H width. An array of pages is [layers, pages, P, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from shardlib.functions.attention import Attention, Operands
from shardlib.jax_types import Index, Value

#: Pages of one call: those of each array of keys, and of values.
Pages = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Token:
    """Where a token stands, int32 scalars but for the table; with a leading dim for many.

    Attributes:
        position: in its request.
        entry: of the pages to which its keys and values go, page times size of a page plus place;
            past the last for a token that is none, which writes nothing.
        table: [M] pages of its request, in order.
    """

    position: jax.Array | np.ndarray
    entry: jax.Array | np.ndarray
    table: jax.Array | np.ndarray


def attending(form: Attention) -> Callable[..., tuple[Value, Pages]]:
    """The function (pages, layer, token, *operands) -> (mixed, pages) that takes the place of a
    call of attention of one token; mapped over tokens it writes all of them, and then attends.

    Args:
        form: of the call.
    """

    @custom_vmap
    def attend(pages: Pages, layer: Index, token: Token, *operands: Value) -> tuple[Value, Pages]:
        many = jax.tree.map(lambda one: one[None], (token, operands))
        mixed, pages = _attend(form, pages, layer, *many)
        return mixed[0], pages

    @attend.def_vmap
    def attend_many(
        size: int,
        mapped: tuple[object, ...],
        pages: Pages,
        layer: Index,
        token: Token,
        *operands: Value,
    ) -> tuple[tuple[Value, Pages], tuple[bool, object]]:
        assert not any(jax.tree.leaves(mapped[:2])), "all tokens share their pages"
        many = [
            jax.tree.map(
                lambda one, has: one if has else jnp.broadcast_to(one, (size, *one.shape)),
                value,
                is_mapped,
            )
            for value, is_mapped in zip((token, *operands), mapped[2:], strict=True)
        ]
        mixed, pages = _attend(form, pages, layer, many[0], tuple(many[1:]))
        return (mixed, pages), (True, jax.tree.map(lambda _: False, pages))

    return attend


def _attend(
    form: Attention, pages: Pages, layer: Index, token: Token, operands: tuple[Value, ...]
) -> tuple[Value, Pages]:
    """Operands [T, 1, 1, ...], one token of one row each; returns [T, 1, 1, N, V]."""
    given = Operands.of(form, [one[:, 0, 0] if one.ndim > 1 else one for one in operands])
    size = pages[0].shape[2]
    kept = tuple(
        page.at[layer, token.entry // size, token.entry % size].set(
            new.astype(page.dtype), mode="drop"
        )
        for page, new in zip(pages, (*given.keys, given.value), strict=True)
    )
    *keys, values = (
        page[layer, token.table].reshape(
            token.table.shape[0], token.table.shape[1] * size, *page.shape[3:]
        )
        for page in kept
    )
    groups, heads = values.shape[2], given.queries[0].shape[1]
    scores = sum(
        (
            _products(
                query.reshape(query.shape[0], groups, heads // groups, query.shape[2]),
                key.astype(query.dtype),
            )
            for query, key in zip(given.queries, keys, strict=True)
        ),
        start=jnp.zeros((), jnp.float32),
    )
    scores = scores * form.scale
    if form.softcap:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    seen = _seen(form, token, values.shape[1], given.global_layer)[:, None, None]
    weights = jax.nn.softmax(scores + jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min / 2), axis=-1)
    dtype = given.value.dtype
    mixed = jnp.einsum("tkgu,tukv->tkgv", weights.astype(dtype), values.astype(dtype))
    return mixed.reshape(mixed.shape[0], 1, 1, heads, mixed.shape[-1]), kept


def _products(query: Value, key: Value) -> Value:
    """Products of queries [T, K, G, H] and keys [T, U, K, H] or [T, U, H]: [T, K, G, U]."""
    keys = "tukh" if key.ndim == 4 else "tuh"
    return jnp.einsum(f"tkgh,{keys}->tkgu", query, key, preferred_element_type=jnp.float32)


def _seen(form: Attention, token: Token, keys: int, global_layer: Value | None) -> Value:
    """Which keys each token sees, [T, U]."""
    columns, rows = jnp.arange(keys, dtype=jnp.int32)[None], token.position[:, None]
    seen = columns <= rows
    if form.window:
        near = seen & (rows - columns < form.window)
        seen = near if global_layer is None else jnp.where(global_layer[:, None], seen, near)
    return seen
