"""Examples in a reproducible order, packed into rows, as batches on devices."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import time
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardlib.data.sources import Ahead
from shardlib.data.tokens import Documents
from shardlib.errors import BatchError, DataError, raise_all
from shardlib.findings import Finding
from shardlib.untrusted.data import WRONG

if TYPE_CHECKING:
    import grain

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []


#: What reading a damaged file raises, by NumPy, its parser of headers, `zipfile` and `zlib`.
DAMAGED = (
    *WRONG,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def kept(path: Path, compute: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """The arrays of a file, or else computed and written there; where that is not possible they are
    just computed.
    """
    with (
        contextlib.suppress(*DAMAGED),
        open(path, "rb") as stream,
        np.load(stream, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}
    arrays, temporary = compute(), path.with_name(f".{path.stem}.{os.getpid()}.part.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            np.savez(stream, **cast(Any, arrays))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return arrays


# --------------------------------------------------------------------------------------------------
# The order in which examples and documents come: permutations that depend on the seed and the
# epoch alone.
#
# Grain's own shuffle of indices (0.2.18) is not used: of 65,537 numbers, and of every other 4**k +
# 1 from there on, it gives one twice and one never; it knows no numbers beyond 32 bits; and its
# seed + epoch makes epoch 1 of seed 0 the same as epoch 0 of seed 1.

#: Orders of at most so many numbers are written down.
WRITTEN = 1 << 16
_ROUNDS = 6
#: SplitMix64: the step of its counter, and shifts and factors of its hash.
_STEP, _MIX, _LAST = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def shuffled_indices(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns where some positions of an epoch lead, in a permutation of `count` numbers: int64, of
    the same shape.

    That of many numbers is never written down: a Feistel network permutes the next power of four,
    and is walked until it is back in range (Black and Rogaway, "Ciphers with arbitrary finite
    domains").
    """
    if count <= WRITTEN:
        return _written(count, seed, epoch)[indices]
    half = np.uint64((count - 1).bit_length() + 1 >> 1)
    permuted = np.asarray(indices).astype(np.uint64)
    walking = np.ones(permuted.shape, bool)
    while walking.any():
        permuted[walking] = _permuted(permuted[walking], half, _keys(seed, epoch))
        walking = permuted >= count
    return permuted.astype(np.int64)


def _permuted(words: np.ndarray, half: np.uint64, keys: tuple[int, ...]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = words >> half, words & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right * np.uint64(_STEP) + np.uint64(key)) & mask)
    return left << half | right


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `count` numbers as an array, int64 [count]: they are sorted by a hash of
    them, which does not change with versions of NumPy.
    """
    return np.argsort(
        _mixed(
            np.arange(count, dtype=np.uint64) * np.uint64(_STEP)
            + np.uint64(_begin(f"{seed} {epoch}"))
        ),
        kind="stable",
    )


@functools.lru_cache(maxsize=16)
def _written(count: int, seed: int, epoch: int) -> np.ndarray:
    return shuffled(count, seed, epoch)


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(_begin(f"{seed} {epoch} {number}") for number in range(_ROUNDS))


def _begin(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's hash of words, uint64."""
    for shift, factor in _MIX:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(_LAST))


# --------------------------------------------------------------------------------------------------
# The tokens that make up example number p: kinds of packing, each with random access.
#
# `Windows` cuts the endless concatenation of all documents, which are shuffled anew in every
# epoch, into stretches of equal length, as Megatron-LM's index of samples does (arXiv:1909.08053).
# `Bins`, in the module beside, fills rows with whole documents.

#: Dtypes of what an example has beside inputs and targets.
FIELDS: Mapping[str, np.dtype] = {
    "inputs": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
}


class Examples(Protocol):
    """Examples by number, as many as are asked for: every epoch has the same ones in an order of
    its own.

    Attributes:
        count: examples of an epoch.
        fields: arrays of an example, names of `FIELDS`.
    """

    @property
    def count(self) -> int: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """The examples that come at some positions, int64 [positions]."""
        ...

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """Writes an example into arrays [seq], which are zero before."""
        ...


def by_epoch(positions: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs of positions, and where they lead in their epoch's order of `count` examples, int64
    [positions] each.
    """
    epochs, indices = np.divmod(positions, count)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        indices[in_epoch] = shuffled_indices(indices[in_epoch], count, seed, epoch)
    return epochs, indices


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    """Documents in the order of an epoch, int64 [documents], and where each ends in their
    concatenation, int64 [documents].
    """

    order: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of `seq` tokens over the concatenation of documents, epoch after epoch.

    An epoch's documents need not be a whole number of windows: a window that begins in one epoch
    may end in the next, so that every token of every epoch is an input once, and none is left out.
    Windows are shuffled among the `count` that come after each other.

    Attributes:
        documents: see `Documents`.
        seq: tokens.
        seed: of both orders.
        segments: whether examples have "segments", the number of the document in its window, from
            1; "positions" of tokens in their document, as far as the window has it; and "weights",
            0 where the target is of another document.
    """

    documents: Documents
    seq: int
    seed: int
    segments: bool = False
    _epochs: dict[int, _Epoch] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def count(self) -> int:
        """See `Examples`."""
        return self.documents.tokens // self.seq

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Examples`."""
        return tuple(FIELDS) if self.segments else ("inputs", "targets")

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """See `Examples`: windows counted from the beginning of training."""
        epochs, indices = by_epoch(positions, self.count, self.seed)
        return epochs * self.count + indices

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """See `Examples`."""
        tokens, lengths = self._stretch(number * self.seq, self.seq + 1)
        row["inputs"][:], row["targets"][:] = tokens[:-1], tokens[1:]
        if self.segments:
            numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            row["segments"][:], row["positions"][:] = (
                numbers[:-1],
                np.concatenate([np.arange(length) for length in lengths])[:-1],
            )
            row["weights"][:] = numbers[1:] == numbers[:-1]

    def _stretch(self, start: int, count: int) -> tuple[np.ndarray, list[int]]:
        """Tokens of the endless concatenation, int32 [count], and how many each document there
        gives.
        """
        tokens, lengths, done = np.empty(count, np.int32), list[int](), 0
        epoch, offset = divmod(start, self.documents.tokens)
        while done < count:
            now = self._epoch(epoch)
            index = int(np.searchsorted(now.ends, offset, side="right"))
            while done < count and index < len(now.order):
                document, end = int(now.order[index]), int(now.ends[index])
                length = int(self.documents.lengths[document])
                begin, taken = length - (end - offset), min(end - offset, count - done)
                tokens[done : done + taken] = self.documents.read(document, begin, begin + taken)
                lengths.append(taken)
                done, offset, index = done + taken, end, index + 1
            epoch, offset = epoch + 1, 0
        return tokens, lengths

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            if epoch not in self._epochs:
                order = shuffled(len(self.documents.starts), self.seed, epoch)
                while len(self._epochs) > 3:
                    self._epochs.pop(min(self._epochs))
                self._epochs[epoch] = _Epoch(
                    order=order, ends=np.cumsum(self.documents.lengths[order])
                )
            return self._epochs[epoch]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDataset:
    """Examples of a language model, endlessly many, every epoch in an order of its own.

    Nothing here is a state: an example is a function of documents, tokenizer, packing, seed and
    position, and so is a batch.

    Attributes:
        name: for people.
        examples: see `Examples`.
        seq: tokens of an example.
        about: what decides which examples there are, beside their numbers.
        findings: what was noticed when the data was opened.
    """

    name: str
    examples: Examples
    seq: int
    about: str
    findings: tuple[Finding, ...] = ()

    @property
    def examples_per_epoch(self) -> int:
        """Examples after which the next epoch begins."""
        return self.examples.count

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays of a batch."""
        return self.examples.fields

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any example, or with their order; a run that
        goes on compares it with the one that it began with.

        Large files of tokens, which are read where they are, count with their size and with
        stretches all over them.
        """
        return hashlib.sha256(f"{self.about} {self.seq}".encode()).hexdigest()[:16]

    def batch(self, position: int, size: int) -> dict[str, np.ndarray]:
        """Examples `position` to `position + size`, exclusive: arrays [size, seq], int32 but for
        "weights", which are float32.
        """
        return self.rows(position, range(size))

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Some rows of the batch that begins at `position`: arrays [len(rows), seq]; nothing else
        is read.
        """
        if position < 0 or (len(rows) and min(rows) < 0):
            raise DataError(
                f"there are no examples before the first one, and position {position} was asked"
                " for\nTry: a position of at least 0"
            )
        arrays = {name: np.zeros((len(rows), self.seq), FIELDS[name]) for name in self.fields}
        for row, number in enumerate(
            self.examples.numbers(position + np.asarray(rows, np.int64)).tolist()
        ):
            self.examples.fill(number, {name: array[row] for name, array in arrays.items()})
        return arrays

    def grain(self) -> grain.MapDataset[dict[str, np.ndarray]]:
        """One epoch after the other as a Grain pipeline, for those who go on with one: element p is
        example p, arrays [seq].

        It is in the order of training already; slices of it are what processes read, and a `.batch`
        behind those makes other batches than `batch` does.
        """
        import grain

        return grain.MapDataset.range(2**62).map(
            lambda position: {name: array[0] for name, array in self.batch(position, 1).items()}
        )


# --------------------------------------------------------------------------------------------------
# Batches on the devices of this process before the step asks for them.
#
# A process reads the rows that its devices hold and no others, and global arrays are made of the
# parts that processes have (`jax.make_array_from_callback`), so that no process ever sees a whole
# batch. Threads of a Grain pipeline read and place the next batches while the devices work.

_ENDLESS = 2**62
#: Batches by name: abstract arrays with shardings, as `Program.batch` has them.
Batch = Mapping[str, Any]


class Rows(Protocol):
    """Examples that a loader reads: `TokenDataset`, or anything else with these."""

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
    """The batch of a step, and the number of examples before it."""

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


# --------------------------------------------------------------------------------------------------
# Packing of whole documents into rows.
#
# Documents with more tokens than a row are cut first. "first-fit" puts each piece, in a shuffled
# order, into the first row that has room; "best-fit" begins with the longest and takes the row
# with the least room that suffices, which cuts and pads little (arXiv:2404.10830). A piece of m +
# 1 tokens has m inputs and as many targets, so that each pair of neighbours in a document is
# learned once an epoch, and none across documents.

#: The epoch whose shuffle is the order in which "first-fit" takes pieces; examples are shuffled by
#: those from 0 on.
_ORDER = -1
#: Rows of fewer documents are not kept: they are filled as quickly as they are read.
KEPT = 50_000


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of every piece, int64 [pieces]; pieces come in the order of the array.

    A tree over rows, each node with the most room below it, finds the first row in logarithmic
    time.
    """
    leaves = 1 << max(len(lengths) - 1, 1).bit_length()
    free, rows = [capacity] * (2 * leaves), np.empty(len(lengths), np.int64)
    for number, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += free[node] < length
        rows[number] = node - leaves
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of every piece, int64 [pieces]; the longest come first, of equal ones those that are
    first in the array.
    """
    rows, count = np.empty(len(lengths), np.int64), 0
    by_room, there = (
        [list[int]() for _ in range(capacity + 1)],
        0,
    )  # bit r of `there`: some row has room for r
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = there >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = by_room[left].pop()
            if not by_room[left]:
                there &= ~(1 << left)
        else:
            left, row, count = capacity, count, count + 1
        rows[number] = row
        if left > length:
            by_room[left - length].append(row)
            there |= 1 << (left - length)
    return rows


#: Kinds of packing that fill rows with documents.
PACKERS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "first-fit": first_fit,
    "best-fit": best_fit,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """Rows of `seq` inputs filled with documents and padded with zeros: see `Windows` for
    "segments" and "positions"; "weights" is 0 in the padding, and so is "segments".

    Attributes:
        documents: see `Documents`.
        seq: tokens.
        seed: of the order of pieces and of examples.
        packing: a name of `PACKERS`.
        folder: where the rows are kept for the next process, if they are many; None for nowhere.
    """

    documents: Documents
    seq: int
    seed: int
    packing: str
    folder: Path | None = None

    @property
    def count(self) -> int:
        """See `Examples`."""
        return len(self._pieces["begins"]) - 1

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Examples`."""
        return tuple(FIELDS)

    @property
    def padding(self) -> float:
        """The part of all inputs that is padding."""
        return 1 - float(self._pieces["lengths"].sum()) / (self.count * self.seq)

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """See `Examples`: rows counted in every epoch."""
        return by_epoch(positions, self.count, self.seed)[1]

    def fill(self, number: int, row: Mapping[str, np.ndarray]) -> None:
        """See `Examples`."""
        offset = 0
        pieces = range(int(self._pieces["begins"][number]), int(self._pieces["begins"][number + 1]))
        for segment, piece in enumerate(pieces, 1):
            start, length = int(self._pieces["starts"][piece]), int(self._pieces["lengths"][piece])
            tokens = self.documents.read(
                int(self._pieces["documents"][piece]), start, start + length + 1
            )
            span = slice(offset, offset + length)
            row["inputs"][span], row["targets"][span] = tokens[:-1], tokens[1:]
            row["segments"][span], row["positions"][span], row["weights"][span] = (
                segment,
                np.arange(length),
                1,
            )
            offset += length

    @cached_property
    def _pieces(self) -> Mapping[str, np.ndarray]:
        """Pieces in the order of their rows: "documents", "starts" and "lengths" in inputs, int64
        [pieces]; and where each row "begins", int64 [rows + 1].
        """
        if self.folder is None or len(self.documents.lengths) < KEPT:
            return self._packed()
        key = hashlib.sha256(
            f"{self.documents.digest} {self.packing} {self.seq} {self.seed}".encode()
        ).hexdigest()[:16]
        return kept(self.folder / f"rows-{key}.npz", self._packed)

    def _packed(self) -> Mapping[str, np.ndarray]:
        documents, starts, lengths = cut(self.documents.lengths, self.seq)
        order = shuffled(len(lengths), self.seed, _ORDER)
        rows = PACKERS[self.packing](lengths[order], self.seq)
        together = order[np.argsort(rows, kind="stable")]
        begins = (
            np.concatenate([[0], np.cumsum(np.bincount(rows))])
            if len(rows)
            else np.zeros(1, np.int64)
        )
        return {
            "documents": documents[together],
            "starts": starts[together],
            "lengths": lengths[together],
            "begins": begins,
        }


def cut(lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of documents with at most `seq` inputs: document, first token and inputs, int64
    [pieces] each.
    """
    pairs = np.maximum(lengths - 1, 0)
    pieces = -(-pairs // seq)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq
    return documents, starts, np.minimum(pairs[documents] - starts, seq)
