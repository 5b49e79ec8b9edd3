"""How busy an engine is, and who wants to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardlib.errors import ShardlibError
from shardlib.serving.engine import Engine
from shardlib.serving.hosting.stream import Heard, Stream


class FullError(ShardlibError, RuntimeError):
    """As many requests are open as there are places.

    Attributes:
        seconds: after which one may be free.
        message: `str(error)`.
    """

    def __init__(self, message: str, *, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Watch(Protocol):
    """Who counts what happens; called in the event loop."""

    def heard(self, stream: Stream, heard: Heard) -> None:
        """Something is new on a stream."""
        ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is.

    Attributes:
        running: requests that have a slot.
        waiting: requests that wait for one.
        open: places that are taken; also by answers that are still being sent.
        slots: that there are.
        used: pages that requests use.
        pages: that there are.
        steps: that were computed.
        preempted: requests that lost their pages, ever.
    """

    running: int
    waiting: int
    open: int
    slots: int
    used: int
    pages: int
    steps: int
    preempted: int


def load_of(engine: Engine, taken: int, unseen: int) -> Load:
    """How busy an engine is; from another thread, as it was at some moment of its step."""
    schedule = engine.schedule
    return Load(
        running=len(schedule.running),
        waiting=len(schedule.waiting) + unseen,
        open=taken,
        slots=len(schedule.slots),
        used=schedule.pool.used,
        pages=schedule.pool.pages,
        steps=engine.steps,
        preempted=schedule.preempted,
    )
