"""Where do batches come from, and how far ahead are they made?

The loop asks whoever has the data for a stream that begins at a step: `opens(abstract batch, step)`. `shardlib.data.loader.Loader` is one, for data that every process reads
its own part of; `from_function` makes one of any function of the step, for data that are made or that fit into memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from shardlib.annotation.model import Tree


class Stream(Protocol):
    """Batches in the order of steps.

    Attributes:
        waited_seconds: how long `next` has waited, in all.
    """

    waited_seconds: float

    def __iter__(self) -> Iterator[tuple[int, Tree]]: ...

    def __next__(self) -> tuple[int, Tree]: ...

    def close(self) -> None:
        """Ends whatever works ahead."""
        ...


#: (abstract batch of the program, first step) -> batches from that step on.
Opens = Callable[[Tree, int], Stream]


def from_function(batch_of: Callable[[int], Tree], *, ahead: int = 2) -> Opens:
    """Streams of the batches that a function of the step makes; it must give the same batch whenever it is asked for a step.

    Args:
        batch_of: step, from 0 -> the whole global batch, host arrays.
        ahead: batches that a thread makes before they are asked for.
    """
    return lambda batch, start: _Ahead(batch_of, start, ahead)


class _Ahead:
    def __init__(self, batch_of: Callable[[int], Tree], start: int, ahead: int) -> None:
        self.waited_seconds = 0.0
        self._batch_of, self._ahead, self._next = batch_of, ahead, start
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="shardlib-batches")
        self._made: deque[tuple[int, Future[Any]]] = deque()

    def __iter__(self) -> Iterator[tuple[int, Tree]]:
        return self

    def __next__(self) -> tuple[int, Tree]:
        while len(self._made) <= self._ahead:
            self._made.append((self._next, self._worker.submit(self._batch_of, self._next)))
            self._next += 1
        step, made = self._made.popleft()
        begin = time.perf_counter()
        batch = made.result()
        self.waited_seconds += time.perf_counter() - begin
        return step, batch

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
