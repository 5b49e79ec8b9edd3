"""Keys and values of tokens go to pages, and tokens attend over the pages of their requests.

Suffixes: T token, P token of a page, N query head, K key head, H width. An array of pages is
[layers, pages, P, ...], see `shardlib.lowering.serving.cache_groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from shardlib.functions.attention import Attention, Operands
from shardlib.jax_types import Index, Value
from shardlib.lowering.serving.attention import Partial, Sets, joined, over_pages
from shardlib.lowering.serving.cache_groups import Token, Where
from shardlib.lowering.serving.grid import Grid
from shardlib.lowering.serving.stored import Page, read_pages, write_rows

#: Pages of one call: those of each array of keys, and of values.
Pages = tuple[Page, ...]


#: Which dims of `Token` a program of one token is mapped over.
TOKEN_DIMS = Token(position=0, entry=0, table=None, chunks=None)  # type: ignore[arg-type]


def attending(
    form: Attention, grid: Grid, shared: int | None = None
) -> Callable[..., tuple[Value, Pages]]:
    """The function (pages, row, where, *operands) -> (mixed, pages) that takes the place of a call
    of attention of one token; mapped over tokens it writes all of them, and then attends.

    Args:
        form: of the call.
        grid: the devices.
        shared: the part of keys that values are, so that they are kept once; None for none.
    """

    @custom_vmap
    def attend(pages: Pages, row: Index, where: Where, *operands: Value) -> tuple[Value, Pages]:
        one = replace(
            where,
            position=where.position[None],
            entry=where.entry[None],
            table=jnp.zeros((1, where.table.shape[1]), jnp.int32),  # any: only shapes count
            chunks=where.chunks[:0],
        )
        mixed, pages = _attend(
            (form, Grid(), shared), pages, row, one, [each[None] for each in operands]
        )
        return mixed[0], pages

    @attend.def_vmap
    def attend_many(
        size: int,
        mapped: tuple[object, ...],
        pages: Pages,
        row: Index,
        where: Where,
        *operands: Value,
    ) -> tuple[tuple[Value, Pages], tuple[bool, object]]:
        assert not any(jax.tree.leaves(mapped[:2])), "all tokens share their pages"
        many = [
            one if has else jnp.broadcast_to(one, (size, *one.shape))
            for one, has in zip(operands, mapped[3:], strict=True)
        ]
        mixed, pages = _attend((form, grid, shared), pages, row, where, many)
        return (mixed, pages), (True, jax.tree.map(lambda _: False, pages))

    return attend


def _attend(
    how: tuple[Attention, Grid, int | None],
    pages: Pages,
    row: Index,
    where: Where,
    operands: list[Value],
) -> tuple[Value, Pages]:
    """Operands [T, 1, 1, ...], one token of one row each; returns [T, 1, 1, N, V]."""
    form, grid, shared = how
    rows = operands[:-1] if form.bias is not None else operands  # that of a bias is [T, ..., N]
    given = Operands.of(
        form, [*(one[:, 0, 0] if one.ndim > 1 else one for one in rows), *operands[len(rows) :]]
    )
    size, groups = pages[0].shape[2], given.value.shape[1]
    heads, tokens = grid.heads(groups), grid.tokens(groups)
    ways, count = grid.ways(tokens), given.queries[0].shape[1]
    spread = count // grid.ways(heads) % ways == 0

    def local(
        pages: Pages,
        row: Index,
        where: Where,
        queries: tuple[Value, ...],
        new: tuple[Value, ...],
        everywhere: Value | None,
        offsets: Value | None,
    ) -> tuple[Value, Pages]:
        held = pages[0].shape[2]
        first = grid.first(tokens, held)
        kept = _written(pages, row, where, new, size=size, first=first)
        nobody = where.entry >= where.pages * size
        position = jnp.where(nobody, -1, where.position)

        def read(numbers: Value) -> tuple[Value, ...]:
            found = [read_pages(page, row, where.first + numbers) for page in kept]
            return tuple(found if shared is None else [*found, found[shared]])

        def mixed(table: Value, start: int, chunk: int) -> Partial:
            here = slice(start, start + table.shape[0] * chunk)
            sets = Sets(
                table=table,
                columns=where.columns,
                position=position[here].reshape(-1, chunk),
                queries=[one[here].reshape(-1, chunk, *one.shape[1:]) for one in queries],
                everywhere=None if everywhere is None else everywhere[0],
                offsets=None
                if offsets is None
                else offsets[here].reshape(-1, chunk, *offsets.shape[1:]),
            )
            found = over_pages(form, sets, read, size=size, held=held, first=first)
            return jax.tree.map(lambda one: one.reshape(-1, *one.shape[2:]), found)

        rows, parts = where.table.shape[0], []
        if rows:
            parts.append(mixed(where.table, 0, 1))
        if where.chunks.shape[0]:
            chunk = (position.shape[0] - rows) // where.chunks.shape[0]
            parts.append(mixed(where.chunks, rows, chunk))
        whole = jax.tree.map(lambda *some: jnp.concatenate(some), *parts)
        return _together(whole, tokens, ways, spread).astype(given.value.dtype), kept

    data = PartitionSpec("data")
    by_head = PartitionSpec("data", heads or None)

    def operand(one: Value) -> PartitionSpec:
        return by_head if one.ndim == 3 else data

    page_specs = tuple(grid.page_spec(page, groups) for page in pages)
    new = (*given.keys, given.value)[: len(pages)]
    out = PartitionSpec("data", (*heads, *tokens) if spread else heads or None)
    mixed, kept = grid.local(
        local,
        (
            page_specs,
            PartitionSpec(),
            Where.specs(data),
            tuple(by_head for _ in given.queries),
            tuple(map(operand, new)),
            data,
            None
            if given.bias is None
            else PartitionSpec("data", *[None] * (given.bias.ndim - 2), heads or None),
        ),
        (out, page_specs),
    )(pages, jnp.asarray(row), where, given.queries, new, given.global_layer, given.bias)
    return mixed.reshape(mixed.shape[0], 1, 1, *mixed.shape[1:]), kept


def _written(
    pages: Pages, row: Index, where: Where, new: tuple[Value, ...], *, size: int, first: Index
) -> Pages:
    """Pages with the keys and values of tokens, of which a device writes those that it has."""
    held, number, place = pages[0].shape[2], where.entry // size, where.entry % size - first
    here = (place >= 0) & (place < held) & (number < where.pages)
    number = jnp.where(here, where.first + number, pages[0].shape[1])
    at = row, number, jnp.where(here, place, 0)
    return tuple(write_rows(page, at, one) for page, one in zip(pages, new, strict=True))


def _together(found: Partial, axes: tuple[str, ...], ways: int, spread: bool) -> Value:
    """Attention [T, N, V] of what devices have made of their tokens; each then has the heads whose
    weights it has, where those divide.
    """
    if ways == 1:
        return joined(jax.tree.map(lambda one: one[None], found))
    mixed, total, highest = found
    rows = jnp.concatenate([mixed, total[..., None], highest[..., None]], axis=-1)
    if spread:
        rows = rows.reshape(rows.shape[0], ways, -1, rows.shape[-1])
        rows = jax.lax.all_to_all(rows, axes, split_axis=1, concat_axis=0)
    else:
        rows = jax.lax.all_gather(rows, axes)
    return joined((rows[..., :-2], rows[..., -2], rows[..., -1]))
