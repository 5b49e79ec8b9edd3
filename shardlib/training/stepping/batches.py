"""Streams of batches: where they come from, and how far ahead they are made.

The loop asks whoever has the data for a stream that begins at a step. For a dataset that is
`shardlib.data.batches.loader.Loader`, with which every process reads its own part; for a function
of the step, for data that are made or that fit into memory, a thread that calls it ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from shardlib.annotation.trees.paths import Tree
from shardlib.data.batches.loader import Loader, Rows


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


#: (abstract batch of the program, or a function from the step to that, first step) -> batches from
#: that step on.
Opens = Callable[[Any, int], Stream]


#: step, from 0 -> the whole global batch, host arrays.
BatchOf = Callable[[int], Tree]


def opened(data: Rows | BatchOf, *, ahead: int = 2) -> Opens:
    """What opens streams of some data."""
    if callable(data):
        return lambda batch, start: _Ahead(data, start, ahead)
    return lambda batch, start: Loader(data, batch, start=start, ahead=ahead)


class _Ahead:
    def __init__(self, batch_of: BatchOf, start: int, ahead: int) -> None:
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
