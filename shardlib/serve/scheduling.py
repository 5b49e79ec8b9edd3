"""The order in which requests are served, and the pages of their keys and values. Plain values of
Python: no JAX in here.

`Counters` say which tenant has been served least.

Each tenant, told by the salt of its requests, has a counter of the tokens that were computed for
it, over its share; of requests of one priority, those of the tenant with the lowest counter come
first. One that comes back starts where the least served of the others is, so that nobody saves up
(virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
arXiv:2401.00588). A prompt counts when it is admitted, and a token once, however often it is
computed.

>>> counters = Counters({"big": 2.0})
>>> counters.came("big", {"small"}); counters.charge("big", number=0, tokens=10)
>>> counters.came("small", {"big"}); counters.charge("small", number=1, tokens=6)
>>> counters.of("big") < counters.of("small")
True

A `Pool` has the pages of the cache: free, in use by some requests, or kept for the prefix that they
hold.

A page that no request uses any more is kept while nobody needs the room; the one that has been kept
the longest goes first. A page is in use by several requests only where it is full and all of them
begin with the tokens that it holds.

>>> pool = Pool(pages=2)
>>> page = pool.take(); pool.keep(page, b"digest"); pool.drop(page)
>>> pool.available, pool.held([b"digest", b"other"])
(2, [0])

`digests` name the contents of pages: a digest of every token up to the end of the page.

Pages of equal digests hold equal keys and values, so that a request whose prompt begins as another
one did takes its pages over. SHA-256, since two prompts of one digest would be served each other's
keys and values; with a salt, requests of different tenants share nothing, and cannot tell from how
quickly they are answered what others asked.

>>> digests([1, 2, 3, 4, 5], size=2) == digests([1, 2, 3, 4], size=2)
True
>>> digests([1, 2], size=2) == digests([1, 2], size=2, salt="other")
False
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from shardlib.serve.cache import CacheGroup
from shardlib.serve.requests import CANCELLED, Capacity, GroupPages, Request, behind, longest


class Counters:
    """Tokens of each tenant, over its share.

    Args:
        shares: of tenants, above 0; 1 of those that have none.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self._tokens: dict[str, float] = {}
        self._charged: dict[int, int] = {}

    def share(self, tenant: str) -> float:
        """Of a tenant."""
        return self._shares.get(tenant, 1.0)

    def of(self, tenant: str) -> float:
        """The counter of a tenant."""
        return self._tokens.get(tenant, 0.0)

    def came(self, tenant: str, active: Set[str]) -> None:
        """A request of a tenant has come."""
        if tenant in active:
            return
        minimum = min(map(self.of, active), default=0.0)
        if not active:
            self._tokens = {}
        self._tokens = {
            name: count for name, count in self._tokens.items() if name in active or count > minimum
        }
        self._tokens[tenant] = max(self.of(tenant), minimum)

    def charge(self, tenant: str, *, number: int, tokens: int, free: int = 0) -> None:
        """A request has so many tokens; those that were not charged before are."""
        charged = max(self._charged.get(number, 0), free)
        self._charged[number] = max(charged, tokens)
        self._tokens[tenant] = self.of(tenant) + max(tokens - charged, 0) / self.share(tenant)

    def ended(self, number: int) -> None:
        """A request has ended."""
        self._charged.pop(number, None)

    def poorer(self, waiting: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """Requests that somebody might give a slot: of higher priority than one that has a slot, or
        of tenants that have none.
        """
        have = {rival.asked.salt for rival in running}
        lowest = min(rival.asked.priority for rival in running)
        return [
            rival
            for rival in waiting
            if rival.asked.priority > lowest or rival.asked.salt not in have
        ]

    def yields(
        self, request: Request, running: Sequence[Request], waiting: Sequence[Request]
    ) -> Request | None:
        """Returns the request that gives its slot to one that waits: the last one of lower
        priority; or, where the tenant of the request has no slot, the last one of a tenant that has
        had no less, and has the most slots over its share, more than one.
        """
        lower = [rival for rival in running if rival.asked.priority < request.asked.priority]
        if lower:
            return max(lower, key=lambda rival: rival.rank)
        slots = Counter(rival.asked.salt for rival in running)
        if slots[request.asked.salt]:
            return None
        tenants = {rival.asked.salt for rival in (*running, *waiting)}
        fair = len(running) / sum(map(self.share, tenants))
        rich = [
            rival
            for rival in running
            if rival.asked.priority == request.asked.priority
            and self.of(rival.asked.salt) >= self.of(request.asked.salt)
            and slots[rival.asked.salt] > max(1, fair * self.share(rival.asked.salt))
        ]
        return max(
            rich,
            key=lambda rival: (slots[rival.asked.salt] / self.share(rival.asked.salt), rival.rank),
            default=None,
        )


class Pool:
    """A pool of pages.

    Args:
        pages: how many, at least 1.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages
        self._digest: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return self.pages - self.available

    def users(self, page: int) -> int:
        """Requests that use a page."""
        return self._users[page]

    def take(self) -> int:
        """A page for one request, whatever it held before."""
        if self._free:
            page = self._free.pop()
        else:
            if not self._kept:
                raise IndexError("no page is free")
            page = next(iter(self._kept))
            del self._kept[page]
            del self._page[self._digest.pop(page)]
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more request uses a page that `held` has found."""
        assert page in self._digest, f"page {page} holds no known prefix"
        self._kept.pop(page, None)
        self._users[page] += 1

    def drop(self, page: int) -> None:
        """A request uses a page no longer."""
        assert self._users[page] > 0, f"nobody uses page {page}"
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._digest:
            self._kept[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int, digest: bytes) -> None:
        """A page in use is full; the first of each digest can be found again."""
        assert self._users[page] > 0, f"nobody uses page {page}"
        if digest not in self._page and page not in self._digest:
            self._page[digest], self._digest[page] = page, digest

    def forget(self) -> None:
        """No page can be found again; those that were kept are free."""
        self._free += list(self._kept)
        self._kept, self._digest, self._page = {}, {}, {}

    def held(self, digests: Sequence[bytes]) -> list[int]:
        """Pages that hold a prefix, up to the first that is not there."""
        pages: list[int] = []
        for digest in digests:
            if digest not in self._page:
                break
            pages.append(self._page[digest])
        return pages

    def has(self, digests: Sequence[bytes]) -> list[bool]:
        """Returns whether there is a page for each of some digests."""
        return [digest in self._page for digest in digests]

    def takes(self, pages: Sequence[int], more: int) -> bool:
        """Returns whether so many more pages are there beside some that are shared."""
        return more <= self.available - sum(page in self._kept for page in pages)


# --------------------------------------------------------------------------------------------------
# Pages of every cache group: layers that keep the same tokens have pages of their own.
#
#     keeps all       a request has pages for all its tokens
#     window W        it has those that hold the last W tokens, and gives the others back; pages of
#                     what it is going to compute are taken as it computes it
#
# A prefix is found where the first group has all its pages and each other one those that the next
# token sees, as in vLLM's hybrid KV cache manager (docs.vllm.ai, design/hybrid_kv_cache_manager).
# As in TensorRT-LLM the pages of a group are its own, so that none waits for another's.


class Pools:
    """Several pools of pages, counted together."""

    def __init__(self, pools: Sequence[Pool | Pools]) -> None:
        self.pools = pools

    @property
    def pages(self) -> int:
        """Number of pages."""
        return sum(pool.pages for pool in self.pools)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return sum(pool.available for pool in self.pools)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return sum(pool.used for pool in self.pools)

    def forget(self) -> None:
        """Forgets the contents of pages; see `Pool.forget`."""
        for pool in self.pools:
            pool.forget()


class GroupedPool(Pools):
    """Pages of some cache groups.

    Args:
        groups: the one that keeps the most tokens first.
        size: tokens of a page.
    """

    pools: list[Pool]

    def __init__(self, groups: Sequence[CacheGroup], size: int) -> None:
        super().__init__([Pool(group.pages) for group in groups])
        self.groups, self.size = tuple(groups), size

    def known(self, digests: Sequence[bytes]) -> int:
        """Pages that a request need not compute."""
        count = len(digests)
        while True:
            before = count
            for group, pool in zip(self.groups, self.pools, strict=True):
                if group.window:
                    count = longest(group.window, self.size, pool.has(digests[:count]))
                else:
                    count = len(pool.held(digests[:count]))
            if count == before:
                return count

    def admits(self, digests: Sequence[bytes], tokens: int) -> bool:
        """Returns whether a request can be admitted: in the first group all its pages are reserved,
        in the others there are as many as all requests need.
        """
        gone = self._gone(0, len(digests))
        return self.pools[0].takes(
            self.pools[0].held(digests[gone:]), self._more(digests, tokens, gone)
        )

    def admit(self, digests: Sequence[bytes], tokens: int) -> tuple[GroupPages, ...]:
        """The pages of a request that is admitted, by group."""
        pages_by_group: list[GroupPages] = []
        for number, pool in enumerate(self.pools):
            gone = self._gone(number, len(digests))
            pages = pool.held(digests[gone:])
            for page in pages:
                pool.share(page)
            pages_by_group.append(GroupPages(gone=gone, pages=pages))
        first = pages_by_group[0]
        more = self._more(digests, tokens, first.gone)
        first.pages += [self.pools[0].take() for _ in range(more)]
        return tuple(pages_by_group)

    def grow(self, pages: Sequence[GroupPages], tokens: int) -> bool:
        """Takes pages for so many tokens of a request; whether there are enough."""
        for group, pool in zip(pages, self.pools, strict=True):
            while group.end * self.size < tokens:
                if not pool.available:
                    return False
                group.pages.append(pool.take())
        return True

    def room(self, pages: Sequence[GroupPages]) -> int:
        """Tokens that the pages of a request have room for."""
        return min(group.end for group in pages) * self.size

    def keep(self, pages: Sequence[GroupPages], first: int, digests: Sequence[bytes]) -> None:
        """Pages of a request are full, and can be found again."""
        for group, pool in zip(pages, self.pools, strict=True):
            for number in range(max(first, group.gone), len(digests)):
                pool.keep(group.at(number), digests[number])

    def leave(self, pages: Sequence[GroupPages], computed: int) -> None:
        """A request gives pages back that no token to come sees."""
        for group, group_pages, pool in zip(self.groups, pages, self.pools, strict=True):
            gone = behind(window=group.window, computed=computed, size=self.size)
            count = max(gone - group_pages.gone, 0)
            for page in group_pages.pages[:count]:
                pool.drop(page)
            group_pages.gone, group_pages.pages = (
                group_pages.gone + count,
                group_pages.pages[count:],
            )

    def release(self, pages: Sequence[GroupPages]) -> None:
        """A request gives all its pages back; the last one is taken by others first, since the
        others are of no use without the first.
        """
        for group, pool in zip(pages, self.pools, strict=False):
            for page in reversed(group.pages):
                pool.drop(page)

    def _gone(self, number: int, pages: int) -> int:
        window = self.groups[number].window
        return behind(window=window, computed=pages * self.size, size=self.size)

    def _more(self, digests: Sequence[bytes], tokens: int, gone: int) -> int:
        """Pages of the first group that a request takes at once."""
        limit = min(-(-tokens // self.size), gone + self.groups[0].table)
        return max(limit - len(digests), 0)


def digests(
    tokens: Sequence[int], *, size: int, salt: str = "", before: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of the pages that tokens fill, the first in front."""
    listed = list(before)
    for page in range(len(listed), len(tokens) // size):
        last = listed[-1] if listed else hashlib.sha256(salt.encode()).digest()
        part = np.asarray(tokens[page * size : (page + 1) * size], np.int64).tobytes()
        listed.append(hashlib.sha256(last + part).digest())
    return listed


# --------------------------------------------------------------------------------------------------
# The schedule: the tokens of the next step.
#
#     requests that only lack their next token    one token each, first
#     prompts                                     in chunks, as far as the step's go
#     no page left                                the request that ranks last gives its pages back,
#                                                 and starts anew later, with its answer so far
#
# Of requests of one priority those of the tenant that has had the least are first (`Counters`). A
# request is admitted when there is a slot and its pages are there; pages that hold the beginning of
# its prompt are shared. At least its last token is computed, since there are no logits otherwise.


@dataclass(frozen=True, kw_only=True)
class ScheduledChunk:
    """The tokens that a step computes for one request.

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
        """True if the request has its next token afterwards."""
        return self.first + self.count - len(self.drafted) == self.request.count

    @property
    def tokens(self) -> list[int]:
        """The tokens that it computes."""
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
        """True if a request has a slot, or waits with a part of its answer."""
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

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[ScheduledChunk]:
        """Schedules the next step; empty where there is nothing to do."""
        for request in (*self.running, *self.waiting):
            if request.cancelled:
                self.end(request, CANCELLED)
        self._admit()
        shares: dict[int, ScheduledChunk] = {}
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
            share = ScheduledChunk(
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

    def done(self, shares: Sequence[ScheduledChunk], kept: Mapping[int, int] | None = None) -> None:
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

    def _order(self, request: Request) -> tuple[int, float, int]:
        """Order of admission: higher priority, whose tenant has had less, who came first."""
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
        """Returns whether a running request computes a page."""
        return any(
            digest in self._known[request.number][1][len(request.digests) :]
            for digest in page
            for request in self.running
            if request.number in self._known
        )

    def _spare(self, request: Request, count: int) -> int:
        """Number of the `count` tokens that a request may compute without taking pages from
        another.
        """
        count = min(count, max(request.asked.most - len(request.answer), 1))
        self.pool.grow(request.held, request.computed + count)
        return min(self.pool.room(request.held) - request.computed, count)

    def _room(self, request: Request, tokens: int, shares: dict[int, ScheduledChunk]) -> bool:
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
    """Returns whether weights have told something of a request."""
    return bool(request.answer or request.scores)


# --------------------------------------------------------------------------------------------------
# Several groups of devices, each with requests and pages of its own, as one schedule.
#
# A request goes to the group with the fewest tokens to compute and hold, and stays there.


class Groups:
    """A schedule for each group; slots are numbered through."""

    def __init__(self, count: int, capacity: Capacity, chunk: int | None = None) -> None:
        self.each = [Schedule(capacity, chunk=chunk) for _ in range(count)]
        self.pool = Pools([schedule.pool for schedule in self.each])
        self._group: dict[int, Schedule] = {}

    @property
    def slots(self) -> list[Request | None]:
        """Requests by slot, None where a slot is free."""
        return [request for schedule in self.each for request in schedule.slots]

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for schedule in self.each for request in schedule.running]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for a slot."""
        return [request for schedule in self.each for request in schedule.waiting]

    @property
    def begun(self) -> bool:
        """True if a request has a slot, or waits with a part of its answer."""
        return any(schedule.begun for schedule in self.each)

    @property
    def closed(self) -> bool:
        """See `Schedule`."""
        return self.each[0].closed

    @closed.setter
    def closed(self, value: bool) -> None:
        for schedule in self.each:
            schedule.closed = value

    @property
    def preempted(self) -> int:
        """Number of times a request gave its pages back."""
        return sum(schedule.preempted for schedule in self.each)

    def add(self, request: Request) -> None:
        """A request waits for a slot."""
        idlest = min(self.each, key=_load)
        self._group[request.number] = idlest
        idlest.add(request)

    def end(self, request: Request, why: str) -> None:
        """Ends a request between steps."""
        self._group[request.number].end(request, why)

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[ScheduledChunk]:
        """Schedules the next step."""
        shares: list[ScheduledChunk] = []
        for number, schedule in enumerate(self.each):
            first = number * len(schedule.slots)
            shares += [replace(share, slot=first + share.slot) for share in schedule.next(drafts)]
        self._forget()
        return shares

    def done(
        self, shares: Sequence[ScheduledChunk], accepted: Mapping[int, int] | None = None
    ) -> None:
        """A step has computed what `next` said."""
        for share in shares:
            self._group[share.request.number].done([share], accepted)

    def release(self, request: Request) -> None:
        """A request has ended: its slot and pages are free."""
        self._group.pop(request.number).release(request)

    def _forget(self) -> None:
        active = {
            request.number
            for schedule in self.each
            for request in (*schedule.running, *schedule.waiting)
        }
        self._group = {
            number: schedule for number, schedule in self._group.items() if number in active
        }


def _load(schedule: Schedule) -> int:
    return sum(
        request.count + request.asked.most for request in (*schedule.running, *schedule.waiting)
    )
