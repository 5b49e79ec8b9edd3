"""A worker: a planned, sharded program on its own devices, and the servers that it pushes to."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
import optax

from shardlib.annotation.model import Init
from shardlib.annotation.trees import Filter, Tree
from shardlib.api import compile
from shardlib.decisions.pins import PinMapping
from shardlib.errors import LaunchError, PinError, raise_all
from shardlib.frontend.model import Loss
from shardlib.islands.exchanges import BUCKET_BYTES, Asynchronous, Part
from shardlib.islands.program import (
    GradientProgram,
    StagedGradients,
    Sums,
    by_path,
    not_in_float32,
    parts_in_order,
    placed_as,
    trained,
    with_placed,
)
from shardlib.islands.servers.wire import (
    ORDER_BYTES,
    WHOLE,
    Answer,
    Ask,
    Flat,
    Link,
    Order,
    divided,
    elements,
    in_order,
    order_text,
    owned,
)
from shardlib.islands.transfers import in_buckets
from shardlib.lowering.program import Program
from shardlib.machines.topology import TopologyLike
from shardlib.processes.wire import FLOAT32, FrameError, Later, Outgoing

# --------------------------------------------------------------------------------------------------
# Jobs of workers, which each finds in its own process by the file and the name of a function.
# Nothing is pickled.

#: The name under which a script is loaded again: what stands under `if __name__ == "__main__"` does
#: not run.
MAIN = "__shardlib_job__"


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The training of a worker. All workers have the same, but for their rows.

    Attributes:
        init: see `shardlib.compile`.
        loss: see `shardlib.compile`; that of the rows of one worker.
        rows: (worker, step) -> the batch of a worker's step, always of the same shapes.
        topology: of one worker; by default all devices that its process sees.
        pin: decisions of a worker's plan, fixed by hand.
        batch_axes: logical axes of the batch; by default the convention.
        seed: of the parameters, 0 to 2**31 - 1; all workers begin alike.
        wrt: what is trained; all parameters if left out.
    """

    init: Init
    loss: Loss
    rows: Callable[[int, int], Tree]
    topology: TopologyLike | None = None
    pin: PinMapping | None = None
    batch_axes: Tree = None
    seed: int = 0
    wrt: Filter = None


#: Makes the job; called in the process of every worker.
MakeJob = Callable[[], Job]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The importable place of a function.

    Attributes:
        module: its name, or that of a script as it is loaded again.
        file: of the module.
        name: of the function.
    """

    module: str
    file: str
    name: str


# --------------------------------------------------------------------------------------------------
# Parameters of the servers as they come in, bucket after bucket.
#
#     landing = Landing({"w": 4}, {"w": 2})
#     receiver = landing.receiver(order)   # takes what comes of one server, in a thread
#     landing.run("w", 0)                  # the first half of "w", as soon as it is there

#: A part of a parameter that is waited for: its path, and which of its equal runs.
Run = tuple[str, int]


class Landing:
    """Elements of all parameters, some of which are there."""

    def __init__(self, sizes: Mapping[str, int], runs: Mapping[str, int]) -> None:
        """Begins with none."""
        self._values = {path: np.empty(size, np.float32) for path, size in sizes.items()}
        self._each = {path: max(1, sizes[path] // runs[path]) for path in sizes}
        self._missing: dict[Run, int] = {
            (path, number): sizes[path] // runs[path]
            for path in sizes
            for number in range(runs[path])
        }
        self._changed = threading.Condition()
        self._failed: BaseException | None = None

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], runs: Mapping[str, int]) -> Landing:
        """One in which everything is there."""
        landing = Landing({path: array.size for path, array in arrays.items()}, runs)
        for path, array in arrays.items():
            landing.put(Part(path=path, start=0, stop=array.size), array.reshape(-1))
        return landing

    def put(self, part: Part, values: np.ndarray) -> None:
        """Elements have come, for the first time."""
        if part.start == part.stop:
            return
        self._values[part.path][part.start : part.stop] = values
        each, start = self._each[part.path], part.start
        with self._changed:
            while start < part.stop:
                number = start // each
                stop = min(part.stop, (number + 1) * each)
                self._missing[part.path, number] -= stop - start
                start = stop
            self._changed.notify_all()

    def there(self, runs: Iterable[Run]) -> bool:
        """Returns whether all of these are there, or never will be."""
        with self._changed:
            return self._failed is not None or not any(self._missing[run] for run in runs)

    def run(self, path: str, number: int = 0) -> np.ndarray:
        """Elements of a run, once all of them are there; nobody writes to them again."""
        with self._changed:
            while self._missing[path, number]:
                if self._failed is not None:
                    raise LaunchError(f"parameters have not come: {self._failed}") from self._failed
                self._changed.wait()
        each = self._each[path]
        return self._values[path][number * each : (number + 1) * each]

    def whole(self, path: str) -> np.ndarray:
        """All elements of a parameter, once they are there."""
        count = self._values[path].size // self._each[path]
        runs = [self.run(path, number) for number in range(count)]
        return np.concatenate([np.zeros(0, np.float32), *runs])

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def receiver(self, order: Order) -> Receiver:
        """Returns the receiver of the elements of one server."""
        return Receiver(put=self.put, order=order)


@dataclass(kw_only=True)
class Receiver:
    """Arrivals of one server, bucket after bucket. Where its connection breaks on the way and the
    answer begins again, what had come stays, and counts as old as it is.

    Attributes:
        put: takes the elements of a part, which come for the first time.
        order: in which elements come.
        dtype: of them.
        begun: whether an answer has begun to come.
        answer: the newest.
        clock: updates of the server that all elements have at least.
        taken: buckets that have come.
    """

    put: Callable[[Part, np.ndarray], None]
    order: Order
    dtype: np.dtype[np.generic] = FLOAT32
    begun: threading.Event = field(default_factory=threading.Event)
    answer: Answer = field(default_factory=Answer)
    clock: int | None = None
    taken: int = 0

    @property
    def complete(self) -> bool:
        """True if all buckets have come."""
        return self.taken == len(self.order)

    def begin(self, answer: Answer) -> None:
        """See `Arrivals`."""
        self.answer = answer
        self.clock = answer.clock if self.clock is None else min(self.clock, answer.clock)
        self.begun.set()

    def take(self, name: str, array: np.ndarray) -> None:
        """See `Arrivals`."""
        number, offset = int(name) if name.isdecimal() else len(self.order), 0
        if number >= len(self.order) or number > self.taken:
            raise FrameError("it has a bucket that nobody asked for")
        bucket = self.order[number]
        if array.dtype != self.dtype or array.shape != (elements(bucket),):
            raise FrameError(f"its bucket {number} is {array.dtype}{list(array.shape)}")
        if number < self.taken:
            return
        for part in bucket:
            self.put(part, array[offset : offset + part.stop - part.start])
            offset += part.stop - part.start
        self.taken += 1


# --------------------------------------------------------------------------------------------------
# Sums of gradients that are to be pushed: on the host, or still being computed, stage by stage.


class Gradients(Protocol):
    """A sum of gradients."""

    @property
    def at_once(self) -> bool:
        """True if all of it is there before any of it is sent."""
        ...

    def run(self, part: Part) -> np.ndarray:
        """Elements of it, float32, once they are there."""
        ...

    def finite(self) -> bool:
        """Returns whether all elements are finite; waits for all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """Gradients on the host.

    Attributes:
        arrays: by path.
        at_once: they are there.
    """

    arrays: Mapping[str, np.ndarray]
    at_once: bool = True

    def run(self, part: Part) -> np.ndarray:
        """See `Gradients`."""
        return self.arrays[part.path].reshape(-1)[part.start : part.stop]

    def finite(self) -> bool:
        """See `Gradients`."""
        return all(np.isfinite(array).all() for array in self.arrays.values())


@dataclass(frozen=True, kw_only=True)
class OfStages:
    """Gradients that stages make one after the other.

    Attributes:
        sums: of the stages, for each step since the last push.
        trained: the parameters, abstract, by path.
        runs: into how many equal runs each is divided.
        at_once: they are not there.
    """

    sums: tuple[Sums, ...]
    trained: Mapping[str, jax.ShapeDtypeStruct]
    runs: Mapping[str, int]
    at_once: bool = False
    _made: dict[Run, np.ndarray] = field(default_factory=dict[Run, np.ndarray])

    def run(self, part: Part) -> np.ndarray:
        """See `Gradients`."""
        each = self.trained[part.path].size // self.runs[part.path]
        parts, start = list[np.ndarray](), part.start
        while start < part.stop:
            number = start // each
            stop = min(part.stop, (number + 1) * each)
            mean = self._mean((part.path, number))
            parts.append(mean[start - number * each : stop - number * each])
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def finite(self) -> bool:
        """See `Gradients`."""
        runs = [(path, number) for path, count in self.runs.items() for number in range(count)]
        return all(np.isfinite(self._mean(run)).all() for run in runs)

    def _mean(self, run: Run) -> np.ndarray:
        """Of a run, over microbatches, summed over steps; made once, or by two threads alike."""
        if run not in self._made:
            dtype, total = self.trained[run[0]].dtype, None
            for step in self.sums:
                parts = [np.asarray(part) for part in step.parts[run]]
                mean = (sum(parts[1:], parts[0]) / np.float32(step.count)).astype(dtype)
                total = mean if total is None else total + mean
            assert total is not None, "a step"
            self._made[run] = total.astype(np.float32).reshape(-1)
        return self._made[run]


# --------------------------------------------------------------------------------------------------
# The programs of a worker: gradients as the plan says, their sum between two pushes, and plain SGD
# between two fetches. The sum and the local step stay sharded as gradients and parameters are.

#: Random streams of workers are those of seeds that are so far from that of the parameters.
STREAMS = 1 << 16


class Computing:
    """Parameters on the devices of a worker, and what is computed with them.

    Attributes:
        trained: the parameters, abstract, by path.
        parts: their elements in the order of use.
        runs: into how many equal runs each is divided that are needed one by one.
    """

    def __init__(self, job: Job, worker: int, local_rate: float) -> None:
        """Compiles."""
        batch = job.rows(worker, 0)
        program = compile(
            job.init,
            job.loss,
            optax.identity(),
            batch,
            topology=job.topology,
            pin=job.pin,
            batch_axes=job.batch_axes,
            wrt=job.wrt,
        )
        if program.plan.exchange.islands > 1:
            raise PinError(
                f"pin of the job has exchange={program.plan.exchange}, and is of one worker"
            )
        staged = None if program.programs is None else StagedGradients.of(program)
        self.gradients = staged or GradientProgram.of(program)
        self.trained = trained(program)
        if failures := not_in_float32(self.trained):
            raise_all(PinError, "parameter servers hold float32, which cannot hold these", failures)
        self.parts = parts_in_order(program)
        #: Where steps begin before all parameters are there.
        self._staged = staged if staged and staged.runs and not local_rate else None
        self.runs = self._staged.runs if self._staged else dict.fromkeys(self.trained, 1)
        self._landing: Landing | None = None
        state = program.init(job.seed)
        self.params, self.model_state = state.params, state.model_state
        if jax.tree.leaves(self.model_state):
            streams = (job.seed + STREAMS * (worker + 1)) % 2**31
            self.model_state = program.init(streams).model_state
        self._rate = local_rate
        self._add = jax.jit(_added, donate_argnums=0)
        self._move = jax.jit(_moved, static_argnums=2)
        self._sum: Tree = None
        self._sums: tuple[Sums, ...] = ()
        self._rehearse(batch)

    def _rehearse(self, batch: Tree) -> None:
        """Fetches from itself and takes a step, so that nothing is compiled or allocated anew
        between the first fetch and the first push: they would be many updates apart.
        """
        before = self.params, self.model_state, self._landing
        self.fetched(Landing.of(self.first(), self.runs))
        for _ in range(2):
            self.step(batch)()
        self.taken().finite()
        self.params, self.model_state, self._landing = before

    @property
    def program(self) -> Program:
        """The worker's program."""
        return self.gradients.program

    def first(self) -> dict[str, np.ndarray]:
        """The trained parameters as they are, on the host."""
        if self._landing is None:
            return _on_host(self.program.model.partition.trained(self.params))
        return {
            path: self._landing.whole(path).reshape(parameter.shape)
            for path, parameter in self.trained.items()
        }

    def fetched(self, landing: Landing) -> None:
        """Goes on with parameters of the servers; each is placed as soon as it is there."""
        if self._staged:
            self._landing = landing
            return
        placed = {
            path: placed_as(self.trained[path], landing.run(path))
            for path in dict.fromkeys(part.path for part in self.parts)
        }
        self.params = with_placed(self.program, self.params, placed)

    def step(self, batch: Tree) -> Callable[[], float]:
        """Computes a gradient, and adds it to those that wait for the next push."""
        if self._staged:
            return self._begun(self._staged, batch)
        metrics, gradients, self.model_state = self.gradients.call(
            self.params, self.model_state, self.program.put(batch)
        )
        if self._rate:
            partition = self.program.model.partition
            moved = self._move(partition.trained(self.params), gradients, self._rate)
            self.params = partition.joined(moved, self.params)
        self._sum = gradients if self._sum is None else self._add(self._sum, gradients)
        return lambda: float(metrics["loss"])

    def _begun(self, staged: StagedGradients, batch: Tree) -> Callable[[], float]:
        """A step whose stages begin as soon as their parameters are there."""
        assert self._landing is not None, "fetched"
        placed = self.program.put(batch)
        sums = staged.begun(self.params, self.model_state, placed, self._landing)
        self.model_state, self._sums = sums.model_state, (*self._sums, sums)
        return lambda: float(np.asarray(sums.loss)[0]) / sums.count

    def taken(self) -> Gradients:
        """The sum of the gradients since the last call."""
        if self._staged:
            sums, self._sums = self._sums, ()
            return OfStages(sums=sums, trained=self.trained, runs=self.runs)
        total, self._sum = self._sum, None
        return OnHost(arrays=_on_host(total))


def _added(total: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(jax.numpy.add, total, gradients)


def _moved(trained: Tree, gradients: Tree, rate: float) -> Tree:
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), trained, gradients)


def _on_host(tree: Tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float32) for path, leaf in by_path(tree).items()}


# --------------------------------------------------------------------------------------------------
# The order in which a worker's elements cross: parameters as the forward pass needs them, gradients
# the other way round, as the backward pass makes them.
#
# Each server sends what it owns in that order, so that with several of them over one link what is
# needed first comes first of each.


@dataclass(frozen=True, kw_only=True)
class TransferOrder:
    """The order in which elements cross between a worker and one server.

    Attributes:
        order: buckets of elements, counted in whole parameters.
        text: the same as the server counts them, which has a run of each parameter.
    """

    order: Order
    text: str

    @staticmethod
    def of(
        parts: Iterable[Part], owned_parts: Mapping[str, Part], bucket_bytes: int
    ) -> TransferOrder:
        """The order of those parts that a server owns."""
        here = (_both(part, owned_parts[part.path]) for part in parts if part.path in owned_parts)
        order = in_buckets(
            (part for part in here if part.start < part.stop),
            elements=max(1, bucket_bytes // FLOAT32.itemsize),
        )
        return TransferOrder._counted(order, owned_parts)

    def reversed(self, owned_parts: Mapping[str, Part]) -> TransferOrder:
        """The last buckets first."""
        return TransferOrder._counted(tuple(reversed(self.order)), owned_parts)

    @staticmethod
    def _counted(order: Order, owned_parts: Mapping[str, Part]) -> TransferOrder:
        counted = tuple(
            tuple(_from(owned_parts[part.path], part) for part in bucket) for bucket in order
        )
        return TransferOrder(order=order, text=order_text(counted))


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders of a worker and all of its servers.

    Attributes:
        fetches: of each server, of parameters.
        pushes: of each server, of gradients.
    """

    fetches: tuple[TransferOrder, ...]
    pushes: tuple[TransferOrder, ...]

    @staticmethod
    def of(
        parts: Iterable[Part], sizes: Mapping[str, int], servers: int, bucket_bytes: int
    ) -> Orders:
        """The orders for parameters that are divided among servers."""
        all_parts = tuple(parts)
        owns = [{part.path: part for part in parts} for parts in owned(sizes, servers)]
        fetches = tuple(
            TransferOrder.of(all_parts, owned_parts, bucket_bytes) for owned_parts in owns
        )
        if (
            max(len(crossing.text) for crossing in fetches) > ORDER_BYTES // 2
        ):  # rows of very many layers
            whole_parts = [
                Part(path=path, start=0, stop=sizes[path])
                for path in dict.fromkeys(part.path for part in all_parts)
            ]
            fetches = tuple(
                TransferOrder.of(whole_parts, owned_parts, bucket_bytes) for owned_parts in owns
            )
        pushes = tuple(
            crossing.reversed(owned_parts)
            for crossing, owned_parts in zip(fetches, owns, strict=True)
        )
        return Orders(fetches=fetches, pushes=pushes)


def _both(first: Part, second: Part) -> Part:
    """The elements that both have; none where `stop` is no more than `start`."""
    return Part(
        path=first.path, start=max(first.start, second.start), stop=min(first.stop, second.stop)
    )


def _from(outer: Part, part: Part) -> Part:
    """A part, counted from the first element of another."""
    return Part(path=part.path, start=part.start - outer.start, stop=part.stop - outer.start)


# --------------------------------------------------------------------------------------------------
# The loop of a worker: enter, fetch, compute, push.
#
# With `push=n` gradients of n steps are added up; the sum is as old as the oldest parameters that
# it was computed with. A gradient that is not finite is pushed to no server, and the worker goes
# on.


@dataclass(kw_only=True)
class Worker:
    """A worker between its program and its servers.

    Attributes:
        number: of the worker.
        exchange: periods and the number of servers.
        computing: its program.
        links: to the servers, in their order.
        bucket_bytes: of elements that cross together.
        start: a word of this start of the worker.
        serial: pushes so far.
        seen: clocks of the servers at the oldest fetch since the last push.
        clocks: the same at the newest fetch.
        stale: staleness of the last push, at the first server.
        orders: in which parameters and gradients cross.
    """

    number: int
    exchange: Asynchronous
    computing: Computing
    links: Sequence[Link]
    bucket_bytes: int = BUCKET_BYTES
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    serial: int = 0
    seen: list[int] | None = None
    clocks: list[int] = field(default_factory=list[int])
    stale: int = 0

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(self.links))
        self._sizes = {path: leaf.size for path, leaf in self.computing.trained.items()}
        self.orders = Orders.of(
            self.computing.parts, self._sizes, len(self.links), self.bucket_bytes
        )

    def run(self, steps: int, rows: Callable[[int, int], Tree], log: Path | None) -> None:
        """Trains."""
        self.begin()
        with open(log or "/dev/null", "a", buffering=1) as lines:
            for step in range(steps):
                waited = self._enter(step)
                loss = self.step(step, rows(self.number, step), last=step == steps - 1)
                line = {
                    "step": step,
                    "loss": loss if np.isfinite(loss) else None,
                    "at_s": time.time(),
                    "waited_s": waited,
                    "staleness": self.stale,
                }
                lines.write(json.dumps(line) + "\n")
        self._all("leave", steps)
        for link in self.links:
            link.close()

    def begin(self) -> None:
        """Offers the parameters that all workers begin with."""
        offers = divided(self.computing.first(), len(self.links))
        for answer, _ in self._all("offer", 0, offers):
            if answer.kind == "refused":
                raise LaunchError(f"a server refuses the parameters: {answer.why}")

    def step(self, step: int, batch: Tree, *, last: bool = False) -> float:
        """Fetches where it is time to, computes, and pushes where it is time to."""
        wait = self._fetch(step) if step % self.exchange.fetch == 0 else lambda: None
        loss = self.computing.step(batch)
        wait()
        if self.seen is None:
            self.seen = list(self.clocks)
        if last or (step + 1) % self.exchange.push == 0:
            self._push(step, self.computing.taken())
            self.seen = None
        return loss()

    def _enter(self, step: int) -> float:
        """Waits until the first server lets it begin; seconds."""
        began = time.monotonic()
        ask = Ask(kind="enter", worker=self.number, start=self.start, step=step)
        while self.links[0].ask(ask)[0].kind == "wait":
            pass
        return time.monotonic() - began

    def _fetch(self, step: int) -> Callable[[], None]:
        """Begins to fetch; what is given waits until all has come."""
        landing, waits = self._fetching(step)
        if landing is None:  # a server was started again before it had parameters
            waits()
            self._all("offer", step, divided(self.computing.first(), len(self.links)))
            landing, waits = self._fetching(step)
        assert landing is not None, "servers have parameters"
        self.computing.fetched(landing)
        return waits

    def _fetching(self, step: int) -> tuple[Landing | None, Callable[[], None]]:
        """Starts to fetch parameters: the landing, and a function that waits until all have come;
        None where a server has none.
        """
        landing = Landing(self._sizes, self.computing.runs)
        receivers = [landing.receiver(crossing.order) for crossing in self.orders.fetches]

        def fetch(server: int) -> None:
            ask = self._asked("fetch", step, server, order=self.orders.fetches[server].text)
            try:
                self.links[server].ask(ask, None, receivers[server])
            except BaseException as error:
                landing.fail(error)
                receivers[server].begun.set()
                raise

        calls = [self._threads.submit(fetch, server) for server in range(len(self.links))]

        def wait() -> None:
            for call in calls:
                call.result()
            self.clocks = [receiver.clock or 0 for receiver in receivers]

        for receiver in receivers:
            receiver.begun.wait()
        refused = any(receiver.answer.kind == "refused" for receiver in receivers)
        return None if refused else landing, wait

    def _push(self, step: int, gradients: Gradients) -> None:
        if gradients.at_once and not gradients.finite():
            self._all("skip", step)
            return
        self.serial += 1
        assert self.seen is not None, "fetched"

        def push(server: int) -> Answer:
            crossing = self.orders.pushes[server]
            ask = self._asked("push", step, server, order=crossing.text)
            return self.links[server].ask(ask, self._sent(crossing.order, gradients))[0]

        answers = list(self._threads.map(push, range(len(self.links))))
        self.stale = answers[0].staleness

    def _sent(self, order: Order, gradients: Gradients) -> Outgoing:
        """Buckets as they are sent; what is sent before all of it is known says so at its end."""
        buckets = in_order(order, gradients.run)
        if gradients.at_once:
            return buckets
        finite = Later(
            size=1, make=lambda: np.array([gradients.finite()], np.uint8), dtype=np.dtype(np.uint8)
        )
        return {**buckets, WHOLE: finite}

    def _asked(self, kind: str, step: int, server: int, *, order: str = "") -> Ask:
        return Ask(
            kind=kind,
            worker=self.number,
            start=self.start,
            serial=self.serial,
            seen=0 if self.seen is None else self.seen[server],
            step=step,
            about=order,
        )

    def _all(
        self, kind: str, step: int, arrays: Sequence[Flat] | None = None
    ) -> list[tuple[Answer, Flat]]:
        """Asks all servers at once."""

        def ask(server: int) -> tuple[Answer, Flat]:
            sent = None if arrays is None else arrays[server]
            return self.links[server].ask(self._asked(kind, step, server), sent)

        return list(self._threads.map(ask, range(len(self.links))))
