"""What an island says to the outer server, in a thread beside its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import LaunchError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.parts import BUCKET_BYTES, Part
from shardlib.servers.islands.coming import Coming, InBuckets, mean_order
from shardlib.servers.islands.met import Crossed, Met
from shardlib.servers.ordering import order_text
from shardlib.servers.ownership import Flat
from shardlib.servers.rounds.holding import about
from shardlib.servers.rounds.outer import Outer, checksum
from shardlib.servers.rounds.outline import Outline
from shardlib.servers.rounds.packing import pack, unpack
from shardlib.servers.wire.messages import Answer, Arrivals, Ask, Link

#: Gives the runs of a fragment on the host, float32, one for each parameter in it.
Runs = Callable[[], Sequence[np.ndarray]]


@dataclass(kw_only=True)
class Exchanging:
    """An island between its steps and the outer server.

    Attributes:
        link: to the server.
        number: of the island.
        exchange: how islands meet.
        outline: of the parameters.
        weight: of this island in the mean.
        uses: elements of parameters in the order in which the loss uses them.
        bucket_bytes: of the mean that cross together.
        round: the next one of this island.
        entry: a word of the server for this island, which is named with what is sent.
    """

    link: Link
    number: int
    exchange: DiLoCo
    outline: Outline
    weight: float
    uses: tuple[Part, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    round: int = 0
    entry: str = ""
    _outer: Outer | None = None
    _last: tuple[int, Flat] = field(default_factory=lambda: (0, Flat()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def outer(self) -> Outer:
        """What is outer, as this island has it."""
        assert self._outer is not None, "entered"
        return self._outer

    @property
    def fragment(self) -> int:
        """That the next round is about."""
        return (self.round - 1) % self.exchange.fragments

    def span(self) -> tuple[int, int]:
        """Where that fragment begins and ends."""
        return self.outline.span(self.fragment, self.exchange.fragments)

    def enter(self, first: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Waits for a round to begin, and takes its outer parameters."""
        description, self.entry = about(self.exchange, self.outline), ""
        while True:
            ask = Ask(kind="enter", worker=self.number, about=description, start=self.entry)
            answer, arrays = self._ask(ask)
            self.entry = answer.start
            if answer.kind == "ok":
                break
            if answer.kind == "empty":
                offered = {path: np.asarray(array, np.float32) for path, array in first().items()}
                self._ask(Ask(kind="offer", worker=self.number, about=description), offered)
        self.round = answer.round
        # Writable copies: arrays of a frame belong to its body.
        theta, momentum = np.array(arrays["theta"]), np.array(arrays["momentum"])
        self._outer = Outer(theta=theta, momentum=momentum)

    def send(self, runs: Runs) -> Crossed:
        """Meets in a thread: sends the outer gradient of the next round, and does its update.

        Returns:
            The meeting; None where the round was closed without this island.
        """
        parts = self.outline.parts(self.fragment, self.exchange.fragments)
        order = mean_order(self.uses, parts, self.exchange.wire, self.bucket_bytes)
        coming = Coming(self.outer, self.span()[0], parts, self.exchange, order)
        return InBuckets(met=self._threads.submit(self._meet_in, coming, runs), coming=coming)

    def leave(self) -> None:
        """Says that the island is done, and ends the connection."""
        try:
            self.link.ask(Ask(kind="leave", worker=self.number))
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.link.close()

    def _meet_in(self, coming: Coming, runs: Runs) -> Met | None:
        try:
            return self._meet(coming, runs)
        finally:  # who waits for what has not come waits no longer
            coming.landing.fail(LaunchError("the meeting is done"))

    def _meet(self, coming: Coming, runs: Runs) -> Met | None:
        start, stop = self.span()
        parameters = runs()  # waits for the step
        began = time.monotonic()
        flat = np.concatenate(
            [np.zeros(0, np.float32), *(array.reshape(-1) for array in parameters)]
        )
        gradient = self.outer.theta[start:stop] - flat
        parts = self.outline.parts(self.fragment, self.exchange.fragments)
        sizes, finite = (
            [part.stop - part.start for part in parts],
            bool(np.isfinite(gradient).all()),
        )
        sent = pack(gradient, sizes, self.exchange.wire) if finite else Flat()
        base = checksum(self.outer.theta, start, stop)
        answer, arrays = self._mean("send" if finite else "skip", base, sent, coming)
        if answer.kind == "late":
            return None
        if coming.order:
            arrays = coming.done() if coming.complete else Flat()
        elif arrays:
            mean = unpack(arrays, sizes, self.exchange.wire)
            self.outer.update(start, stop, mean, self.exchange)
        self._last = base, arrays
        met = Met(
            round=self.round,
            fragment=self.fragment,
            islands=answer.islands,
            seconds=time.monotonic() - began,
            finite=finite,
        )
        self.round += 1
        return met

    def _mean(self, kind: str, base: int, sent: Flat, coming: Coming) -> tuple[Answer, Flat]:
        """Sends, and waits until the round is closed."""
        message_kind, arrivals = kind, coming if coming.order else None
        order = order_text(coming.order) if coming.order else ""
        while True:
            ask = Ask(
                kind=message_kind,
                worker=self.number,
                start=self.entry,
                round=self.round,
                weight=self.weight,
                base=base,
                about=order,
            )
            answer, arrays = self._ask(ask, sent if message_kind == "send" else None, arrivals)
            if answer.kind in ("ok", "late"):
                return answer, arrays
            if answer.kind == "behind":
                answer = self._repeat()
                if answer.kind == "late":
                    return answer, Flat()
            message_kind = "collect" if answer.kind == "wait" else kind

    def _repeat(self) -> Answer:
        """Tells a server that was started again of the round before."""
        base, arrays = self._last
        ask = Ask(
            kind="repeat", worker=self.number, start=self.entry, round=self.round - 1, base=base
        )
        return self._ask(ask, arrays)[0]

    def _ask(
        self, ask: Ask, arrays: Flat | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        answer, received = self.link.ask(ask, arrays, arrivals)
        if answer.kind in ("refused", "failed"):
            verb = "refuses" if answer.kind == "refused" else "ends"
            raise LaunchError(f"the outer server {verb} island {self.number}: {answer.why}")
        return answer, received
