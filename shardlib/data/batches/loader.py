"""Batches on the devices of this process before the step asks for them.

A process reads the rows that its devices hold and no others, and global arrays are made of the
parts that processes have (`jax.make_array_from_callback`), so that no process ever sees a whole
batch. Threads of a Grain pipeline read and place the next batches while the devices work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardlib.data.batches.examples import FIELDS
from shardlib.data.reading.threads import Ahead
from shardlib.errors import BatchError, raise_all

_ENDLESS = 2**62
#: Batches by name: abstract arrays with shardings, as `Program.batch` has them.
Batch = Mapping[str, Any]


class Rows(Protocol):
    """What a loader reads: `TokenDataset`, or anything else with these."""

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def seq(self) -> int: ...

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> Mapping[str, np.ndarray]: ...


class Loader:
    """An iterator over (step, batch), each array of a batch spread as a step expects it.

    A loader that begins at step s gives what one that began at 0 gives from s on, whatever the
    number of processes was before. Where the batch grows with training, `batch` is a function of
    the step, and the position goes on from where it was: no example is left out or comes twice.

    Attributes:
        waited_seconds: seconds that `next` has waited, all together.
        position: examples of all batches that `next` has given, and before.
    """

    def __init__(
        self,
        dataset: Rows,
        batch: Batch | Callable[[int], Batch],
        *,
        start: int = 0,
        stop: int | None = None,
        position: int | None = None,
        ahead: int = 2,
    ) -> None:
        """Begins to read.

        Args:
            batch: abstract arrays [batch, seq] with shardings, by name, such as `program.batch`; or
                a function from the step to those.
            stop: step after the last; None for no end.
            position: examples of the steps before `start`; by default the sum of their batches.
        """
        if start < 0 or ahead < 1 or (stop is not None and stop < start):
            raise BatchError(
                f"a loader from step {start} to {stop} that reads {ahead} batches ahead is not"
                " possible\nTry: start of at least 0, stop after it, ahead of at least 1"
            )
        self.waited_seconds = 0.0
        self._dataset, self._failure, self._closed = dataset, cast("Exception | None", None), False
        self._schedule = _Schedule(dataset, batch, start, position)
        self.position = self._schedule.at(start)[1]
        self._batches = Ahead(
            self._load, range(start, _ENDLESS if stop is None else stop), threads=ahead, ahead=ahead
        )

    def __iter__(self) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        return self

    def __next__(self) -> tuple[int, dict[str, jax.Array]]:
        """The next step and its batch."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise StopIteration
        begin = time.perf_counter()
        try:
            step, arrays, position = next(self._batches)
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            self._failure = error
            self.close()
            raise
        finally:
            self.waited_seconds += time.perf_counter() - begin
        self.position = position
        return step, arrays

    def close(self) -> None:
        """Stops to read; a second time does nothing."""
        self._closed = True
        self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, step: int) -> tuple[int, dict[str, jax.Array], int]:
        batch, position = self._schedule.at(step)
        return (
            step,
            jax.block_until_ready(placed(self._dataset, position, batch)),
            position + batch_size(batch),
        )


def placed(dataset: Rows, position: int, batch: Batch) -> dict[str, jax.Array]:
    """The batch from `position` on as global arrays; rows that devices of this process hold are
    read, once for all of them.

    Args:
        batch: abstract arrays [batch, seq] with shardings, by name.
    """
    local = np.unique(
        np.concatenate([local_rows(leaf.sharding, leaf.shape) for leaf in batch.values()])
    )
    host = dataset.rows(position, local)

    def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, last, _ = index[0].indices(leaf.shape[0])
            begin = int(np.searchsorted(local, first))
            return np.ascontiguousarray(host[name][begin : begin + last - first, *index[1:]])

        return jax.make_array_from_callback(
            leaf.shape, cast(Sharding, leaf.sharding), part, dtype=leaf.dtype
        )

    return {name: array(name, leaf) for name, leaf in batch.items()}


def local_rows(sharding: Sharding, shape: Sequence[int]) -> np.ndarray:
    """Rows of an array of which devices of this process hold a part, int64, in order."""
    parts = {
        index[0].indices(shape[0])[:2]
        for index in sharding.addressable_devices_indices_map(tuple(shape)).values()
        if index is not None
    }
    return (
        np.unique(np.concatenate([np.arange(*part) for part in parts]))
        if parts
        else np.zeros(0, np.int64)
    )


def batch_size(batch: Batch) -> int:
    """Examples of a batch."""
    return int(next(iter(batch.values())).shape[0])


class _Schedule:
    """Which batch, and how many examples before it, a step has."""

    def __init__(
        self, dataset: Rows, batch: Batch | Callable[[int], Batch], start: int, position: int | None
    ) -> None:
        self._dataset, self._start, self._lock = dataset, start, threading.Lock()
        self._batch = batch if callable(batch) else None
        self._same = None if callable(batch) else self._checked(batch)
        if position is None:
            position = (
                sum(batch_size(batch(step)) for step in range(start))
                if callable(batch)
                else start * batch_size(batch)
            )
        if position < 0:
            raise BatchError(
                f"position is {position}; it is the number of examples before the first step\nTry:"
                " at least 0"
            )
        self._positions = [position]

    def at(self, step: int) -> tuple[Batch, int]:
        """The batch of a step, and its position."""
        if self._same is not None:
            return self._same, self._positions[0] + (step - self._start) * batch_size(self._same)
        assert self._batch is not None
        with self._lock:
            while len(self._positions) <= step - self._start:
                before = self._start + len(self._positions) - 1
                self._positions.append(self._positions[-1] + batch_size(self._batch(before)))
            return self._checked(self._batch(step)), self._positions[step - self._start]

    def _checked(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping) or not batch:
            raise BatchError(
                f"batches of a loader are arrays by name, and {type(batch).__name__} was"
                " given\nTry: program.batch of a program whose batch is a dict"
            )
        failures = [
            f"{name}: {fault}"
            for name, leaf in batch.items()
            if (fault := _fault(self._dataset, name, leaf))
        ]
        if len({leaf.shape[:1] for leaf in batch.values()}) > 1:
            failures.append("arrays differ in their first dim")
        if failures:
            expected = ", ".join(
                f"{name} ({FIELDS[name]})" if name in FIELDS else name
                for name in self._dataset.fields
            )
            raise_all(
                BatchError,
                "the data do not give the batch that the program was compiled for",
                failures,
                hint=f"arrays [batch, {self._dataset.seq}] of {expected}",
            )
        return batch


def _fault(dataset: Rows, name: str, leaf: Any) -> str:
    if name not in dataset.fields:
        return "the data have no such array"
    if len(leaf.shape) != 2 or leaf.shape[1] != dataset.seq:
        return f"its shape is {list(leaf.shape)}, and examples have {dataset.seq} tokens"
    if name in FIELDS and leaf.dtype != FIELDS[name]:
        return f"its dtype is {leaf.dtype}, not {FIELDS[name]}"
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (
        isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, jax.sharding.Mesh)
    ):
        return "it has no sharding over devices that are here"
    return ""
