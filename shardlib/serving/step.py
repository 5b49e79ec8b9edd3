"""The compiled program of a step: tokens of some requests in, the next token of each row out.

There is a program for next tokens alone, one with drafts, and one that computes chunks of prompts
beside them; everything else is an operand, so that nothing is compiled after `warm_up`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardlib.annotation.model import Tree
from shardlib.lowering.serving.cache_groups import CacheGroup, Token
from shardlib.lowering.serving.grid import Grid
from shardlib.lowering.serving.pages import Pages
from shardlib.lowering.serving.program import TracedForward
from shardlib.serving.sampling.choices import Choices, Row, choices
from shardlib.serving.sampling.choose import Chosen, choose
from shardlib.serving.sampling.told import rows_of, told
from shardlib.serving.scheduling.capacity import Capacity, Shape
from shardlib.serving.scheduling.requests import Told
from shardlib.serving.scheduling.schedule import Share

#: (weights, pages, tokens, where they stand, rows, choices) -> (what is chosen, pages).
StepFunction = Callable[..., tuple[Chosen, Mapping[str, Pages]]]


def step_function(forward: TracedForward, groups: Sequence[CacheGroup], grid: Grid) -> StepFunction:
    """The function that a step computes."""

    def step(
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        tokens: jax.Array,
        placement: Token,
        rows: jax.Array,
        choices: Choices,
    ) -> tuple[Chosen, Mapping[str, Pages]]:
        logits, pages = forward(*weights, pages, tokens, placement, rows, groups, grid)
        return grid.by_row(choose, logits, choices), pages

    return step


class Step:
    """Compiled programs, and the pages that they read and write.

    Args:
        forward: the traced forward pass.
        weights: (params, state) on their devices.
        pages: of each call of attention, on their devices.
        sizes: of the programs, for a group of devices.
        grid: the devices.
    """

    def __init__(
        self,
        forward: TracedForward,
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        sizes: Capacity,
        grid: Grid,
    ) -> None:
        self.forward, self.weights, self.pages, self.sizes = forward, weights, pages, sizes
        self.grid = grid
        self._programs: dict[Shape, jax.stages.Compiled] = {}
        self._which: Callable[[Share], int] | None = None

    @property
    def compiled(self) -> int:
        """Programs that have been compiled."""
        return len(self._programs)

    def adapt(self, weights: tuple[Tree, Tree], which: Callable[[Share], int]) -> None:
        """Tokens have parameters of their own from now on; programs are compiled again where the
        weights have another structure.
        """
        if jax.tree.structure(weights) != jax.tree.structure(self.weights):
            self._programs = {}
        self.weights, self._which = weights, which

    def warm_up(self) -> None:
        """Compiles all programs."""
        for shape in self.sizes.shapes:
            self._run(self._operands(shape), {})

    def __call__(
        self, shares: Sequence[Share], allowed: Mapping[int, Sequence[np.ndarray]] | None = None
    ) -> list[list[Told]]:
        """Computes a step; returns what is chosen in the rows of each share."""
        shape = next(candidate for candidate in self.sizes.shapes if self._fits(candidate, shares))
        operands = self._operands(shape)
        rows_per_group = len(operands.rows) // self.grid.groups
        chunks, used = [0] * self.grid.groups, [0] * self.grid.groups
        rows, masks, row_numbers = dict[int, Row](), dict[int, np.ndarray](), list[list[int]]()
        for share in shares:
            group, slot = divmod(share.slot, self.sizes.slots)
            if share.count == 1 and shape.singles:
                tables, places = [table[share.slot] for table in operands.table], np.asarray([slot])
            else:
                first, many = chunks[group], -(-share.count // shape.chunk)
                chunk_rows = group * shape.chunks + first + np.arange(many)
                tables = [table[chunk_rows[0] : chunk_rows[-1] + 1] for table in operands.chunks]
                places = shape.singles + first * shape.chunk + np.arange(share.count)
                chunks[group] += many
            for table, pages in zip(tables, share.request.held, strict=True):
                table[..., np.arange(pages.gone, pages.end) % table.shape[-1]] = pages.pages
            self._fill(operands, share, group * shape.tokens + places)
            here = range(used[group], used[group] + share.rows)
            operands.rows[group * rows_per_group :][here.start : here.stop] = places[
                share.count - share.rows :
            ]
            row_numbers.append([group * rows_per_group + row for row in here])
            used[group] += share.rows
            masks.update(
                zip(row_numbers[-1], (allowed or {}).get(share.request.number, ()), strict=False)
            )
            rows.update(zip(row_numbers[-1], rows_of(share), strict=True))
        sampled = self._run(operands, rows, masks)
        return [[sampled[row] for row in each] for each in row_numbers]

    def _compiled(self, beside: Tree) -> jax.stages.Compiled:
        def held(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: leaf.sharding, tree)

        weights, pages = held(self.weights), held(self.pages)
        return (
            jax.jit(
                step_function(self.forward, self.sizes.groups, self.grid),
                donate_argnums=1,
                in_shardings=(weights, pages, *self.grid.by_group(beside)),
                out_shardings=(self.grid.sharding(PartitionSpec()), pages),
            )
            .lower(self.weights, self.pages, *beside)
            .compile()
        )

    def holds(self, shares: Sequence[Share]) -> bool:
        """Whether one step computes them all."""
        return any(self._fits(shape, shares) for shape in self.sizes.shapes)

    def _fits(self, shape: Shape, shares: Sequence[Share]) -> bool:
        """Whether a program computes what groups of devices have."""
        used = [0] * self.grid.groups
        for share in shares:
            if share.count > 1 or not shape.singles:
                many = -(-share.count // shape.chunk) if shape.chunk else shape.chunks + 1
                used[share.slot // self.sizes.slots] += many
        return max(used) <= shape.chunks

    def _fill(self, operands: Given, share: Share, places: np.ndarray) -> None:
        """The tokens of a share, at their places."""
        if share.count == 1:
            self._fill_one(operands, share, int(places[0]))
            return
        position = np.arange(share.first, share.first + share.count)
        page = self.sizes.page
        operands.tokens[places] = share.tokens
        if operands.adapter is not None and self._which is not None:
            operands.adapter[places] = self._which(share)
        operands.position[places] = position
        for entry, group in zip(operands.entry, share.request.held, strict=True):
            pages = np.asarray(group.pages, np.int32)[position // page - group.gone]
            entry[places] = pages * page + position % page

    def _fill_one(self, operands: Given, share: Share, place: int) -> None:
        """The token of a share that has one: without the arrays that several want."""
        page, position = self.sizes.page, share.first
        operands.tokens[place], operands.position[place] = share.tokens[0], position
        if operands.adapter is not None and self._which is not None:
            operands.adapter[place] = self._which(share)
        for entry, group in zip(operands.entry, share.request.held, strict=True):
            entry[place] = group.at(position // page) * page + position % page

    def _operands(self, shape: Shape) -> Given:
        blank = operands(self.sizes, shape, self.grid.groups)
        return replace(blank, adapter=np.zeros_like(blank.tokens)) if self._which else blank

    def _run(
        self,
        operands: Given,
        rows: Mapping[int, Row],
        masks: Mapping[int, np.ndarray] | None = None,
    ) -> dict[int, Told]:
        row_choices = choices(
            [rows.get(number) for number in range(len(operands.rows))],
            vocab=self.forward.vocab,
            longest=self.sizes.table * self.sizes.page,
            allowed=masks,
        )
        beside = operands.tokens, operands.where, operands.rows, row_choices
        if operands.shape not in self._programs:
            self._programs[operands.shape] = self._compiled(beside)
        chosen, self.pages = self._programs[operands.shape](self.weights, self.pages, *beside)
        return told(chosen, rows)


@dataclass(frozen=True, kw_only=True)
class Given:
    """Operands of a step, NumPy arrays that are filled in place.

    Attributes:
        shape: of the program.
        tokens, position: int32 [T], of each group of devices as its shape says, see `Token`.
        entry, table, chunks: of each cache group, see `Token`.
        rows: int32, of each group as many, tokens whose logits are wanted.
        adapter: see `Token`.
    """

    shape: Shape
    tokens: np.ndarray
    position: np.ndarray
    entry: tuple[np.ndarray, ...]
    table: tuple[np.ndarray, ...]
    chunks: tuple[np.ndarray, ...]
    rows: np.ndarray
    adapter: np.ndarray | None = None

    @property
    def where(self) -> Token:
        """Where tokens stand."""
        return Token(
            position=self.position,
            entry=self.entry,
            table=self.table,
            chunks=self.chunks,
            adapter=self.adapter,
        )


def operands(sizes: Capacity, shape: Shape, devices: int) -> Given:
    """Operands of a step that computes nothing."""
    tokens, groups = devices * shape.tokens, sizes.groups

    def tables(count: int) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros((devices * count, group.table), np.int32) for group in groups)

    return Given(
        shape=shape,
        tokens=np.zeros(tokens, np.int32),
        position=np.zeros(tokens, np.int32),
        entry=tuple(np.full(tokens, group.pages * sizes.page, np.int32) for group in groups),
        table=tables(shape.singles),
        chunks=tables(shape.chunks),
        rows=np.zeros(devices * min(shape.tokens, sizes.rows), np.int32),
    )
