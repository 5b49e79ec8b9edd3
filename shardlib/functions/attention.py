"""Attention: tokens look at other tokens.

Dims in suffixes: B batch, S query position, T key position, N query heads, K key heads, G queries
of a key head, H width of a head. Scores and softmax are float32; the products run in the dtype of
their operands. Where scores are large, queries attend in blocks, whose scores are rematerialised in
the backward pass (Rabe and Staats, arXiv:2112.05682).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardlib.functions.attention_checks import check
from shardlib.functions.biases import Bias, BiasForm, bias_form
from shardlib.functions.marks import marked

#: An operand of a call of attention, or its abstract value.
Operand = Any


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What a call of `attention` computes.

    Attributes:
        scale: what products of queries and keys are multiplied by.
        causal: whether a query sees no later key.
        window: keys that a query sees, itself included; 0 for all.
        softcap: scores become cap * tanh(scores / cap); 0 leaves them.
        block: queries that attend at a time; 0 for all at once.
        parts: arrays that queries, and keys, are made of.
        chosen: whether an operand says that all keys are seen in spite of the window.
        packed: whether an operand numbers the documents.
        bias: how the bias of scores is made of the last operand; None for none.
    """

    scale: float
    causal: bool
    window: int
    softcap: float
    block: int
    parts: int
    chosen: bool
    packed: bool
    bias: BiasForm | None = None

    @property
    def kind(self) -> str:
        """What planning calls it."""
        return "attention"


def attention(
    query: jax.Array | Sequence[jax.Array],
    key: jax.Array | Sequence[jax.Array],
    value: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    global_layer: jax.Array | None = None,
    segments: jax.Array | None = None,
    softcap: float = 0.0,
    bias: Bias | None = None,
    block: int = 0,
) -> jax.Array:
    """Mixes values by how much queries look at keys. A plan with a context axis makes a ring of it,
    or another form for sequences that are sharded.

    Args:
        query: [B, S, N, H]; or several such arrays, whose products with as many keys are added up
            (latent attention, arXiv:2405.04434).
        key: [B, T, K, H], with N a multiple of K; [B, T, H] for one key of all heads beside others.
        value: [B, T, K, V].
        scale: what products are multiplied by; by default the width of a head to the power of -1/2.
        causal: whether a query sees no later key.
        window: keys that a query sees, itself included, where causal; 0 for all.
        global_layer: a boolean: whether all keys are seen in spite of the window; for stacks of
            layers of which some have a window.
        segments: number of the document of every position, int [B, S]: a query sees its own alone.
        softcap: scores become cap * tanh(scores / cap); 0 leaves them.
        bias: what the distance of a key adds to its score, after the cap: `Alibi` or `RelativeBias`
            (`shardlib.functions.biases`). Kernels of vendors have none.
        block: queries that attend at a time; 0 for all at once. Shorter sequences are one block.

    Returns:
        [B, S, N, V], in the dtype of `value`.

    Raises:
        ModelError: shapes or options that do not fit each other.
    """
    queries, keys = _parts(query), _parts(key)
    check(
        queries,
        keys,
        value,
        causal=causal,
        window=window,
        block=block,
        segments=segments,
        numbers={"scale": 1.0 if scale is None else scale, "softcap": softcap},
    )
    width = sum(part.shape[-1] for part in queries)
    biased, offsets = bias_form(bias, heads=queries[0].shape[2], causal=causal)
    form = Attention(
        scale=float(width**-0.5 if scale is None else scale),
        causal=causal,
        window=window,
        softcap=float(softcap),
        block=block,
        parts=len(queries),
        chosen=global_layer is not None and window > 0,
        packed=segments is not None,
        bias=biased,
    )
    beside = (global_layer, form.chosen), (segments, form.packed), (offsets, biased is not None)
    extra = [operand for operand, present in beside if present]
    return marked(form, attend)(*queries, *keys, value, *extra)


def _parts(arrays: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [cast(jax.Array, arrays)]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of a call, by what they are.

    Attributes:
        queries, keys, value: see `attention`.
        global_layer, segments: None where there are none.
        bias: the array of the bias; None for none.
    """

    queries: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    value: jax.Array
    global_layer: jax.Array | None
    segments: jax.Array | None
    bias: jax.Array | None = None

    @staticmethod
    def of(form: Attention, arrays: Sequence[Operand]) -> Operands:
        """Sorts the arrays of a custom call."""
        parts, extra = form.parts, list(arrays[2 * form.parts + 1 :])
        return Operands(
            queries=tuple(arrays[:parts]),
            keys=tuple(arrays[parts : 2 * parts]),
            value=arrays[2 * parts],
            global_layer=extra.pop(0) if form.chosen else None,
            segments=extra.pop(0) if form.packed else None,
            bias=extra.pop(0) if form.bias is not None else None,
        )


def attend(form: Attention, *arrays: jax.Array) -> jax.Array:
    """What one device computes, for the arrays of a custom call."""
    operands = Operands.of(form, arrays)
    groups, (batch, seq, heads) = operands.value.shape[2], operands.queries[0].shape[:3]
    queries = [
        query.reshape(batch, seq, groups, heads // groups, query.shape[3])
        for query in operands.queries
    ]
    columns = jnp.arange(operands.value.shape[1], dtype=jnp.int32)

    def part(
        queries: Sequence[jax.Array], rows: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        scores = (
            sum(
                (_products(query, key) for query, key in zip(queries, operands.keys, strict=True)),
                start=jnp.zeros((), jnp.float32),
            )
            if form.parts > 1
            else _products(queries[0], operands.keys[0])
        )
        documents = (
            None if operands.segments is None or segments is None else (segments, operands.segments)
        )
        return _mixed(
            form,
            scores * form.scale,
            operands.value,
            mask_of(form, rows, columns, operands.global_layer, documents),
            None
            if form.bias is None or operands.bias is None
            else form.bias.of(operands.bias, columns - rows[:, None]),
        )

    rows = jnp.arange(seq, dtype=jnp.int32)
    mixed = (
        part(queries, rows, operands.segments)
        if not form.block or seq <= form.block
        else _in_blocks(form.block, part, queries, rows, operands.segments)
    )
    return mixed.reshape(batch, seq, heads, mixed.shape[-1])


def mask_of(
    form: Attention,
    rows: jax.Array,
    columns: jax.Array,
    global_layer: jax.Array | None,
    documents: tuple[jax.Array, jax.Array] | None,
) -> jax.Array | None:
    """Which keys queries see, [S, T], or [B, 1, 1, S, T] with documents; None for all.

    Args:
        rows, columns: positions of queries and of keys, [S, T] each.
        documents: numbers of the documents of queries [B, S] and of keys [B, T].
    """
    rows, columns = rows[:, None], columns[None, :]
    seen = columns <= rows if form.causal else None
    if seen is not None and form.window:
        near = seen & (rows - columns < form.window)
        seen = near if global_layer is None else jnp.where(global_layer, seen, near)
    if documents is None:
        return seen
    same = (documents[0][:, :, None] == documents[1][:, None, :])[:, None, None]
    return same if seen is None else seen & same


def _products(query: jax.Array, key: jax.Array) -> jax.Array:
    """Products of queries [B, S, K, G, H] and keys [B, T, K, H] or [B, T, H], as the matmul makes
    them: [B, K, G, S, T] float32.

    The query is transposed first, since it is small; an einsum would transpose the scores.
    """
    dims = (((4,), (3,)), ((0, 1), (0, 2))) if key.ndim == 4 else (((4,), (2,)), ((0,), (0,)))
    return jax.lax.dot_general(
        query.transpose(0, 2, 3, 1, 4), key, dims, preferred_element_type=jnp.float32
    )


def _mixed(
    form: Attention,
    scores: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Mixes values [B, T, K, V] by scores [B, K, G, S, T], with a bias [N, S, T], into [B, S, K, G,
    V].
    """
    if form.softcap:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape[1:])
    hidden = (
        scores if seen is None else scores + jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min / 2)
    )
    weights = jax.nn.softmax(hidden, axis=-1)
    return jax.lax.dot_general(
        weights.astype(value.dtype), value, (((4,), (1,)), ((0, 1), (0, 2)))
    ).transpose(0, 3, 1, 2, 4)


def _in_blocks(
    block: int,
    part: Callable[..., jax.Array],
    queries: Sequence[jax.Array],
    rows: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """The same block of queries after block of queries."""
    seq = rows.shape[0]

    def blocks(array: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(
            array.reshape(*array.shape[:dim], seq // block, block, *array.shape[dim + 1 :]), dim, 0
        )

    def one(
        _: None, blocked: tuple[list[jax.Array], jax.Array, jax.Array | None]
    ) -> tuple[None, jax.Array]:
        return None, part(*blocked)

    blocked = (
        [blocks(query, 1) for query in queries],
        blocks(rows, 0),
        None if segments is None else blocks(segments, 1),
    )
    mixed = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), None, blocked)[1]
    return jnp.moveaxis(mixed, 0, 1).reshape(mixed.shape[1], seq, *mixed.shape[3:])
