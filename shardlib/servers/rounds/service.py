"""From a message of an island to its answer: what the outer server does, whatever carries messages.

| asked     | of an island                            | answered                              |
|-----------|-----------------------------------------|---------------------------------------|
| `enter`   | its exchange and outline (`about`)      | `wait`; `empty`; or what is outer     |
| `offer`   | parameters to begin with, where `empty` |                                       |
| `send`    | an outer gradient, its round and weight | the mean; `wait`; `late`; `again`     |
| `skip`    | that its outer gradient is not finite   | the same                              |
| `collect` | whether the round is closed             | the same                              |
| `repeat`  | the mean of the round before, `behind`  |                                       |
| `leave`   | that it is done                         |                                       |

`late`: the round was closed without it, and it enters again. `again`: the server was started
again, and does not have what it had sent; `behind`: nor the round before. `failed`: there are too
few islands. What is `refused` has changed nothing. Questions are held for up to `HOLD_SECONDS`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardlib.servers.ordering import OrderError, asked_for
from shardlib.servers.ownership import Flat
from shardlib.servers.rounds.attendance import Attendance
from shardlib.servers.rounds.holding import Held, Last
from shardlib.servers.rounds.packing import PackingError
from shardlib.servers.rounds.settings import Rounds
from shardlib.servers.rounds.stored import Checkpoint, restored
from shardlib.servers.server.shard import RefusedError
from shardlib.servers.wire.bodies import Outgoing
from shardlib.servers.wire.messages import STARTER, Answer, Ask
from shardlib.untrusted.json_types import JsonObject

#: Seconds for which an island that waits is not answered; then it asks again.
HOLD_SECONDS = 10.0
#: Seconds between two looks at the clock.
LOOK_SECONDS = 0.2
#: Events that are kept.
MOST_EVENTS = 1000


@dataclass(kw_only=True)
class RoundService:
    """The outer server without its connections.

    Attributes:
        islands: how many there may be.
        rounds: for how long they wait, and for how many.
        checkpoint: its file, or none.
        say: is told what happens.
        closed: is told of each round that has closed.
        server: number of this server.
        events: what has happened and somebody should know.
        refused: how many messages were.
    """

    islands: int
    rounds: Rounds = field(default_factory=Rounds)
    checkpoint: Path | None = None
    say: Callable[[str], None] = lambda text: None
    closed: Callable[[Last], None] = lambda last: None
    server: int = 0
    events: list[str] = field(default_factory=list[str])
    refused: int = 0

    def __post_init__(self) -> None:
        self.table = Attendance(islands=self.islands, rounds=self.rounds)
        self.held: Held | None = None
        self._changed = threading.Condition()
        path = self.checkpoint
        self._file = None if path is None else Checkpoint(path=path, failed=self.note)
        stored = None if self.checkpoint is None else restored(self.checkpoint)
        if stored is not None:
            self.held, self.table.number, active = stored
            if self.rounds.save_every == 1:
                self.table.active = set(active)
            else:  # rounds may be lost, and islands have to begin anew
                self.held.era = secrets.token_hex(8)
            self.note(f"it goes on at its checkpoint, before round {self.table.number}")

    @property
    def askers(self) -> int:
        """How many may ask."""
        return self.islands

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the parameters; None before they are known."""
        return None if self.held is None else self.held.outer.theta.nbytes

    def name(self, who: int) -> str:
        """How a number of an asker is said."""
        return "the starter" if who == STARTER else f"island {who}"

    def answer(self, ask: Ask, arrays: Flat, who: int) -> tuple[Answer, Outgoing]:
        """Answers a message."""
        try:
            if ask.worker != who or not STARTER <= who < self.islands:
                raise RefusedError(
                    f"it speaks for {self.name(ask.worker)}; there are {self.islands} islands"
                )
            with self._changed:
                self.table.away.pop(who, None)
                return self._answered(ask, arrays)
        except (RefusedError, PackingError, OrderError) as error:
            self.refused += 1
            context = f", round {ask.round}" if ask.kind == "send" else ""
            self.note(f"refused a {ask.kind} of {self.name(who)}{context}: {error}")
            return Answer(kind="refused", why=str(error), round=self.table.number), {}

    def gone(self, who: int) -> None:
        """The connection of an island has closed; it is not waited for, if it does not come back."""
        with self._changed:
            self.table.waiting.pop(who, None)
            if who in self.table.active:
                self.table.away[who] = self.table.now()
            self._tick()

    def note(self, text: str) -> None:
        """Keeps an event."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(text)
        self.say(text)

    def save(self) -> None:
        """Writes the checkpoint, where there are parameters and a place for it."""
        with self._changed:
            self._save()
            if self._file is not None:
                self._file.wait()

    def _answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        if ask.kind == "enter":
            return self._enter(ask)
        if ask.kind == "offer":
            if self.held is None:
                self.held = Held.offered(ask.about, arrays, self.islands)
                self._save()
            return Answer(), {}
        if ask.kind in ("send", "skip", "collect"):
            return self._met(ask, arrays)
        if ask.kind == "repeat":
            return self._repeated(ask, arrays), {}
        if ask.kind == "leave":
            self.table.gone(ask.worker)
            self._tick()
            return Answer(), {}
        if ask.kind == "report":
            return Answer(report=self.report(), round=self.table.number), {}
        raise RefusedError("there is no such message")

    def _enter(self, ask: Ask) -> tuple[Answer, Flat]:
        if self.held is None:
            return Answer(kind="empty"), {}
        self.held.require_same(ask.about)
        word = self.held.entry(ask.worker, ask.start)
        self.table.come(ask.worker)
        self._tick()
        until = time.monotonic() + HOLD_SECONDS
        while ask.worker not in self.table.active:
            if why := self.table.fails():
                return Answer(kind="failed", why=why), {}
            if time.monotonic() > until:
                return Answer(kind="wait", round=self.table.number, start=word), {}
            self._changed.wait(LOOK_SECONDS)
            self._tick()
        outer = self.held.outer
        # Copies: they are sent outside of the lock.
        arrays = {"theta": outer.theta.copy(), "momentum": outer.momentum.copy()}
        return Answer(round=self.table.number, start=word), arrays

    def _met(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        state, late = self.held, Answer(kind="late")
        if state is None or not state.knows(ask.worker, ask.start):
            return late, {}
        if ask.round == self.table.number + 1:
            return Answer(kind="behind"), {}
        if ask.round == self.table.number and ask.kind != "collect":
            if ask.base != state.base(ask.round):
                self.note(f"island {ask.worker} has other outer parameters; it enters again")
                return late, {}
            self._take(state, ask, arrays)
        until = time.monotonic() + HOLD_SECONDS
        while ask.round == self.table.number:
            if ask.worker not in self.table.sent:
                return Answer(kind="again", round=self.table.number), {}
            if why := self.table.fails():
                return Answer(kind="failed", why=why), {}
            if time.monotonic() > until:
                return Answer(kind="wait", round=self.table.number), {}
            self._changed.wait(LOOK_SECONDS)
            self._tick()
        last = state.last
        if last is None or last.number != ask.round or ask.worker not in last.sent:
            return late, {}
        return Answer(round=self.table.number, islands=last.islands), asked_for(
            last.arrays, ask.about
        )

    def _repeated(self, ask: Ask, arrays: Flat) -> Answer:
        """Does a round once more that was closed before the server was started again."""
        state, number = self.held, self.table.number
        if state is None or not state.knows(ask.worker, ask.start):
            return Answer(kind="late")
        if ask.round == number - 1:
            return Answer()  # another island has said so
        if ask.round != number or ask.base != state.base(number):
            return Answer(kind="late")
        state.repeat(number, arrays, range(self.islands))
        self.table.reopen()
        self.note(f"it has heard of round {number} from island {ask.worker}")
        self._tick()
        return Answer()

    def _take(self, state: Held, ask: Ask, arrays: Flat) -> None:
        """Takes an outer gradient, once."""
        if ask.worker in self.table.sent:
            return
        of = f"of island {ask.worker}, round {ask.round}"
        if ask.kind == "skip":
            self.note(f"the outer gradient {of}, is not finite")
        else:
            vector = state.unpacked(self.table.number, arrays)
            if not np.isfinite(vector).all():
                self.refused += 1
                self.note(f"refused the outer gradient {of}: it is not finite")
            elif not 0 < ask.weight < 1e300:
                raise RefusedError(f"its weight is {ask.weight:g}; it is more than 0")
            else:
                state.gradients[ask.worker] = (ask.weight, vector)
        self.table.send(ask.worker)
        self.table.active.add(ask.worker)
        self._tick()

    def _tick(self) -> None:
        """What time brings: rounds close, islands that wait are taken in."""
        for island in self.table.gone_for_good():
            self.note(f"island {island} is gone in round {self.table.number}; the others go on")
        for island in self.table.stalled():
            self._silent(island)
        self.table.admit()
        while self.table.closes():
            self._close()
        self._changed.notify_all()

    def _close(self) -> None:
        state, number = self.held, self.table.number
        assert state is not None
        last, why = state.close(number, tuple(sorted(self.table.sent)))
        if why:
            self.note(f"round {number} changes nothing: {why}")
        for island in self.table.close():
            self._silent(island)
        if number % self.rounds.save_every == 0:
            self._save()
        self.closed(last)

    def _silent(self, island: int) -> None:
        self.note(
            f"island {island} has sent nothing {self.rounds.timeout_s:g} s after the first; the"
            " others go on without it"
        )

    def _save(self) -> None:
        if self._file is not None and self.held is not None:
            self._file.save(self.held, self.table.number, sorted(self.table.active))

    def report(self) -> JsonObject:
        """What the server has to tell, as plain data."""
        return {
            "round": self.table.number,
            "islands": sorted(self.table.active),
            "refused": self.refused,
            "events": list(self.events),
        }
