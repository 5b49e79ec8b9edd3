"""A thread that steps an engine, for the event loop that asks it.

    worker = Worker(engine, waiting=64)
    worker.start(asyncio.get_running_loop())
    with worker.places(1):
        stream = worker.submit([Asked(prompt=(5, 2, 7))])
        heard = await stream.next()

Only the thread touches the engine. Every step's tokens go to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from shardlib.annotation.model import Tree
from shardlib.errors import ShardlibError
from shardlib.serving.engine import Engine, Event
from shardlib.serving.hosting.load import FullError, Load, Watch, load_of
from shardlib.serving.hosting.stream import Heard, Stream, StreamError
from shardlib.serving.scheduling.requests import Asked, Request

#: Seconds of a step after which the engine counts as hung.
HUNG_SECONDS = 60.0
#: How much of the mean of seconds a request takes is that of the newest one.
NEWEST = 0.1
#: Seconds that a client is told to wait at most.
LONGEST_WAIT = 60

Result = TypeVar("Result")


@dataclass(kw_only=True)
class _Open:
    """A request that has not ended: the `index`-th of its stream, with so many events heard."""

    stream: Stream
    index: int
    heard: int = 0


class Worker:
    """Steps an engine in a thread of its own.

    Args:
        engine: whose; nobody else may use it from now on.
        waiting: requests that wait for a slot at most.
        buffer: tokens that an answer may be ahead of who reads it.
        version: of the weights, in words.
        watch: who counts; nobody by default.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        waiting: int = 64,
        buffer: int = 1024,
        version: str = "",
        watch: Watch | None = None,
    ) -> None:
        self.engine, self.version, self.watch = engine, version, watch
        self.slots = len(engine.schedule.slots)
        self.capacity = self.slots + waiting
        self.taken = 0
        self.error = ""
        self._buffer = buffer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[Request, _Open] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy_since: float | None = None
        self._mean_seconds = 1.0
        self._fresh = ""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is at; answers that are open end with an error."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def trouble(self) -> str:
        """What is wrong; empty where all is well."""
        since = self._busy_since
        if not self.error and since is not None and time.monotonic() - since > HUNG_SECONDS:
            return f"a step has taken more than {HUNG_SECONDS:g} seconds"
        return self.error

    @property
    def load(self) -> Load:
        """How busy the engine is."""
        return load_of(self.engine, self.taken, self._inbox.qsize())

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Takes places for so many requests until the end of the block; in the event loop."""
        if self.error:
            raise StreamError(f"the engine has failed: {self.error}", dead=True)
        if self.taken + count > self.capacity:
            rounds = self.taken / self.slots
            seconds = min(LONGEST_WAIT, max(1, math.ceil(rounds * self._mean_seconds)))
            raise FullError(
                f"{self.taken} of {self.capacity} places are taken, and {count} were asked for",
                seconds=seconds,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def submit(self, asked: Sequence[Asked]) -> Stream:
        """Asks; in the event loop."""
        stream = Stream(asked, buffer=self._buffer)
        self._put(lambda: self._add(stream))
        return stream

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Calls a function in the thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(run)
        return future

    def replace(self, weights: Tree, version: str) -> None:
        """Serves with other weights, as `Engine.replace` does; in the thread, see `call`."""
        self.engine.replace(weights)
        self._fresh = version

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self.error:
                raise StreamError(f"the engine has failed: {self.error}", dead=True)
            self._inbox.put(job)

    def _add(self, stream: Stream) -> None:
        try:
            for index, query in enumerate(stream.asked):
                request = self.engine.add(query)
                stream.requests.append(request)
                self._open[request] = _Open(stream=stream, index=index)
        except ShardlibError as error:
            refusal = StreamError(str(error), refused=True)
            self._post(lambda: stream.fail(refusal))
            stream.cancelled = True
        if stream.cancelled:  # also those of which nobody knew when that was said
            stream.cancel()

    def _run(self) -> None:
        try:
            while self._take_in():
                self._busy_since = time.monotonic()
                self._tell(self.engine.step())
                self._busy_since = None
            self._end("the server has stopped")
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")

    def _take_in(self) -> bool:
        """Does what has come in, and waits for it where there is nothing else to do; whether to go
        on.
        """
        schedule = self.engine.schedule
        idle = not (schedule.running or schedule.waiting or self.engine.replacing)
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None
            idle = False

    def _tell(self, events: Sequence[Event]) -> None:
        if self._fresh and not self.engine.replacing:
            self.version, self._fresh = self._fresh, ""
        if not events:
            return
        now = time.perf_counter()
        last = {event.request: position for position, event in enumerate(events)}
        messages: list[tuple[Stream, Heard]] = []
        for position, event in enumerate(events):
            open_one = self._open[event.request]
            messages.append((open_one.stream, self._heard(event, open_one, now)))
            open_one.heard += 1
            if last[event.request] == position and event.request.ended is not None:
                del self._open[event.request]
                self._mean_seconds += NEWEST * (now - open_one.stream.begun - self._mean_seconds)
            elif event.request.ended is not None:  # more of its tokens follow
                messages[-1] = messages[-1][0], replace(messages[-1][1], ended=None)
        self._post(lambda: self._hand_out(messages))

    def _heard(self, event: Event, entry: _Open, now: float) -> Heard:
        request = event.request
        return Heard(
            index=entry.index,
            token=event.token,
            told=None if event.token is None else request.told[entry.heard],
            scores=() if entry.heard else tuple(request.scores),
            ended=request.ended,
            reused=request.reused,
            version=self.version,
            at=now,
        )

    def _hand_out(self, messages: Sequence[tuple[Stream, Heard]]) -> None:
        for stream, heard in messages:
            if self.watch is not None:
                self.watch.heard(stream, heard)
            stream.take(heard)

    def _end(self, why: str) -> None:
        """Nobody is answered any more."""
        with self._lock:
            self.error = why
        self._busy_since = None
        failure = StreamError(f"the engine has failed: {why}", dead=True)
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                with contextlib.suppress(Exception):
                    job()  # streams are among the open ones then, and functions have an answer
        streams = {entry.stream for entry in self._open.values()}
        self._post(lambda: [stream.fail(failure) for stream in streams])

    def _post(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(call)
