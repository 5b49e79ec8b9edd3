"""Signals by which somebody wants the run to stop.

A scheduler that preempts a job sends SIGTERM (Slurm also SIGUSR1, where the job asks for it) some
seconds before it kills; a person presses Ctrl-C; a terminal that closes, or a connection that
breaks, sends SIGHUP, unless the command was started with `nohup`. The first of them lets the step
that runs end, so that the loop can save; a second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardlib.errors import StoppedError

#: Signals that ask for an orderly end; those that a platform lacks are left out.
STOPPING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)


class StopRequest:
    """Whether somebody wants the run to stop, and who.

    Attributes:
        reason: name of the signal, "SIGTERM"; empty as long as nobody does.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """Asks for a stop; the first reason stays."""
        self.reason = self.reason or reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.reason == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)


def _unheard(number: signal.Signals) -> bool:
    """Whether somebody wants a signal not to end this process: `nohup` has SIGHUP ignored."""
    return number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listens for signals until the end of the block, where this is the main thread; elsewhere
    nobody can ask but by `ask`. What came inside of `ends_at_once` and was not obeyed is asked
    again.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with _heard_by(request._on_signal, STOPPING) as before:
        for handler in before:
            if isinstance(handler, _AtOnce) and handler.reason:
                request.ask(handler.reason)
        yield request


@dataclass
class _AtOnce:
    """Ends the process where a signal finds it. An exception that is raised in a callback of a
    library is printed and forgotten there; hence the note.

    Attributes:
        reason: name of the first signal that came; empty before.
    """

    reason: str = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedError(
            f"{signal.Signals(number).name} came outside of the training loop; the run is as its"
            " newest checkpoint has it\nTry: the same command again"
        )


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Where a run plans and compiles, and has nothing to save yet, a request to stop ends it in
    order; inside, `stop_requests` takes over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _heard_by(_AtOnce(), STOPPING):
        yield


@contextlib.contextmanager
def _heard_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[list[Any]]:
    """Installs a handler until the end of the block, and gives those that it takes the place of."""
    before = {number: signal.signal(number, handler) for number in numbers if not _unheard(number)}
    try:
        yield list(before.values())
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
