"""The compiled program of a step: tokens of some requests in, the next token of each row out.

There is a program for each pair of a number of tokens and of pages of a request, from a short list;
everything else is an operand, so that nothing is compiled after `warm_up`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shardlib.annotation.model import Tree
from shardlib.lowering.serving.pages import Pages, Token
from shardlib.lowering.serving.program import TracedForward
from shardlib.serving.sampling.choices import Choices, Row, choices
from shardlib.serving.sampling.choose import Chosen, choose
from shardlib.serving.sampling.told import rows_of, told
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.requests import Told
from shardlib.serving.scheduling.schedule import Share

#: (weights, pages, tokens, where they stand, rows, choices) -> (what is chosen, pages).
StepFunction = Callable[..., tuple[Chosen, Mapping[str, Pages]]]


def step_function(forward: TracedForward) -> StepFunction:
    """The function that a step computes.

    Args:
        forward: the traced forward pass.
    """

    def step(
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        tokens: jax.Array,
        where: Token,
        rows: jax.Array,
        how: Choices,
    ) -> tuple[Chosen, Mapping[str, Pages]]:
        logits, pages = forward(*weights, pages, tokens, where, rows)
        return choose(logits, how), pages

    return step


class Step:
    """Compiled programs, and the pages that they read and write.

    Args:
        forward: the traced forward pass.
        weights: (params, state) on their devices.
        pages: of each call of attention, on their devices.
        sizes: of the programs.
    """

    def __init__(
        self,
        forward: TracedForward,
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        sizes: Capacity,
    ) -> None:
        self.forward, self.weights, self.pages, self.sizes = forward, weights, pages, sizes
        self.entries = next(iter(pages.values()))[0].shape[1] * sizes.page

        shardings = jax.tree.map(lambda page: page.sharding, pages)
        self._step = jax.jit(
            step_function(forward), donate_argnums=1, out_shardings=(None, shardings)
        )
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}

    @property
    def compiled(self) -> int:
        """Programs that have been compiled."""
        return len(self._programs)

    def warm_up(self) -> None:
        """Compiles all programs."""
        for tokens in self.sizes.token_sizes:
            for table in self.sizes.table_sizes:
                self._run(operands(self.sizes, self.entries, tokens, table), [])

    def __call__(
        self, shares: Sequence[Share], allowed: Mapping[int, Sequence[np.ndarray]] | None = None
    ) -> list[list[Told]]:
        """Computes a step; returns what is chosen in the rows of each share.

        Args:
            shares: what to compute.
            allowed: tokens that may come next, as bits of uint32, for each row of a request, by its
                number; all where there is none.
        """
        count = sum(share.count for share in shares)
        longest = max(len(share.request.pages) for share in shares)
        given = operands(
            self.sizes,
            self.entries,
            next(size for size in self.sizes.token_sizes if size >= count),
            next(size for size in self.sizes.table_sizes if size >= longest),
        )
        at, rows, masks = 0, list[Row](), dict[int, np.ndarray]()
        for share in shares:
            request, here = share.request, slice(at, at + share.count)
            position = np.arange(share.first, share.first + share.count)
            held = np.asarray(request.pages, np.int32)
            given.tokens[here] = share.tokens
            given.position[here] = position
            given.entry[here] = held[position // self.sizes.page] * self.sizes.page + (
                position % self.sizes.page
            )
            given.table[here, : len(held)] = held
            at += share.count
            given.rows[len(rows) : len(rows) + share.rows] = np.arange(at - share.rows, at)
            for number, mask in enumerate((allowed or {}).get(request.number, ())):
                masks[len(rows) + number] = mask
            rows += rows_of(share)
        found = iter(self._run(given, rows, masks))
        return [[next(found) for _ in range(share.rows)] for share in shares]

    def _run(
        self, given: Given, rows: Sequence[Row], masks: Mapping[int, np.ndarray] | None = None
    ) -> list[Told]:
        where = Token(position=given.position, entry=given.entry, table=given.table)
        size = given.table.shape
        how = choices(
            [*rows, *[None] * (len(given.rows) - len(rows))],
            vocab=self.forward.vocab,
            longest=size[1] * self.sizes.page,
            allowed=masks,
        )
        beside = given.tokens, where, given.rows, how
        if size not in self._programs:
            self._programs[size] = self._step.lower(self.weights, self.pages, *beside).compile()
        found, self.pages = self._programs[size](self.weights, self.pages, *beside)
        return told(found, rows)


@dataclass(frozen=True, kw_only=True)
class Given:
    """Operands of a step, NumPy arrays that are filled in place.

    Attributes:
        tokens, position, entry: int32 [T], see `Token`.
        table: int32 [T, M].
        rows: int32 [R], tokens whose logits are wanted.
    """

    tokens: np.ndarray
    position: np.ndarray
    entry: np.ndarray
    table: np.ndarray
    rows: np.ndarray


def operands(sizes: Capacity, entries: int, tokens: int, table: int) -> Given:
    """Operands of a step that computes nothing.

    Args:
        sizes: of the programs.
        entries: of the cache.
        tokens: of the program.
        table: pages of a request.
    """
    return Given(
        tokens=np.zeros(tokens, np.int32),
        position=np.zeros(tokens, np.int32),
        entry=np.full(tokens, entries, np.int32),
        table=np.zeros((tokens, table), np.int32),
        rows=np.zeros(min(tokens, sizes.rows), np.int32),
    )
