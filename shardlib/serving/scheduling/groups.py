"""Several groups of devices, each with requests and pages of its own, as one schedule.

A request goes to the group with the fewest tokens to compute and hold, and stays there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.grouped import GroupedPool
from shardlib.serving.scheduling.requests import Request
from shardlib.serving.scheduling.schedule import Schedule, Share


class Pools:
    """Pages of several groups.

    Args:
        pools: one a group.
    """

    def __init__(self, pools: Sequence[GroupedPool]) -> None:
        self._pools = pools

    @property
    def pages(self) -> int:
        """How many there are."""
        return sum(pool.pages for pool in self._pools)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return sum(pool.available for pool in self._pools)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return sum(pool.used for pool in self._pools)

    def forget(self) -> None:
        """What pages hold is not found again; see `Pool.forget`."""
        for pool in self._pools:
            pool.forget()


class Groups:
    """A schedule for each group; slots are numbered through.

    Args:
        count: of groups.
        capacity: of each.
        chunk: see `Schedule`.
    """

    def __init__(self, count: int, capacity: Capacity, chunk: int | None = None) -> None:
        self.each = [Schedule(capacity, chunk=chunk) for _ in range(count)]
        self.pool = Pools([one.pool for one in self.each])
        self._group: dict[int, Schedule] = {}

    @property
    def slots(self) -> list[Request | None]:
        """Requests by slot, None where a slot is free."""
        return [request for one in self.each for request in one.slots]

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for one in self.each for request in one.running]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for a slot."""
        return [request for one in self.each for request in one.waiting]

    @property
    def begun(self) -> bool:
        """Whether a request has a slot, or waits with a part of its answer."""
        return any(one.begun for one in self.each)

    @property
    def closed(self) -> bool:
        """See `Schedule`."""
        return self.each[0].closed

    @closed.setter
    def closed(self, value: bool) -> None:
        for one in self.each:
            one.closed = value

    @property
    def preempted(self) -> int:
        """How often a request gave its pages back."""
        return sum(one.preempted for one in self.each)

    def add(self, request: Request) -> None:
        """A request waits for a slot."""
        least = min(self.each, key=_load)
        self._group[request.number] = least
        least.add(request)

    def end(self, request: Request, why: str) -> None:
        """Ends a request between steps.

        Args:
            request: that waits or has a slot.
            why: see `Request.ended`.
        """
        self._group[request.number].end(request, why)

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[Share]:
        """What the next step computes.

        Args:
            drafts: see `Schedule.next`.
        """
        found: list[Share] = []
        for number, one in enumerate(self.each):
            first = number * len(one.slots)
            found += [replace(share, slot=first + share.slot) for share in one.next(drafts)]
        self._forget()
        return found

    def done(self, shares: Sequence[Share], kept: Mapping[int, int] | None = None) -> None:
        """A step has computed what `next` said.

        Args:
            shares: as `next` gave them.
            kept: see `Schedule.done`.
        """
        for share in shares:
            self._group[share.request.number].done([share], kept)

    def release(self, request: Request) -> None:
        """A request has ended: its slot and pages are free."""
        self._group.pop(request.number).release(request)

    def _forget(self) -> None:
        known = {request.number for one in self.each for request in (*one.running, *one.waiting)}
        self._group = {number: one for number, one in self._group.items() if number in known}


def scheduled(groups: int, capacity: Capacity, chunk: int | None = None) -> Schedule | Groups:
    """The schedule of some groups of devices.

    Args:
        groups: how many there are.
        capacity: of each.
        chunk: see `Schedule`.
    """
    if groups == 1:
        return Schedule(capacity, chunk=chunk)
    return Groups(groups, capacity, chunk)


def _load(one: Schedule) -> int:
    return sum(request.count + request.asked.most for request in (*one.running, *one.waiting))
