"""Where do the pages of a layer lie, and which table names them?

The pages of a call whose layers are all in one cache group are [layers, pages, tokens, ...]. Where
a loop runs over layers of several groups, the pages of its layers lie one after another,
[1, pages of all layers, tokens, ...], since those of different groups have different numbers:

    layers     window    all     window    window    all
    pages      3         8       3         3         8        = 25, from 0, 3, 11, 14, 17 on

Suffixes: T token, D group of devices, R request, B chunk of a prompt, M page of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.cost.serving.kept_pages import group_of
from shardlib.jax_types import Index, Value

#: An array of int32, on a device or not.
Numbers = jax.Array | np.ndarray


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that keep the same tokens.

    Attributes:
        window: how many of a request's last tokens they keep; 0 for all.
        pages: that they have, in a group of devices.
        table: pages that a request has at a time at most.
    """

    window: int
    pages: int
    table: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Token:
    """Where tokens stand, int32. Of each group of devices those come first that are the next one of
    a request each, R of them, and then chunks of prompts, all of one length.

    Attributes:
        position: in its request, [T].
        entry: of each cache group, [T] of the pages of its group of devices to which its keys and
            values go, page times size of a page plus place; past the last for a token that is none,
            which writes nothing.
        table: of each cache group, [D R, M] pages of the requests: page n of a request is in
            column n modulo M.
        chunks: of each cache group, [D B, M] pages of the requests of chunks.
        adapter: of its request, from 1 on, [T], 0 for the base; None where there are no adapters.
    """

    position: Numbers
    entry: tuple[Numbers, ...]
    table: tuple[Numbers, ...]
    chunks: tuple[Numbers, ...]
    adapter: Numbers | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Where:
    """Where tokens stand in one layer.

    Attributes:
        position, entry, table, chunks: see `Token`.
        first: the first page of the layer, a scalar.
        pages: how many it has, a scalar.
        columns: of the tables that count, a scalar.
    """

    position: Value
    entry: Value
    table: Value
    chunks: Value
    first: Index
    pages: Index
    columns: Index

    @staticmethod
    def specs(tokens: PartitionSpec) -> Tree:
        """Specs of the arrays, as a tree like it."""
        many = dict.fromkeys(("position", "entry", "table", "chunks"), tokens)
        replicated = dict.fromkeys(("first", "pages", "columns"), PartitionSpec())
        specs: dict[str, Tree] = {**many, **replicated}
        return Where(**specs)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a call, and where their pages lie.

    Attributes:
        groups: number of the cache group of each layer.
        pages: of each cache group, in a group of devices.
    """

    groups: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int], groups: Sequence[CacheGroup]) -> Layers:
        """Layers, each in its group (`kept_pages.group_of`)."""
        group_windows = [group.window for group in groups]
        return cls(
            groups=tuple(group_of(window, group_windows) for window in windows),
            pages=tuple(group.pages for group in groups),
        )

    @property
    def alike(self) -> bool:
        """Whether all are in one group."""
        return len({*self.groups}) == 1

    @property
    def leading(self) -> tuple[int, int]:
        """The first two dims of the arrays of pages of a group of devices."""
        if self.alike:
            return len(self.groups), self.pages[self.groups[0]]
        return 1, sum(self.pages[group] for group in self.groups)

    def where(self, layer: Index, token: Token) -> tuple[Index, Where]:
        """The row of the arrays that holds a layer, and where tokens stand in it."""
        if self.alike:
            return layer, _in_group(token, self.groups[0], 0, self.pages)
        firsts = np.cumsum([0, *(self.pages[group] for group in self.groups)], dtype=np.int32)
        if isinstance(layer, int):
            return 0, _in_group(token, self.groups[layer], int(firsts[layer]), self.pages)
        used = sorted({*self.groups})
        which = jnp.asarray([used.index(group) for group in self.groups], jnp.int32)[layer]

        def chosen(arrays: Sequence[Numbers]) -> Value:
            wide = max(arrays[group].shape[-1] for group in used) if arrays[0].ndim > 1 else 0
            return jax.lax.select_n(which, *(_padded(arrays[group], wide) for group in used))

        def number(of: Sequence[int]) -> Value:
            return jnp.asarray([of[group] for group in used], jnp.int32)[which]

        return 0, Where(
            position=jnp.asarray(token.position),
            entry=chosen(token.entry),
            table=chosen(token.table),
            chunks=chosen(token.chunks),
            first=jnp.asarray(firsts)[layer],
            pages=number(self.pages),
            columns=number([table.shape[-1] for table in token.table]),
        )


def _padded(array: Numbers, wide: int) -> Value:
    """A table with more columns, which nothing looks at."""
    array = jnp.asarray(array)
    return jnp.pad(array, ((0, 0), (0, wide - array.shape[-1]))) if wide else array


def _in_group(token: Token, group: int, first: int, pages: Sequence[int]) -> Where:
    """Where tokens stand in a layer of a group, whose pages begin somewhere."""
    return Where(
        position=jnp.asarray(token.position),
        entry=jnp.asarray(token.entry[group]),
        table=jnp.asarray(token.table[group]),
        chunks=jnp.asarray(token.chunks[group]),
        first=first,
        pages=pages[group],
        columns=token.table[group].shape[-1],
    )
