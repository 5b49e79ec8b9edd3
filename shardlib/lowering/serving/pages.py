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
        shared: the part of keys that values are, so that they are kept once; None for none.
    """

    @custom_vmap
    def attend(pages: Pages, row: Index, location: Where, *operands: Value) -> tuple[Value, Pages]:
        batched = replace(
            location,
            position=location.position[None],
            entry=location.entry[None],
            table=jnp.zeros((1, location.table.shape[1]), jnp.int32),  # any: only shapes count
            chunks=location.chunks[:0],
        )
        mixed, pages = _attend(
            (form, Grid(), shared), pages, row, batched, [each[None] for each in operands]
        )
        return mixed[0], pages

    @attend.def_vmap
    def attend_many(
        size: int,
        mapped: tuple[object, ...],
        pages: Pages,
        row: Index,
        location: Where,
        *operands: Value,
    ) -> tuple[tuple[Value, Pages], tuple[bool, object]]:
        assert not any(jax.tree.leaves(mapped[:2])), "all tokens share their pages"
        many = [
            operand if has else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has in zip(operands, mapped[3:], strict=True)
        ]
        mixed, pages = _attend((form, grid, shared), pages, row, location, many)
        return (mixed, pages), (True, jax.tree.map(lambda _: False, pages))

    return attend


def _attend(
    call: tuple[Attention, Grid, int | None],
    pages: Pages,
    row: Index,
    location: Where,
    operands: list[Value],
) -> tuple[Value, Pages]:
    """Operands [T, 1, 1, ...], one token of one row each; returns [T, 1, 1, N, V]."""
    form, grid, shared = call
    rows = operands[:-1] if form.bias is not None else operands  # that of a bias is [T, ..., N]
    arguments = Operands.of(
        form,
        [
            *(
                operand_array[:, 0, 0] if operand_array.ndim > 1 else operand_array
                for operand_array in rows
            ),
            *operands[len(rows) :],
        ],
    )
    size, groups = pages[0].shape[2], arguments.value.shape[1]
    heads, tokens = grid.heads(groups), grid.tokens(groups)
    devices, count = grid.ways(tokens), arguments.queries[0].shape[1]
    spread = count // grid.ways(heads) % devices == 0

    def local(
        pages: Pages,
        row: Index,
        location: Where,
        queries: tuple[Value, ...],
        new: tuple[Value, ...],
        everywhere: Value | None,
        offsets: Value | None,
    ) -> tuple[Value, Pages]:
        tokens_per_page = pages[0].shape[2]
        first = grid.first(tokens, tokens_per_page)
        written = _written(pages, row, location, new, size=size, first=first)
        nobody = location.entry >= location.pages * size
        position = jnp.where(nobody, -1, location.position)

        def read(numbers: Value) -> tuple[Value, ...]:
            arrays = [read_pages(page, row, location.first + numbers) for page in written]
            return tuple(arrays if shared is None else [*arrays, arrays[shared]])

        def mixed(table: Value, start: int, chunk: int) -> Partial:
            here = slice(start, start + table.shape[0] * chunk)
            sets = Sets(
                table=table,
                columns=location.columns,
                position=position[here].reshape(-1, chunk),
                queries=[query[here].reshape(-1, chunk, *query.shape[1:]) for query in queries],
                everywhere=None if everywhere is None else everywhere[0],
                offsets=None
                if offsets is None
                else offsets[here].reshape(-1, chunk, *offsets.shape[1:]),
            )
            attended = over_pages(
                form, sets, read, size=size, tokens_per_page=tokens_per_page, first=first
            )
            return jax.tree.map(lambda query: query.reshape(-1, *query.shape[2:]), attended)

        rows, parts = location.table.shape[0], []
        if rows:
            parts.append(mixed(location.table, 0, 1))
        if location.chunks.shape[0]:
            chunk = (position.shape[0] - rows) // location.chunks.shape[0]
            parts.append(mixed(location.chunks, rows, chunk))
        partial = jax.tree.map(lambda *parts_of_leaf: jnp.concatenate(parts_of_leaf), *parts)
        return _together(partial, tokens, devices, spread).astype(arguments.value.dtype), written

    data = PartitionSpec("data")
    by_head = PartitionSpec("data", heads or None)

    def operand(array: Value) -> PartitionSpec:
        return by_head if array.ndim == 3 else data

    page_specs = tuple(grid.page_spec(page, groups) for page in pages)
    new = (*arguments.keys, arguments.value)[: len(pages)]
    out = PartitionSpec("data", (*heads, *tokens) if spread else heads or None)
    mixed, written = grid.local(
        local,
        (
            page_specs,
            PartitionSpec(),
            Where.specs(data),
            tuple(by_head for _ in arguments.queries),
            tuple(map(operand, new)),
            data,
            None
            if arguments.bias is None
            else PartitionSpec("data", *[None] * (arguments.bias.ndim - 2), heads or None),
        ),
        (out, page_specs),
    )(
        pages,
        jnp.asarray(row),
        location,
        arguments.queries,
        new,
        arguments.global_layer,
        arguments.bias,
    )
    return mixed.reshape(mixed.shape[0], 1, 1, *mixed.shape[1:]), written


def _written(
    pages: Pages, row: Index, location: Where, new: tuple[Value, ...], *, size: int, first: Index
) -> Pages:
    """Pages with the keys and values of tokens, of which a device writes those that it has."""
    tokens_per_page, number, place = (
        pages[0].shape[2],
        location.entry // size,
        location.entry % size - first,
    )
    here = (place >= 0) & (place < tokens_per_page) & (number < location.pages)
    number = jnp.where(here, location.first + number, pages[0].shape[1])
    index = row, number, jnp.where(here, place, 0)
    return tuple(write_rows(page, index, values) for page, values in zip(pages, new, strict=True))


def _together(partial: Partial, axes: tuple[str, ...], devices: int, spread: bool) -> Value:
    """Attention [T, N, V] of what devices have made of their tokens; each then has the heads whose
    weights it has, where those divide.
    """
    if devices == 1:
        return joined(jax.tree.map(lambda array: array[None], partial))
    mixed, total, highest = partial
    rows = jnp.concatenate([mixed, total[..., None], highest[..., None]], axis=-1)
    if spread:
        rows = rows.reshape(rows.shape[0], devices, -1, rows.shape[-1])
        rows = jax.lax.all_to_all(rows, axes, split_axis=1, concat_axis=0)
    else:
        rows = jax.lax.all_gather(rows, axes)
    return joined((rows[..., :-2], rows[..., -2], rows[..., -1]))
