"""A parameter server: its shard of the parameters, its update, its clock, its checkpoint and its
answers. Free of JAX.

A gradient is applied by plain SGD or Adagrad, in float32, element by element.

Adagrad is that of `optax.adagrad` (Duchi et al., 2011), with the same epsilon:

>>> import numpy as np
>>> one = np.float32([1.0])
>>> value, square = applied("adagrad", 0.5, np.float32([2.0]), np.float32([3.0]), one)
>>> float(square[0]), float(value[0])  # 3 + 1, 2 - 0.5 / sqrt(4)
(4.0, 1.75)
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardlib.errors import CheckpointError
from shardlib.islands.exchanges import Asynchronous, Rule
from shardlib.islands.servers.service import (
    VERSION,
    MessageService,
    ProcessSettings,
    packed_file,
    read_file,
)
from shardlib.islands.servers.wire import (
    WHOLE,
    Answer,
    Ask,
    Flat,
    Order,
    OrderError,
    RefusedError,
    elements,
    gathered,
    read_order,
    require_each_once,
)
from shardlib.processes.wire import Outgoing
from shardlib.untrusted.data import JsonObject, fit, printable

# --------------------------------------------------------------------------------------------------
# The gate: admission of workers to steps. The first server is asked, and knows the progress of
# every worker.
#
# A worker waits in two cases alone: while another trains alone (warm start), and while it is more
# than `bound` steps ahead of the slowest worker that is there. Who comes late, or comes back,
# begins where the slowest is, so that nobody waits until it has caught up. Who is silent for too
# long, or whose connection has closed, is not waited for.


@dataclass(kw_only=True)
class Gate:
    """The progress of workers; used by one thread at a time.

    Attributes:
        exchange: warm start and bound.
        silent_s: seconds after which a worker that says nothing is not waited for.
        offsets: of each worker that is there, what its own count of steps began at.
        steps: of each, the number of the step that it does, by its own count.
        heard: of each, when it last asked.
        alone: who trains alone, during a warm start.
        now: seconds of a clock.
        lost: is told who has been silent for too long.
    """

    exchange: Asynchronous
    silent_s: float = 60.0
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    heard: dict[int, float] = field(default_factory=dict[int, float])
    alone: int | None = None
    now: Callable[[], float] = time.monotonic
    lost: Callable[[int], None] = lambda worker: None

    def place(self, worker: int) -> int:
        """Returns the progress of a worker, on the clock that is common to all."""
        return self.offsets[worker] + self.steps[worker]

    def enter(self, worker: int, step: int, pushes: int) -> str:
        """Asks for a worker whether it may begin a step."""
        self._forget_silent()
        if worker not in self.offsets:
            others = [self.place(present) for present in self.offsets]
            self.offsets[worker] = min(others, default=step) - step
        self.steps[worker], self.heard[worker] = step, self.now()
        if pushes < self.exchange.warm:
            if self.alone is None:
                self.alone = worker
            if self.alone != worker:
                return f"worker {self.alone} trains alone, {pushes} of {self.exchange.warm} pushes"
        return self._ahead(worker)

    def _ahead(self, worker: int) -> str:
        if self.exchange.bound is None:
            return ""
        slowest = min(self.offsets, key=self.place)
        ahead = self.place(worker) - self.place(slowest)
        if ahead <= self.exchange.bound:
            return ""
        return f"it is {ahead} steps ahead of worker {slowest}, the bound is {self.exchange.bound}"

    def leave(self, worker: int) -> None:
        """A worker is done, or gone."""
        for table in (self.offsets, self.steps, self.heard):
            table.pop(worker, None)
        if self.alone == worker:
            self.alone = None

    def _forget_silent(self) -> None:
        late = self.now() - self.silent_s
        for worker in [name for name, heard in self.heard.items() if heard < late]:
            self.leave(worker)
            self.lost(worker)


#: Beside the sum of squares, as in `optax.adagrad`.
EPSILON = np.float32(1e-7)


def rate_of(exchange: Asynchronous, staleness: int) -> float:
    """The rate of a gradient that is so stale."""
    return exchange.rate / (1 + staleness) if exchange.by_staleness else exchange.rate


def applied(
    rule: Rule, rate: float, value: np.ndarray, squares: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and sums of squares after a gradient; new arrays."""
    if rule == "sgd":
        return value - np.float32(rate) * gradient, squares
    squares = squares + gradient * gradient
    inverse = np.where(squares > 0, 1 / np.sqrt(squares + EPSILON), np.float32(0))
    return value - np.float32(rate) * (inverse * gradient), squares


# --------------------------------------------------------------------------------------------------
# The parameters that one server owns, and everything that a gradient changes.
#
# A shard is used by one thread at a time; whoever has several holds a lock. Arrays are replaced
# and never written to, so that what was fetched may be sent while gradients are applied.


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The sender of a gradient, and its parameters.

    Attributes:
        worker: number of the worker.
        start: a word that each start of a worker has of its own.
        serial: number of the push in that start, from 1 on.
        seen: the clock at the fetch that the gradient belongs to.
    """

    worker: int
    start: str
    serial: int
    seen: int


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The result of a push.

    Attributes:
        clock: updates of the server.
        staleness: of the gradient.
        again: whether it had been applied before, and was not again.
    """

    clock: int
    staleness: int = 0
    again: bool = False


@dataclass(kw_only=True)
class Shard:
    """The parameters of a server.

    Attributes:
        exchange: how gradients are applied.
        values: the parameters; None before the first offer.
        squares: Adagrad's sums.
        clock: how many gradients have been applied.
        staleness: how many of them were how stale.
        serials: of each worker its start, and the last of its pushes.
    """

    exchange: Asynchronous
    values: Flat | None = None
    squares: Flat = field(default_factory=dict[str, np.ndarray])
    clock: int = 0
    staleness: Counter[int] = field(default_factory=Counter[int])
    serials: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])

    def offer(self, values: Mapping[str, np.ndarray]) -> None:
        """Begins with parameters, where there are none yet; all workers offer the same."""
        if self.values is not None:
            _require_alike(values, self.values, "what is offered")
            return
        _require_finite(values, "what is offered")
        self.values = dict(values)
        first = np.float32(self.exchange.accumulator)
        if self.exchange.rule == "adagrad":
            self.squares = {path: np.full_like(value, first) for path, value in values.items()}

    def fetch(self) -> tuple[int, Flat]:
        """The clock, and the parameters."""
        if self.values is None:
            raise RefusedError("nobody has offered parameters yet")
        return self.clock, self.values

    def push(self, pushed: Pushed, gradients: Mapping[str, np.ndarray]) -> Applied:
        """Applies a gradient, once."""
        if self.values is None:
            raise RefusedError("nobody has offered parameters yet")
        start, last = self.serials.get(pushed.worker, ("", 0))
        if start == pushed.start and pushed.serial <= last:
            return Applied(clock=self.clock, again=True)
        _require_alike(gradients, self.values, "the gradient")
        _require_finite(gradients, "the gradient")
        # A server that was restarted may be behind what a worker saw.
        staleness = max(self.clock - pushed.seen, 0)
        rate = rate_of(self.exchange, staleness)
        values, squares = self._after(rate, gradients)
        if self.exchange.rule == "adagrad":
            self.squares = squares
        self.values = values
        self.clock += 1
        self.staleness[staleness] += 1
        self.serials[pushed.worker] = (pushed.start, pushed.serial)
        return Applied(clock=self.clock, staleness=staleness)

    def _after(self, rate: float, gradients: Mapping[str, np.ndarray]) -> tuple[Flat, Flat]:
        """Parameters and sums of squares after a gradient."""
        assert self.values is not None
        values, squares = Flat(), Flat()
        with np.errstate(over="ignore", invalid="ignore"):
            for path, gradient in gradients.items():
                value = self.values[path]
                values[path], squares[path] = applied(
                    self.exchange.rule, rate, value, self.squares.get(path, value), gradient
                )
        for what, arrays in (("parameters", values), ("sums of squares", squares)):
            _require_finite(arrays, f"with this gradient, what becomes of the {what}")
        return values, squares


def _require_alike(received: Mapping[str, np.ndarray], stored: Flat, what: str) -> None:
    if received.keys() != stored.keys():
        strange = sorted(received.keys() ^ stored.keys())[:3]
        names = fit(printable(", ".join(strange)), 200)
        raise RefusedError(f"{what} has other parameters than this server: {names}")
    for path, array in received.items():
        if array.shape != stored[path].shape or array.dtype != np.float32:
            raise RefusedError(
                f"{what} of {path} is {array.dtype}{list(array.shape)}, and not"
                f" float32{list(stored[path].shape)}"
            )


def _require_finite(arrays: Mapping[str, np.ndarray], what: str) -> None:
    for path, array in arrays.items():
        if array.dtype != np.float32 or array.ndim != 1:
            raise RefusedError(
                f"{what} of {fit(printable(path), 80)} is {array.dtype}{list(array.shape)}, and not"
                " float32 of one dim"
            )
        if not np.isfinite(array).all():
            raise RefusedError(f"{what} of {fit(printable(path), 80)} is not finite")


# --------------------------------------------------------------------------------------------------
# A server's checkpoint.


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts in a checkpoint beside its arrays.

    Attributes:
        version: of the form of the file.
        server: whose it is.
        servers: among how many the parameters are divided.
        rule: with which gradients were applied.
        clock: updates.
        staleness: pairs of staleness and how many gradients had it.
        serials: of each worker its number, start and last push.
        places: of each worker at the gate its number, offset and step.
    """

    version: int
    server: int
    servers: int
    rule: str
    clock: int
    staleness: tuple[tuple[int, int], ...]
    serials: tuple[tuple[int, str, int], ...]
    places: tuple[tuple[int, int, int], ...]


def packed(shard: Shard, gate: Gate, server: int) -> bytes:
    """The checkpoint of a shard that has parameters."""
    header = {
        "server": server,
        "servers": shard.exchange.servers,
        "rule": shard.exchange.rule,
        "clock": shard.clock,
        "staleness": [[s, count] for s, count in shard.staleness.items()],
        "serials": [[worker, *last] for worker, last in shard.serials.items()],
        "places": [[member, gate.offsets[member], gate.steps[member]] for member in gate.offsets],
    }
    return packed_file(header, {"value": shard.values or {}, "squares": shard.squares})


def restore(path: Path, shard: Shard, gate: Gate, server: int) -> bool:
    """Goes on at a checkpoint, where there is one."""
    stored = read_file(path, About, ("value", "squares"))
    if stored is None:
        return False
    header, (shard.values, shard.squares) = stored
    _require_same(header, shard.exchange, server, path)
    shard.clock, shard.staleness = header.clock, Counter(dict(header.staleness))
    shard.serials = {worker: (start, serial) for worker, start, serial in header.serials}
    for worker, offset, step in header.places:
        gate.offsets[worker], gate.steps[worker], gate.heard[worker] = offset, step, gate.now()
    return True


def _require_same(header: About, exchange: Asynchronous, server: int, path: Path) -> None:
    expected = (VERSION, server, exchange.servers, exchange.rule)
    if (header.version, header.server, header.servers, header.rule) != expected:
        raise CheckpointError(
            f"the checkpoint {path} is that of server {header.server} of {header.servers} with"
            f" {header.rule}, and this is server {server} of {exchange.servers} with"
            f" {exchange.rule}\nTry: another folder, or the same servers and rule"
        )


# --------------------------------------------------------------------------------------------------
# The service: answers to messages, whatever carries them.
#
# Threads ask at the same time; arrays are sent and written outside of the lock.

#: Seconds for which a worker that waits is not answered; then it asks again.
WAIT_SECONDS = 0.5


def scattered(arrays: Mapping[str, np.ndarray], order: Order) -> Flat:
    """Returns the contents of buckets, by path."""
    if arrays.keys() != {str(position) for position in range(len(order))}:
        raise OrderError(f"there are {len(arrays)} buckets of {len(order)}")
    sizes = dict[str, int]()
    for part in (part for bucket in order for part in bucket):
        sizes[part.path] = max(sizes.get(part.path, 0), part.stop)
    require_each_once(order, sizes, limit=sum(array.size for array in arrays.values()))
    vectors = {path: np.empty(size, np.float32) for path, size in sizes.items()}
    for position, bucket in enumerate(order):
        array, offset = arrays[str(position)], 0
        if array.dtype != np.float32 or array.shape != (elements(bucket),):
            raise OrderError(f"bucket {position} is {array.dtype}{list(array.shape)}")
        for part in bucket:
            vectors[part.path][part.start : part.stop] = array[
                offset : offset + part.stop - part.start
            ]
            offset += part.stop - part.start
    return vectors


@dataclass(kw_only=True)
class Service(MessageService):
    """A parameter server without its connections.

    Attributes:
        exchange: of the run.
        save_every: pushes between two checkpoints; 0 for those that are asked for alone.
        silent_s: seconds after which a silent worker is not waited for.
        restored: whether it goes on at a checkpoint.
        again: how many pushes came twice.
    """

    asker = "worker"

    exchange: Asynchronous
    save_every: int = 0
    silent_s: float = 60.0
    restored: bool = False
    again: int = 0

    def __post_init__(self) -> None:
        self.shard = Shard(exchange=self.exchange)
        self.gate = Gate(exchange=self.exchange, silent_s=self.silent_s, lost=self._silent)
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        if self.checkpoint is not None:
            self.restored = restore(self.checkpoint, self.shard, self.gate, self.server)
        if self.restored:
            self.note(f"it goes on at its checkpoint, after {self.shard.clock} pushes")

    @property
    def askers(self) -> int:
        """Number of workers that may ask."""
        return self.exchange.workers

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the parameters; None before they are known."""
        values = self.shard.values
        return None if values is None else sum(value.nbytes for value in values.values())

    @property
    def progress(self) -> Answer:
        """The clock."""
        return Answer(clock=self.shard.clock)

    def answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        """Answers a message; its elements are in buckets where it says their order."""
        if not ask.about:
            return self._answered(ask, arrays)
        return self._in_order(ask, arrays, read_order(ask.about))

    def _in_order(self, ask: Ask, arrays: Flat, order: Order) -> tuple[Answer, Outgoing]:
        """Answers a message whose elements are in buckets, or are to be."""
        if ask.kind == "push":
            finite = arrays.pop(WHOLE, None)
            if finite is not None and not finite.all():
                return self._answered(replace(ask, kind="skip"), {})
            return self._answered(ask, scattered(arrays, order))
        answer, values = self._answered(ask, arrays)
        return answer, gathered(values, order) if ask.kind == "fetch" else values

    def _answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Flat]:
        if ask.kind == "enter":
            return self._enter(ask), {}
        if ask.kind == "push":
            return self._push(ask, arrays), {}
        if ask.kind == "save":
            self.save()
            return self.progress, {}
        with self._changed:
            if ask.kind == "offer":
                self.shard.offer(arrays)
            elif ask.kind == "fetch":
                clock, values = self.shard.fetch()
                return Answer(clock=clock), values
            elif ask.kind == "skip":
                self.note(f"the gradient of worker {ask.worker}, step {ask.step}, is not finite")
            elif ask.kind == "leave":
                self.gate.leave(ask.worker)
                self._changed.notify_all()
            elif ask.kind == "report":
                return replace(self.progress, report=self.report()), {}
            else:
                raise RefusedError("there is no such message")
        return self.progress, {}

    def _enter(self, ask: Ask) -> Answer:
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            why = self.gate.enter(ask.worker, ask.step, self.shard.clock)
            self._changed.notify_all()  # it may be whom others wait for
            while why:
                if not self._changed.wait(until - time.monotonic()):
                    return replace(self.progress, kind="wait", why=why)
                why = self.gate.enter(ask.worker, ask.step, self.shard.clock)
            return self.progress

    def _push(self, ask: Ask, arrays: Flat) -> Answer:
        pushed = Pushed(worker=ask.worker, start=ask.start, serial=ask.serial, seen=ask.seen)
        with self._changed:
            result = self.shard.push(pushed, arrays)
            self.again += result.again
            self._changed.notify_all()
        if self.save_every and not result.again and result.clock % self.save_every == 0:
            self.save()
        return Answer(clock=result.clock, staleness=result.staleness)

    def gone(self, who: int) -> None:
        """The connection of a worker has closed; it is not waited for."""
        with self._changed:
            if who in self.gate.offsets:
                self.note(f"worker {who} is gone at its step {self.gate.steps[who]}")
            self.gate.leave(who)
            self._changed.notify_all()

    def _silent(self, worker: int) -> None:
        self.note(f"worker {worker} has said nothing for {self.silent_s:g} s; nobody waits for it")

    def save(self) -> None:
        """Writes the checkpoint, where there are parameters and a place for it. Where it cannot be
        written, training goes on, and an event says so.
        """
        if self.checkpoint is None:
            return
        with self._saving:
            with self._changed:
                if self.shard.values is None:
                    return
                frozen = Shard(
                    exchange=self.exchange,
                    values=self.shard.values,
                    squares=self.shard.squares,
                    clock=self.shard.clock,
                    staleness=self.shard.staleness.copy(),
                    serials=dict(self.shard.serials),
                )
                places = Gate(
                    exchange=self.exchange,
                    offsets=dict(self.gate.offsets),
                    steps=dict(self.gate.steps),
                )
            data = packed(frozen, places, self.server)
            self.replace_checkpoint(data, f"after {frozen.clock} pushes")

    def report(self) -> JsonObject:
        """Returns the server's report, as plain data."""
        return {
            "clock": self.shard.clock,
            "staleness": [[s, count] for s, count in sorted(self.shard.staleness.items())],
            "again": self.again,
            **super().report(),
        }


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProcessSettings):
    """Settings of a server.

    Attributes:
        server: its number.
        exchange: of the run.
        save_every: see `Service`.
        silent_s: see `Service`.
        host: address to listen at.
    """

    what = "the settings of a server"
    words = Rule

    server: int
    exchange: Asynchronous
    save_every: int
    silent_s: float
    host: str


def service_of(settings: ServerSettings, folder: Path) -> Service:
    """Returns the service, at its checkpoint where there is one."""
    return Service(
        exchange=settings.exchange,
        server=settings.server,
        checkpoint=folder / f"server-{settings.server}.safetensors",
        save_every=settings.save_every,
        silent_s=settings.silent_s,
    )
