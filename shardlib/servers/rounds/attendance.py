"""Who is in a round, who has sent, and when it closes.

Islands begin a round together. Who comes while one is open waits for the next, so that nobody waits
for somebody who has just begun; where too few are in a round for its quorum, or they have waited
for `gather_s`, it takes them in. An island that sends nothing until the timeout is left out, and
enters again once it is back.

>>> from shardlib.servers.rounds.settings import Rounds
>>> now = [0.0]
>>> table = Attendance(islands=2, rounds=Rounds(timeout_s=5), now=lambda: now[0])
>>> table.come(0), table.come(1), sorted(table.active)
(None, None, [0, 1])
>>> table.send(0)
>>> table.closes(), now.append(now.pop() + 5), table.closes()
(False, None, True)
>>> table.close(), table.number, sorted(table.active)
([1], 2, [0])
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardlib.servers.rounds.settings import Rounds


@dataclass(kw_only=True)
class Attendance:
    """The open round; used by one thread at a time.

    Attributes:
        islands: how many there may be.
        rounds: how long a round waits, and for how many.
        number: of the open round, from 1 on.
        active: islands that have begun it.
        waiting: islands that wait for a round, since when.
        away: islands whose connection has closed, since when.
        sent: islands that have sent.
        first: when the first of them did.
        now: seconds of a clock.
    """

    islands: int
    rounds: Rounds
    number: int = 1
    active: set[int] = field(default_factory=set[int])
    waiting: dict[int, float] = field(default_factory=dict[int, float])
    away: dict[int, float] = field(default_factory=dict[int, float])
    sent: set[int] = field(default_factory=set[int])
    first: float | None = None
    now: Callable[[], float] = time.monotonic

    def come(self, island: int) -> None:
        """An island is there, and wants to begin a round."""
        self.active.discard(island)
        self.waiting.setdefault(island, self.now())
        self.admit()

    def admit(self) -> None:
        """Takes in who waits, where it is time to."""
        if self.active or self.sent:
            short = len(self.active | self.sent) < self.rounds.quorum
            ready = short or self.gathered()  # those who are in it may never send
        else:
            all_there = len(self.waiting) >= self.islands
            ready = all_there or (self.gathered() and len(self.waiting) >= self.rounds.quorum)
        if ready:
            self.active |= self.waiting.keys()
            self.waiting.clear()

    def gathered(self) -> bool:
        """Whether islands that have come have waited long enough for the others, or for the open
        round to close.
        """
        oldest = min(self.waiting.values(), default=self.now())
        return self.now() - oldest >= self.rounds.gather_s

    def send(self, island: int) -> None:
        """An island has sent, or says that it has nothing to send."""
        if self.first is None:
            self.first = self.now()
        self.sent.add(island)

    def gone(self, island: int) -> None:
        """An island has left; what it has sent stays."""
        self.active.discard(island)
        self.waiting.pop(island, None)
        self.away.pop(island, None)
        if not self.active:
            self.first = None  # who comes next has its time

    def gone_for_good(self) -> list[int]:
        """Leaves out islands that have been away for too long; gives them."""
        limit = self.now() - self.rounds.away_s
        absent = [island for island, since in self.away.items() if since <= limit]
        for island in absent:
            self.gone(island)
        return absent

    def late(self) -> bool:
        """Whether the round has waited long enough."""
        return self.first is not None and self.now() - self.first >= self.rounds.timeout_s

    def enough(self) -> bool:
        """Whether the round has its quorum."""
        return len(self.sent) >= self.rounds.quorum

    def fails(self) -> str:
        """Why islands that wait are to end; nothing where they are not."""
        rounds, minimum = self.rounds, f"of at least {self.rounds.quorum}"
        if rounds.short != "fail":
            return ""
        if self.late() and not self.enough():
            state = f"round {self.number} has {len(self.sent)} {minimum} islands"
            return f"{state} {rounds.timeout_s:g} s after the first"
        begun = self.active or self.sent
        if not begun and self.gathered() and len(self.waiting) < rounds.quorum:
            return f"{len(self.waiting)} {minimum} islands have come in {rounds.gather_s:g} s"
        return ""

    def closes(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self.enough() and (self.active <= self.sent or self.late())

    def stalled(self) -> list[int]:
        """Leaves out islands that have sent nothing in a round that is late and short, so that it
        takes in others; gives them.
        """
        if not self.late() or self.enough():
            return []
        out = sorted(self.active - self.sent)
        self.active &= self.sent
        return out

    def reopen(self) -> None:
        """Opens the next round for the same islands."""
        self.active |= self.waiting.keys()
        self.waiting.clear()
        self.sent.clear()
        self.first = None
        self.number += 1

    def close(self) -> list[int]:
        """Opens the next round, and gives the islands that were in this one and have sent nothing;
        they are in no round.
        """
        out = sorted(self.active - self.sent)
        self.active = (self.active & self.sent) | self.waiting.keys()
        self.waiting.clear()
        self.sent.clear()
        self.first = None
        self.number += 1
        return out
