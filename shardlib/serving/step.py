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
from shardlib.serving.sampling import Choices, choices, choose
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.requests import Request
from shardlib.serving.scheduling.schedule import Share

#: (weights, pages, tokens, where they stand, rows, choices) -> (tokens, logarithms, pages).
StepFunction = Callable[..., tuple[jax.Array, jax.Array, Mapping[str, Pages]]]


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
    ) -> tuple[jax.Array, jax.Array, Mapping[str, Pages]]:
        logits, pages = forward(*weights, pages, tokens, where, rows)
        return *choose(logits, how), pages

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
            step_function(forward), donate_argnums=1, out_shardings=(None, None, shardings)
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
                self._run(self._empty(tokens, table), [None] * self.sizes.slots)

    def __call__(
        self, shares: Sequence[Share], slots: Sequence[Request | None]
    ) -> list[tuple[int, float]]:
        """Computes a step; returns the next token of every slot and its logarithm, which counts for
        those requests alone that have all their tokens computed.

        Args:
            shares: what to compute.
            slots: requests by slot.
        """
        count = sum(share.count for share in shares)
        longest = max(len(share.request.pages) for share in shares)
        given = self._empty(
            next(size for size in self.sizes.token_sizes if size >= count),
            next(size for size in self.sizes.table_sizes if size >= longest),
        )
        at = 0
        for share in shares:
            request, here = share.request, slice(at, at + share.count)
            position = np.arange(share.first, share.first + share.count)
            held = np.asarray(request.pages, np.int32)
            given.tokens[here] = request.tokens[share.first : share.first + share.count]
            given.position[here] = position
            given.entry[here] = held[position // self.sizes.page] * self.sizes.page + (
                position % self.sizes.page
            )
            given.table[here, : len(held)] = held
            at += share.count
            given.rows[share.slot] = at - 1
        return self._run(given, slots)

    def _empty(self, tokens: int, table: int) -> _Given:
        return _Given(
            tokens=np.zeros(tokens, np.int32),
            position=np.zeros(tokens, np.int32),
            entry=np.full(tokens, self.entries, np.int32),
            table=np.zeros((tokens, table), np.int32),
            rows=np.zeros(self.sizes.slots, np.int32),
        )

    def _run(self, given: _Given, slots: Sequence[Request | None]) -> list[tuple[int, float]]:
        where = Token(position=given.position, entry=given.entry, table=given.table)
        beside = given.tokens, where, given.rows, choices(slots)
        size = given.table.shape
        if size not in self._programs:
            self._programs[size] = self._step.lower(self.weights, self.pages, *beside).compile()
        tokens, logprobs, self.pages = self._programs[size](self.weights, self.pages, *beside)
        return list(zip(np.asarray(tokens).tolist(), np.asarray(logprobs).tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Operands of a step, NumPy arrays that are filled in place."""

    tokens: np.ndarray
    position: np.ndarray
    entry: np.ndarray
    table: np.ndarray
    rows: np.ndarray
