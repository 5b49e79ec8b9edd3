"""How many requests and tokens are served?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from shardlib.cost.serving.kept_pages import needed, ordered, pages_each
from shardlib.errors import ArgumentError, raise_all
from shardlib.lowering.serving.cache_groups import CacheGroup
from shardlib.planning.serving.serving_plan import ServingPlan


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tokens of a program.

    Attributes:
        singles: tokens that look at pages of their own, the next one of a request each.
        chunks: how many there are of several tokens of one request, which look at its pages
            together.
        chunk: tokens of each.
    """

    singles: int
    chunks: int = 0
    chunk: int = 0

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return self.singles + self.chunks * self.chunk


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How weights and the cache are stored.

    Attributes:
        weights: "model", as it has them; or "int8" or "fp8", matrices with a scale for each row or
            column.
        cache: "model", as it makes keys and values; "int8", with a scale for each token and head;
            or "fp8", without a scale.

    Raises:
        ArgumentError: another word.
    """

    weights: str = "model"
    cache: str = "model"

    def __post_init__(self) -> None:
        failures = [
            f"{name} are stored as {value!r}; known are {', '.join(formats)}"
            for name, value, formats in (
                ("weights", self.weights, ("model", "int8", "fp8")),
                ("keys and values", self.cache, ("model", "int8", "fp8")),
            )
            if value not in formats
        ]
        if failures:
            raise_all(ArgumentError, "the model cannot be stored so", failures)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many requests and tokens are served.

    Attributes:
        longest: tokens of a request at most, prompt and answer together.
        slots: requests that are served at a time.
        page: tokens of a page of the cache.
        pages: of the cache, of the layers that keep the most tokens; None for those of as many
            requests of half the length as there are slots, and at least of one of the full length.
            Layers with a shorter window have as many as all slots need at most.
        budget: tokens that a step computes at most; None for 64, or as many as slots and drafts.
        chunk: tokens of a prompt that look at its pages together; None for a quarter of the budget,
            at most 64.
        prefixes: whether requests that begin alike share pages.
        drafts: tokens that a step may guess ahead for each request, see `Engine`.
        adapters: of the model at most, see `Engine.adapt`.
        tenants: shares of tenants in what is computed, by the salt of their requests; 1 of all
            others.
        windows: tokens that layers keep, the most first, 0 for all. An engine sees to it
            (`within`).
        storage: of weights and the cache.

    Raises:
        ArgumentError: sizes that are not usable, or do not fit each other.
    """

    longest: int = 1024
    slots: int = 8
    page: int = 16
    pages: int | None = None
    budget: int | None = None
    chunk: int | None = None
    prefixes: bool = True
    drafts: int = 0
    adapters: int = 0
    tenants: Mapping[str, float] = field(default_factory=dict[str, float])
    windows: tuple[int, ...] = (0,)
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        minima = {"longest": 2, "slots": 1, "page": 1, "pages": 1, "budget": 1, "chunk": 1} | {
            "drafts": 0,
        }
        failures = [
            f"{name} is {value!r}; it is a whole number from {start} on"
            for name, start in minima.items()
            if (value := getattr(self, name)) is not None
            or name not in ("pages", "budget", "chunk")
            if isinstance(value, bool) or not isinstance(value, int) or value < start
        ]
        if not failures and self.budget is not None and self.budget < self.slots:
            failures.append(
                f"budget is {self.budget}; each of {self.slots} slots has a token in a step"
            )
        failures += [
            f"the share of {name!r} is {share!r}; it is a number above 0"
            for name, share in self.tenants.items()
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1e9
        ]
        if failures:
            raise_all(ArgumentError, "the model cannot be served so", failures)

    @classmethod
    def of(cls, plan: ServingPlan, *, longest: int | None = None) -> Self:
        """What a replica of a plan serves."""
        choice = plan.choice
        words = (plan.workload.weights, plan.workload.cache)
        weights, cache = ("model" if word == "bf16" else word for word in words)
        return cls(
            longest=plan.workload.tokens if longest is None else longest,
            slots=choice.batch,
            page=choice.page,
            pages=choice.pages,
            budget=choice.batch + choice.chunk,
            storage=Storage(weights=weights, cache=cache),
        )

    @property
    def table(self) -> int:
        """Pages of the longest request."""
        return -(-self.longest // self.page)

    def within(self, windows: Iterable[int]) -> Self:
        """The same for a model whose layers keep so many tokens."""
        return replace(self, windows=ordered(windows, longest=self.longest))

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Layers that keep the same tokens, and their pages."""
        pages = pages_each(
            self.windows,
            first=self.all_pages,
            slots=self.slots,
            budget=self.most_tokens,
            size=self.page,
            drafts=self.drafts,
        )
        return tuple(
            CacheGroup(window=window, pages=count, table=self._most_pages(window))
            for window, count in zip(self.windows, pages, strict=True)
        )

    @property
    def most_pages(self) -> int:
        """Pages that a request has at a time at most, of the layers that keep the most tokens."""
        return self._most_pages(self.windows[0])

    def _most_pages(self, window: int) -> int:
        if not window:
            return self.table
        few = needed(window=window, budget=self.most_tokens, size=self.page)
        return min(self.table, few)

    @property
    def all_pages(self) -> int:
        """Pages of the cache, of the layers that keep the most tokens."""
        if self.pages is not None:
            return self.pages
        half = max(self.table, self.slots * self.table // 2)
        return min(half, self.slots * self.most_pages)

    @property
    def room(self) -> int:
        """Tokens of a request at most, prompt and answer together."""
        if self.all_pages >= self.most_pages:
            return self.longest
        return min(self.longest, self.all_pages * self.page)

    @property
    def most_tokens(self) -> int:
        """Tokens that a step computes at most."""
        return max(64, self.rows) if self.budget is None else self.budget

    @property
    def rows(self) -> int:
        """Tokens of a step whose logits are wanted at most."""
        return self.slots * (1 + self.drafts)

    @property
    def chunk_size(self) -> int:
        """Tokens of a prompt that look at its pages together."""
        return min(max(self.most_tokens // 4, 1), 64) if self.chunk is None else self.chunk

    @property
    def chunks(self) -> int:
        """Chunks of prompts that a step computes at most."""
        return -(-self.most_tokens // self.chunk_size)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the programs: for the next tokens alone, with drafts, with prompts."""
        drafts = Shape(singles=0, chunks=self.slots, chunk=1 + self.drafts)
        return (
            Shape(singles=self.slots),
            *((drafts,) if self.drafts else ()),
            Shape(singles=self.slots, chunks=self.chunks, chunk=self.chunk_size),
        )
