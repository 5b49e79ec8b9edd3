"""Python's collection of garbage in cycles, put off while a plan is searched for.

Tracing and searching make many small objects that live until the end, and hardly any cycles. Each
full collection walks all of them, and all that JAX has made before: it took a fifth of the time to
plan. The threshold is a number of objects, so memory stays bounded.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

#: Thresholds of the three generations (`gc.set_threshold`), at least: new objects, and collections
#: of the generation before.
THRESHOLDS: tuple[int, int, int] = (100_000, 20, 100)


class _Users:
    """How many threads have put collection off, and the thresholds from before the first."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        self.before = THRESHOLDS


_users = _Users()


@contextmanager
def put_off() -> Generator[None]:
    """Raises the thresholds of Python's collector while it is entered, for all threads; whoever
    leaves last restores them. A collector that is switched off stays so.
    """
    with _users.lock:
        if not _users.count:
            _users.before = gc.get_threshold()
            if _users.before[0]:
                gc.set_threshold(*map(max, _users.before, THRESHOLDS))
        _users.count += 1
    try:
        yield
    finally:
        with _users.lock:
            _users.count -= 1
            if not _users.count:
                gc.set_threshold(*_users.before)
