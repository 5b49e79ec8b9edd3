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
        """Whether a request has a slot, or waits with a part of its answer."""
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
        """How often a request gave its pages back."""
        return sum(schedule.preempted for schedule in self.each)

    def add(self, request: Request) -> None:
        """A request waits for a slot."""
        idlest = min(self.each, key=_load)
        self._group[request.number] = idlest
        idlest.add(request)

    def end(self, request: Request, why: str) -> None:
        """Ends a request between steps."""
        self._group[request.number].end(request, why)

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[Share]:
        """What the next step computes."""
        shares: list[Share] = []
        for number, schedule in enumerate(self.each):
            first = number * len(schedule.slots)
            shares += [replace(share, slot=first + share.slot) for share in schedule.next(drafts)]
        self._forget()
        return shares

    def done(self, shares: Sequence[Share], accepted: Mapping[int, int] | None = None) -> None:
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


def scheduled(groups: int, capacity: Capacity, chunk: int | None = None) -> Schedule | Groups:
    """The schedule of some groups of devices."""
    if groups == 1:
        return Schedule(capacity, chunk=chunk)
    return Groups(groups, capacity, chunk)


def _load(schedule: Schedule) -> int:
    return sum(
        request.count + request.asked.most for request in (*schedule.running, *schedule.waiting)
    )
