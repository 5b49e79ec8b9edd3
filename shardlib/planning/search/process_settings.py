"""Settings of the process that are others while a plan is searched for.

Garbage: tracing and searching make many small objects that live until the end, and hardly any
cycles. Each full collection walks all of them, and all that JAX has made before: it took a fifth of
the time to plan. The threshold is a number of objects, so memory stays bounded.

Threads of BLAS: the matrix products of a search are small. More threads took up to twice the
processor time for the same, and longer where other work ran on the machine.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import threadpoolctl  # pyright: ignore[reportMissingTypeStubs]

#: Thresholds of the three generations (`gc.set_threshold`), at least: new objects, and collections
#: of the generation before.
THRESHOLDS: tuple[int, int, int] = (100_000, 20, 100)


class ForAllThreads:
    """A setting of the process: the first thread to enter changes it, the last to leave restores
    it.

    Args:
        change: changes the setting, and gives what restores it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._lock, self._inside = change, threading.Lock(), 0
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self) -> Generator[None]:
        """A context, or with the brackets a decorator."""
        with self._lock:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore()


def _raise_thresholds() -> Callable[[], None]:
    """A collector that is switched off by its thresholds stays so."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, THRESHOLDS))
    return lambda: gc.set_threshold(*before)


@cache
def _controller() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()  # looks through the libraries of the process


def _limit_threads() -> Callable[[], None]:
    own = _controller().limit(limits=1, user_api="blas")  # pyright: ignore[reportUnknownMemberType]
    return own.restore_original_limits


#: Garbage in cycles is hardly collected.
garbage_put_off = ForAllThreads(_raise_thresholds)
#: Matrix products of NumPy run on the thread that asks for them.
one_thread = ForAllThreads(_limit_threads)
