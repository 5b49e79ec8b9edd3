"""Which tenant has had the least?

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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from shardlib.serving.scheduling.requests import Request


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
        """Who gives its slot to a request that waits: the last one of lower priority; or, where the
        tenant of the request has no slot, the last one of a tenant that has had no less, and
        has the most slots over its share, more than one.
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
