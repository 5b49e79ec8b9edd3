"""Which tokens does the next step compute?

    requests that only lack their next token    one token each, first
    prompts                                     in chunks, as far as the step's tokens go
    no page left                                the request that ranks last gives its pages back,
                                                and starts anew later, with its answer so far

A request is admitted when there is a slot and its pages are there; pages that hold the beginning of
its prompt are shared. At least its last token is computed, since there are no logits otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.pool import Pool
from shardlib.serving.scheduling.prefixes import digests
from shardlib.serving.scheduling.requests import CANCELLED, Request


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a step computes for one request.

    Attributes:
        request: whose.
        slot: that it has.
        first: position of the first token.
        count: of tokens.
    """

    request: Request
    slot: int
    first: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether the request has its next token afterwards."""
        return self.first + self.count == self.request.count


class Schedule:
    """Requests that wait, and those that have a slot.

    Args:
        pool: pages of the cache.
        capacity: how many requests and tokens are served.

    Attributes:
        closed: whether those that have no token of their answer yet wait for a slot, whatever is
            free.
    """

    def __init__(self, pool: Pool, capacity: Capacity) -> None:
        self.pool, self.size = pool, capacity.page
        self.budget, self.prefixes = capacity.most_tokens, capacity.prefixes
        self.slots: list[Request | None] = [None] * capacity.slots
        self.waiting: list[Request] = []
        self.closed = False
        self.preempted = 0

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for request in self.slots if request is not None]

    @property
    def begun(self) -> bool:
        """Whether a request has a slot, or waits with a part of its answer."""
        return bool(self.running) or any(request.answer for request in self.waiting)

    def add(self, request: Request) -> None:
        """A request waits for a slot."""
        self.waiting.append(request)

    def next(self) -> list[Share]:
        """What the next step computes; empty where there is nothing to do."""
        self._end_cancelled()
        self._admit()
        shares: dict[int, Share] = {}
        left = self.budget
        for request in sorted(self.running, key=lambda one: (one.waiting > 1, one.rank)):
            if request not in self.running:  # it gave its pages to one before it
                continue
            count = min(request.waiting, left)
            if count and self._room(request, request.computed + count, shares):
                shares[request.number] = Share(
                    request=request,
                    slot=self.slots.index(request),
                    first=request.computed,
                    count=count,
                )
                left -= count
        return list(shares.values())

    def done(self, shares: Sequence[Share]) -> None:
        """A step has computed what `next` said; full pages can be shared from now on.

        Args:
            shares: as `next` gave them.
        """
        for share in shares:
            request = share.request
            request.computed += share.count
            if not self.prefixes:
                continue
            known = len(request.digests)
            tokens = request.tokens[: request.computed]
            request.digests = digests(
                tokens, size=self.size, salt=request.asked.salt, before=request.digests
            )
            for page in range(known, len(request.digests)):
                self.pool.keep(request.pages[page], request.digests[page])

    def release(self, request: Request) -> None:
        """A request has ended: its slot and pages are free."""
        for page in request.pages:
            self.pool.drop(page)
        request.pages, request.computed, request.digests = [], 0, []
        self.slots = [None if one is request else one for one in self.slots]

    def _end_cancelled(self) -> None:
        for request in (*self.running, *self.waiting):
            if request.cancelled:
                request.ended = CANCELLED
                self.release(request)
        self.waiting = [request for request in self.waiting if request.ended is None]

    def _admit(self) -> None:
        self.waiting.sort(key=lambda request: request.rank)
        ready = [request for request in self.waiting if request.answer or not self.closed]
        while ready and None in self.slots:
            request = ready.pop(0)
            tokens = request.tokens
            known = digests(tokens[:-1], size=self.size, salt=request.asked.salt)
            found = self.pool.held(known) if self.prefixes else []
            more = -(-len(tokens) // self.size) - len(found)
            if not self.pool.takes(found, more):
                return
            for page in found:
                self.pool.share(page)
            request.pages = [*found, *(self.pool.take() for _ in range(more))]
            request.digests = known[: len(found)]
            request.computed = len(found) * self.size
            request.reused = max(request.reused, min(request.computed, len(request.asked.prompt)))
            self.slots[self.slots.index(None)] = request
            self.waiting.remove(request)

    def _room(self, request: Request, tokens: int, shares: dict[int, Share]) -> bool:
        """Takes pages for so many tokens; whether the request still has its slot then."""
        while len(request.pages) * self.size < tokens:
            if self.pool.available:
                request.pages.append(self.pool.take())
                continue
            last = max(self.running, key=lambda one: one.rank)
            self.release(last)
            shares.pop(last.number, None)
            self.waiting.append(last)
            self.preempted += 1
            if last is request:
                return False
        return True
