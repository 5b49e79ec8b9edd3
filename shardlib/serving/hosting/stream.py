"""Answers on their way: the engine's thread puts tokens in, a coroutine takes them out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.errors import ShardlibError
from shardlib.serving.scheduling.requests import Asked, Request, Told


class StreamError(ShardlibError, RuntimeError):
    """An answer that ends before it is whole.

    Attributes:
        dead: whether the engine has failed, and will answer nobody any more.
        refused: whether the request is at fault.
        message: why; `str(error)`.
    """

    def __init__(self, message: str, *, dead: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.dead, self.refused = dead, refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A request has one more token, or has ended.

    Attributes:
        index: of the request in its stream.
        token: the next one of the answer; None where it ended without one.
        told: of that token, by the model; None where there is none.
        scores: of the tokens of the prompt but the first, with the first token of the answer, where
            they were asked for.
        ended: why; None while it goes on.
        reused: tokens of the prompt that another request had computed.
        version: of the weights.
        at: when the step ended, as `time.perf_counter` has it.
    """

    index: int
    token: int | None
    told: Told | None
    scores: tuple[Told, ...]
    ended: str | None
    reused: int
    version: str
    at: float


class Stream:
    """Answers to some requests. What is heard of them waits here, at most so much; who reads more
    slowly than that is given up. All of it runs in the event loop, but for `requests`, which the
    engine's thread fills.

    Args:
        asked: what is asked, together.
        buffer: tokens that wait at most.

    Attributes:
        requests: as the engine has them; empty before it has seen them.
        begun: when it was made, as `time.perf_counter` has it.
        open: requests that have not ended.
        cancelled: whether nobody wants the answers any more.
    """

    def __init__(self, asked: Sequence[Asked], *, buffer: int) -> None:
        self.asked = tuple(asked)
        self.requests: list[Request] = []
        self.begun = time.perf_counter()
        self.open = len(self.asked)
        self.cancelled = False
        self._buffer = buffer
        self._heard: deque[Heard] = deque()
        self._news = asyncio.Event()
        self._error: StreamError | None = None

    def take(self, heard: Heard) -> None:
        """Something is new."""
        self.open -= heard.ended is not None
        if self.cancelled:
            return
        if len(self._heard) >= self._buffer:
            self.fail(
                StreamError(
                    f"{self._buffer} tokens wait, and nobody reads them: the answer is given up"
                )
            )
            return
        self._heard.append(heard)
        self._news.set()

    def fail(self, error: StreamError) -> None:
        """The answers end here; what waits can still be read."""
        self._error = self._error or error
        self.cancel()
        self._news.set()

    def cancel(self) -> None:
        """Nobody wants the answers: slots and pages come back before the next step."""
        self.cancelled = True
        for request in self.requests:
            request.cancelled = True

    def end(self, index: int) -> None:
        """Nobody wants more of one of the answers."""
        self.requests[index].cancelled = True

    async def next(self) -> Heard:
        """What is heard next."""
        while not self._heard:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._heard.popleft()
