"""Which tokens does the next step compute?

    requests that only lack their next token    one token each, first
    prompts                                     in chunks, as far as the step's go
    no page left                                the request that ranks last gives its pages back,
                                                and starts anew later, with its answer so far

Of requests of one priority those of the tenant that has had the least are first (`fairness.py`). A
request is admitted when there is a slot and its pages are there; pages that hold the beginning of
its prompt are shared. At least its last token is computed, since there are no logits otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.fairness import Counters
from shardlib.serving.scheduling.grouped import GroupedPool
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
        drafted: tokens at its end that the answer might have next.
        rows: tokens at its end whose logits are wanted.
    """

    request: Request
    slot: int
    first: int
    count: int
    drafted: tuple[int, ...] = ()
    rows: int = 0

    @property
    def ends(self) -> bool:
        """Whether the request has its next token afterwards."""
        return self.first + self.count - len(self.drafted) == self.request.count

    @property
    def tokens(self) -> list[int]:
        """That it computes."""
        return [*self.request.tokens_from(self.first), *self.drafted][: self.count]


class Schedule:
    """Requests that wait, and those that have a slot.

    Args:
        capacity: how many requests and tokens are served.
        chunk: tokens of one request that a step computes at most; None for all of a step.

    Attributes:
        pool: pages of the cache.
        closed: whether those that have no token of their answer yet wait for a slot, whatever is
            free.
    """

    def __init__(self, capacity: Capacity, chunk: int | None = None) -> None:
        self.size = capacity.page
        self.pool = GroupedPool(capacity.groups, self.size)
        self.budget, self.prefixes = capacity.most_tokens, capacity.prefixes
        self.chunk = self.budget if chunk is None else chunk
        self.part, self.parts, self.drafts = capacity.chunk_size, capacity.chunks, capacity.drafts
        self.rows, self.tenants = capacity.rows, Counters(capacity.tenants)
        self.slots: list[Request | None] = [None] * capacity.slots
        self.waiting: list[Request] = []
        self.closed = False
        self.preempted = 0
        self._known: dict[int, tuple[int, list[bytes]]] = {}

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for request in self.slots if request is not None]

    @property
    def begun(self) -> bool:
        """Whether a request has a slot, or waits with a part of its answer."""
        return bool(self.running) or any(map(_begun, self.waiting))

    def add(self, request: Request) -> None:
        """A request waits for a slot."""
        active = {active_request.asked.salt for active_request in (*self.running, *self.waiting)}
        self.tenants.came(request.asked.salt, active)
        self.waiting.append(request)

    def end(self, request: Request, why: str) -> None:
        """Ends a request between steps."""
        request.ended = why
        self.release(request)
        self.waiting = [waiting for waiting in self.waiting if waiting is not request]

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[Share]:
        """What the next step computes; empty where there is nothing to do."""
        self._end_cancelled()
        self._admit()
        shares: dict[int, Share] = {}
        ready = [request for request in self.running if not request.late]
        running = sorted(ready, key=lambda request: (request.waiting > 1, self._order(request)))
        left, rows = self.budget, self.rows - len(running)
        waits = sum(request.waiting == 1 for request in running)
        prompts = len(running) - waits
        parts = self.parts if prompts else self.budget
        for request in running:
            if request not in self.running:  # it gave its pages to one before it
                continue
            count = min(request.waiting, left, self.chunk, max(parts * self.part, 1))
            drafted = tuple[int, ...]()
            unscored = max(len(request.scores), request.computed)
            if request.unscored:
                count = min(count, unscored + rows + 1 - request.computed)
            if not count or not self._room(request, request.computed + count, shares):
                continue
            if request.waiting == 1:
                waits -= 1
                guessed = tuple((drafts or {}).get(request.number, ()))[: self.drafts]
                drafted = guessed[: max(min(left - 1 - waits, rows), 0)]
                if prompts:  # they have parts left, and a request with drafts takes one
                    drafted = drafted[: self.part - 1] if parts > prompts else ()
                drafted = drafted[: self._spare(request, 1 + len(drafted)) - 1]
            end = request.computed + count
            scored = end - unscored if request.unscored else int(end == request.count)
            share = Share(
                request=request,
                slot=self.slots.index(request),
                first=request.computed,
                count=count + len(drafted),
                drafted=drafted,
                rows=scored + len(drafted),
            )
            shares[request.number] = share
            left, rows = left - share.count, rows - max(share.rows - 1, 0)
            parts -= -(-share.count // self.part) if share.count > 1 else 0
        return list(shares.values())

    def done(self, shares: Sequence[Share], kept: Mapping[int, int] | None = None) -> None:
        """A step has computed what `next` said; full pages can be shared from now on."""
        for share in shares:
            request = share.request
            accepted = (kept or {}).get(request.number, 0)
            request.computed += share.count - len(share.drafted) + accepted
            self._charge(request)
            if not self.prefixes:
                continue
            full = len(request.digests)
            tokens = request.tokens[: request.computed]
            request.digests = digests(
                tokens, size=self.size, salt=request.apart, before=request.digests
            )
            self.pool.keep(request.held, full, request.digests)
        for share in shares:
            self.pool.leave(share.request.held, share.request.computed)

    def release(self, request: Request) -> None:
        """A request has ended: its slot and pages are free."""
        self.pool.release(request.held)
        request.held, request.computed, request.digests = (), 0, []
        self._known.pop(request.number, None)
        if request.ended is not None:
            self.tenants.ended(request.number)
        self.slots = [None if slot is request else slot for slot in self.slots]

    def _end_cancelled(self) -> None:
        for request in (*self.running, *self.waiting):
            if request.cancelled:
                self.end(request, CANCELLED)

    def _order(self, request: Request) -> tuple[int, float, int]:
        """Who is served first: higher priority, whose tenant has had less, who came first."""
        return -request.asked.priority, self.tenants.of(request.asked.salt), request.number

    def _charge(self, request: Request, free: int = 0) -> None:
        self.tenants.charge(
            request.asked.salt, number=request.number, tokens=request.count, free=free
        )

    def _admit(self) -> None:
        ready = [request for request in self.waiting if _begun(request) or not self.closed]
        while True:
            if None not in self.slots:
                ready = self.tenants.poorer(ready, self.running)
            if not ready:
                return
            request = min(ready, key=self._order)
            ready.remove(request)
            prefix = [] if request.unscored else self._digests(request)
            cached = self.pool.known(prefix)
            if self._coming(prefix[cached : cached + 1]):
                continue  # another one computes its next page: it waits, and shares that
            if None not in self.slots:
                richer = self.tenants.yields(request, self.running, self.waiting)
                if richer is None:
                    continue
                self._preempt(richer)
                cached = self.pool.known(prefix)
            if not self.pool.admits(prefix[:cached], request.count):
                return
            request.held = self.pool.admit(prefix[:cached], request.count)
            request.digests, request.computed = prefix[:cached], cached * self.size
            request.reused = max(request.reused, min(request.computed, len(request.asked.prompt)))
            self.slots[self.slots.index(None)] = request
            self.waiting.remove(request)
            self._charge(request, free=request.computed)

    def _digests(self, request: Request) -> list[bytes]:
        """Of the pages that a request will fill, before its last token; none where nothing is
        shared.
        """
        if not self.prefixes:
            return []
        count, prefix = self._known.get(request.number, (0, []))
        if count != request.count:
            prefix = digests(request.tokens[:-1], size=self.size, salt=request.apart)
            self._known[request.number] = request.count, prefix
        return prefix

    def _coming(self, page: Sequence[bytes]) -> bool:
        """Whether a running request computes a page."""
        return any(
            digest in self._known[request.number][1][len(request.digests) :]
            for digest in page
            for request in self.running
            if request.number in self._known
        )

    def _spare(self, request: Request, count: int) -> int:
        """How many of the tokens a request may compute without taking pages from another."""
        count = min(count, max(request.asked.most - len(request.answer), 1))
        self.pool.grow(request.held, request.computed + count)
        return min(self.pool.room(request.held) - request.computed, count)

    def _room(self, request: Request, tokens: int, shares: dict[int, Share]) -> bool:
        """Takes pages for so many tokens; whether the request still has its slot then."""
        while not self.pool.grow(request.held, tokens):
            last = max(self.running, key=lambda candidate: candidate.rank)
            shares.pop(last.number, None)
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """A request gives its slot and pages back, and waits."""
        self.release(request)
        self.waiting.append(request)
        self.preempted += 1


def _begun(request: Request) -> bool:
    """Whether weights have told something of a request."""
    return bool(request.answer or request.scores)
