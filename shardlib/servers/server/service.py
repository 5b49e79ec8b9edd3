"""From a message to its answer: what a server does, whatever carries the messages.

Threads ask at the same time; arrays are sent and written outside of the lock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.servers.ordering import WHOLE, Order, OrderError, gathered, read_order, scattered
from shardlib.servers.ownership import Flat
from shardlib.servers.server.gate import Gate
from shardlib.servers.server.shard import Pushed, RefusedError, Shard
from shardlib.servers.server.stored import packed, restore, write
from shardlib.servers.wire.bodies import Outgoing
from shardlib.servers.wire.messages import STARTER, Answer, Ask
from shardlib.untrusted.json_types import JsonObject

#: Seconds for which a worker that waits is not answered; then it asks again.
WAIT_SECONDS = 0.5
#: Events that are kept.
MOST_EVENTS = 1000


@dataclass(kw_only=True)
class Service:
    """A server without its connections.

    Attributes:
        exchange: of the run.
        server: number of this server.
        checkpoint: its file; None for none.
        save_every: pushes between two checkpoints; 0 for those that are asked for alone.
        silent_s: seconds after which a silent worker is not waited for.
        restored: whether it goes on at a checkpoint.
        events: what has happened and somebody should know.
        refused: how many messages were.
        again: how many pushes came twice.
    """

    exchange: Asynchronous
    server: int = 0
    checkpoint: Path | None = None
    save_every: int = 0
    silent_s: float = 60.0
    restored: bool = False
    events: list[str] = field(default_factory=list[str])
    refused: int = 0
    again: int = 0

    def __post_init__(self) -> None:
        self.shard = Shard(exchange=self.exchange)
        self.gate = Gate(exchange=self.exchange, silent_s=self.silent_s, lost=self._silent)
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        if self.checkpoint is not None:
            self.restored = restore(self.checkpoint, self.shard, self.gate, self.server)
        if self.restored:
            self.note(f"it goes on at its checkpoint, after {self.shard.clock} pushes")

    @property
    def askers(self) -> int:
        """How many may ask."""
        return self.exchange.workers

    def name(self, who: int) -> str:
        """How a number of an asker is said, see `name_of`."""
        return name_of(who)

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the parameters; None before they are known."""
        values = self.shard.values
        return None if values is None else sum(value.nbytes for value in values.values())

    def answer(self, ask: Ask, arrays: Flat, who: int) -> tuple[Answer, Outgoing]:
        """Answers a message."""
        try:
            self._require_worker(ask, who)
            if not ask.about:
                return self._answered(ask, arrays)
            return self._in_order(ask, arrays, read_order(ask.about))
        except (RefusedError, OrderError) as error:
            self.refused += 1
            step = f", step {ask.step}" if ask.kind == "push" else ""
            self.note(f"refused a {ask.kind} of {name_of(who)}{step}: {error}")
            return Answer(kind="refused", why=str(error), clock=self.shard.clock), {}

    def _require_worker(self, ask: Ask, who: int) -> None:
        if ask.worker != who or not STARTER <= who < self.exchange.workers:
            raise RefusedError(
                f"it speaks for {name_of(ask.worker)}; there are {self.exchange.workers} workers"
            )

    def _in_order(self, ask: Ask, arrays: Flat, order: Order) -> tuple[Answer, Outgoing]:
        """Answers a message whose elements are in buckets, or are to be."""
        if ask.kind == "push":
            finite = arrays.pop(WHOLE, None)
            if finite is not None and not finite.all():
                return self._answered(replace(ask, kind="skip"), {})
            return self._answered(ask, scattered(arrays, order))
        answer, values = self._answered(ask, arrays)
        return answer, gathered(values, order) if ask.kind == "fetch" else values

    def _answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Flat]:
        if ask.kind == "enter":
            return self._enter(ask), {}
        if ask.kind == "push":
            return self._push(ask, arrays), {}
        if ask.kind == "save":
            self.save()
            return Answer(clock=self.shard.clock), {}
        with self._changed:
            if ask.kind == "offer":
                self.shard.offer(arrays)
            elif ask.kind == "fetch":
                clock, values = self.shard.fetch()
                return Answer(clock=clock), values
            elif ask.kind == "skip":
                self.note(f"the gradient of worker {ask.worker}, step {ask.step}, is not finite")
            elif ask.kind == "leave":
                self.gate.leave(ask.worker)
                self._changed.notify_all()
            elif ask.kind == "report":
                return Answer(clock=self.shard.clock, report=self.report()), {}
            else:
                raise RefusedError("there is no such message")
        return Answer(clock=self.shard.clock), {}

    def _enter(self, ask: Ask) -> Answer:
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            why = self.gate.enter(ask.worker, ask.step, self.shard.clock)
            self._changed.notify_all()  # it may be whom others wait for
            while why:
                if not self._changed.wait(until - time.monotonic()):
                    return Answer(kind="wait", why=why, clock=self.shard.clock)
                why = self.gate.enter(ask.worker, ask.step, self.shard.clock)
            return Answer(clock=self.shard.clock)

    def _push(self, ask: Ask, arrays: Flat) -> Answer:
        pushed = Pushed(worker=ask.worker, start=ask.start, serial=ask.serial, seen=ask.seen)
        with self._changed:
            result = self.shard.push(pushed, arrays)
            self.again += result.again
            self._changed.notify_all()
        if self.save_every and not result.again and result.clock % self.save_every == 0:
            self.save()
        return Answer(clock=result.clock, staleness=result.staleness)

    def gone(self, who: int) -> None:
        """The connection of a worker has closed; it is not waited for."""
        with self._changed:
            if who in self.gate.offsets:
                self.note(f"worker {who} is gone at its step {self.gate.steps[who]}")
            self.gate.leave(who)
            self._changed.notify_all()

    def _silent(self, worker: int) -> None:
        self.note(f"worker {worker} has said nothing for {self.silent_s:g} s; nobody waits for it")

    def save(self) -> None:
        """Writes the checkpoint, where there are parameters and a place for it. Where it cannot be
        written, training goes on, and an event says so.
        """
        if self.checkpoint is None:
            return
        with self._saving:
            with self._changed:
                if self.shard.values is None:
                    return
                frozen = Shard(
                    exchange=self.exchange,
                    values=self.shard.values,
                    squares=self.shard.squares,
                    clock=self.shard.clock,
                    staleness=self.shard.staleness.copy(),
                    serials=dict(self.shard.serials),
                )
                places = Gate(
                    exchange=self.exchange,
                    offsets=dict(self.gate.offsets),
                    steps=dict(self.gate.steps),
                )
            try:
                write(self.checkpoint, packed(frozen, places, self.server))
            except OSError as error:
                self.note(f"the checkpoint after {frozen.clock} pushes is not written: {error}")

    def note(self, text: str) -> None:
        """Keeps an event."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(text)

    def report(self) -> JsonObject:
        """What the server has to tell, as plain data."""
        return {
            "clock": self.shard.clock,
            "staleness": [[s, count] for s, count in sorted(self.shard.staleness.items())],
            "refused": self.refused,
            "again": self.again,
            "events": list(self.events),
        }


def name_of(who: int) -> str:
    """How a number of an asker is said."""
    return "the starter" if who == STARTER else f"worker {who}"
