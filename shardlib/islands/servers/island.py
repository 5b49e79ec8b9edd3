"""Islands that are processes of their own, each with its planned, sharded program, and meet over
TCP.

    with servers.join(program, exchange=shardlib.islands.DiLoCo(islands=2, every=100)) as island:
        state = island.start(seed=0)
        for step in range(10_000):
            state, metrics = island.step(state, rows(island.number, step))

"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardlib.annotation.names import UserModule
from shardlib.annotation.trees import Tree
from shardlib.errors import LaunchError, StateError
from shardlib.findings import Finding
from shardlib.islands.exchanges import BUCKET_BYTES, DiLoCo, Part
from shardlib.islands.outer import mixed as outer_mixed
from shardlib.islands.program import by_path, with_own_streams, with_placed, with_trained
from shardlib.islands.servers.rounds import About, Outer, Outline, checksum, pack, unpack
from shardlib.islands.servers.wire import (
    Answer,
    Arrivals,
    Ask,
    Flat,
    Link,
    Order,
    order_text,
)
from shardlib.islands.servers.worker import Landing, Receiver
from shardlib.islands.transfers import in_buckets
from shardlib.jax_types import Metrics, Value
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.processes.values import first_decides, is_first, is_process_zero, whole

# --------------------------------------------------------------------------------------------------
# A meeting of an island, once it is done, and while it is not.


@dataclass(frozen=True, kw_only=True)
class MeetingRecord:
    """A meeting of this island.

    Attributes:
        round: its number.
        fragment: that it was about.
        islands: whose outer gradients are in the mean; none where it changed nothing.
        seconds: from sending to the mean.
        waited_s: for which a step waited.
        finite: whether this island's outer gradient was.
    """

    round: int
    fragment: int
    islands: tuple[int, ...]
    seconds: float
    waited_s: float = 0.0
    finite: bool = True


class PendingMeeting(Protocol):
    """A meeting that may not be done."""

    def result(self) -> MeetingRecord | None:
        """The meeting, once it is done; None where the round was closed without this island."""
        ...

    def run(self, part: Part) -> np.ndarray | None:
        """The outer parameters of a part of the fragment, once they are there; None where they do
        not come before the meeting is done.
        """
        ...


# --------------------------------------------------------------------------------------------------
# Outer parameters as they become those after a round, bucket after bucket, while the mean comes.
#
# Nothing of an island changes before all of it is there: where a round is closed without the
# island on the way, what had come is let go of.

#: Dtypes that cross element by element, and their bytes; the others have scales beside them.
ELEMENTWISE = {"float32": 4, "bfloat16": 2}
#: What a mean is called as it crosses.
NUMBERS = "numbers"


def mean_order(
    uses: Iterable[Part],
    fragment: Sequence[Part],
    wire: str,
    bucket_bytes: int,
) -> Order:
    """The order in which the elements of a mean cross; empty where they cross as a whole."""
    if wire not in ELEMENTWISE:
        return ()
    start, begins = 0, dict[str, tuple[int, Part]]()
    for part in fragment:
        begins[part.path] = (start, part)
        start += part.stop - part.start
    parts = list[Part]()
    for use in uses:
        if use.path not in begins:
            continue
        offset, part = begins[use.path]
        first, last = max(use.start, part.start), min(use.stop, part.stop)
        if first < last:
            shift = offset - part.start
            parts.append(Part(path=NUMBERS, start=first + shift, stop=last + shift))
    return in_buckets(parts, elements=max(1, bucket_bytes // ELEMENTWISE[wire]))


class ArrivingMean:
    """A mean on its way, and what it makes of the outer parameters.

    Attributes:
        receiver: takes the elements of the mean as they cross.
        mean: elements that have come.
        landing: the outer parameters that they make.
    """

    def __init__(
        self, outer: Outer, start: int, fragment: Sequence[Part], exchange: DiLoCo, order: Order
    ) -> None:
        """Begins with nothing."""
        self._outer, self._start, self._exchange = outer, start, exchange
        self._parts = list(fragment)
        sizes = {part.path: part.stop - part.start for part in fragment}
        total = sum(sizes.values())
        self.mean = np.empty(total, np.float32 if exchange.wire == "float32" else np.uint16)
        self.receiver = Receiver(put=self._put, order=order, dtype=self.mean.dtype)
        self._momentum = np.empty(total, np.float32)
        self.landing = Landing(sizes, dict.fromkeys(sizes, 1))
        self._ends = np.cumsum([0, *sizes.values()]).tolist()

    def _put(self, place: Part, numbers: np.ndarray) -> None:
        """Elements of the mean, counted in the fragment, which belong to one parameter."""
        first, last = place.start, place.stop
        self.mean[first:last] = numbers
        mean = unpack({NUMBERS: numbers}, [numbers.size], self._exchange.wire)
        span = self._start + first, self._start + last
        theta, self._momentum[first:last] = self._outer.after(*span, mean, self._exchange)
        number = int(np.searchsorted(self._ends, first, side="right")) - 1
        while self._ends[number + 1] == first:  # parameters without elements
            number += 1
        begin = self._ends[number]
        path = self._parts[number].path
        self.landing.put(Part(path=path, start=first - begin, stop=last - begin), theta)

    def done(self) -> Flat:
        """Changes the outer parameters; the mean as it crossed."""
        runs = [self.landing.run(part.path) for part in self._parts]
        theta = np.concatenate([np.zeros(0, np.float32), *runs])
        self._outer.put(self._start, self._start + theta.size, theta, self._momentum)
        return {NUMBERS: self.mean}


@dataclass(frozen=True, kw_only=True)
class BucketedMeeting:
    """A meeting whose outer parameters can be used before it is done.

    Attributes:
        met: the meeting.
        coming: the mean.
    """

    met: Future[MeetingRecord | None]
    coming: ArrivingMean

    def result(self) -> MeetingRecord | None:
        """See `PendingMeeting`."""
        return self.met.result()

    def run(self, part: Part) -> np.ndarray | None:
        """See `PendingMeeting`."""
        try:
            return self.coming.landing.run(part.path)
        except LaunchError:
            return None


def in_use_order(uses: Iterable[Part], parts: Mapping[str, Part]) -> list[Part]:
    """Parts of parameters, those that are used first in front."""
    paths = dict.fromkeys(use.path for use in uses)
    return [
        parts[path] for path in (*paths, *(p for p in parts if p not in paths)) if path in parts
    ]


# --------------------------------------------------------------------------------------------------
# Exchange with the outer server, in a thread beside the island's steps.

#: Gives the runs of a fragment on the host, float32, one for each parameter in it.
Runs = Callable[[], Sequence[np.ndarray]]


@dataclass(kw_only=True)
class Exchanging:
    """An island between its steps and the outer server.

    Attributes:
        link: to the server.
        number: of the island.
        exchange: how islands meet.
        outline: of the parameters.
        weight: of this island in the mean.
        uses: elements of parameters in the order in which the loss uses them.
        bucket_bytes: of the mean that cross together.
        round: the next one of this island.
        entry: a word of the server for this island, which is named with what is sent.
    """

    link: Link
    number: int
    exchange: DiLoCo
    outline: Outline
    weight: float
    uses: tuple[Part, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    round: int = 0
    entry: str = ""
    _outer: Outer | None = None
    _last: tuple[int, Flat] = field(default_factory=lambda: (0, Flat()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def outer(self) -> Outer:
        """Returns the outer values, as this island has them."""
        assert self._outer is not None, "entered"
        return self._outer

    @property
    def fragment(self) -> int:
        """The number of the fragment of the next round."""
        return self.exchange.fragment(self.round)

    def span(self) -> tuple[int, int]:
        """Returns begin and end of the fragment."""
        return self.outline.span(self.fragment, self.exchange.fragments)

    def parts(self) -> tuple[Part, ...]:
        """The fragment's part of each parameter."""
        return self.outline.parts(self.fragment, self.exchange.fragments)

    def enter(self, first: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Waits for a round to begin, and takes its outer parameters."""
        description, self.entry = About.of(self.exchange, self.outline).text(), ""
        while True:
            ask = Ask(kind="enter", worker=self.number, about=description, start=self.entry)
            answer, arrays = self._ask(ask)
            self.entry = answer.start
            if answer.kind == "ok":
                break
            if answer.kind == "empty":
                offered = {path: np.asarray(array, np.float32) for path, array in first().items()}
                self._ask(Ask(kind="offer", worker=self.number, about=description), offered)
        self.round = answer.round
        # Writable copies: arrays of a frame belong to its body.
        theta, momentum = np.array(arrays["theta"]), np.array(arrays["momentum"])
        self._outer = Outer(theta=theta, momentum=momentum)

    def send(self, runs: Runs) -> PendingMeeting:
        """Meets in a thread: sends the outer gradient of the next round, and does its update.

        Returns:
            The meeting; None where the round was closed without this island.
        """
        parts = self.parts()
        order = mean_order(self.uses, parts, self.exchange.wire, self.bucket_bytes)
        coming = ArrivingMean(self.outer, self.span()[0], parts, self.exchange, order)
        return BucketedMeeting(met=self._threads.submit(self._meet_in, coming, runs), coming=coming)

    def leave(self) -> None:
        """Says that the island is done, and ends the connection."""
        try:
            self.link.ask(Ask(kind="leave", worker=self.number))
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.link.close()

    def _meet_in(self, coming: ArrivingMean, runs: Runs) -> MeetingRecord | None:
        try:
            return self._meet(coming, runs)
        finally:  # who waits for what has not come waits no longer
            coming.landing.fail(LaunchError("the meeting is done"))

    def _meet(self, coming: ArrivingMean, runs: Runs) -> MeetingRecord | None:
        start, stop = self.span()
        parameters = runs()  # waits for the step
        began = time.monotonic()
        flat = np.concatenate(
            [np.zeros(0, np.float32), *(array.reshape(-1) for array in parameters)]
        )
        gradient = self.outer.theta[start:stop] - flat
        sizes = [part.stop - part.start for part in self.parts()]
        finite = bool(np.isfinite(gradient).all())
        sent = pack(gradient, sizes, self.exchange.wire) if finite else Flat()
        base = checksum(self.outer.theta, start, stop)
        answer, arrays = self._mean("send" if finite else "skip", base, sent, coming)
        if answer.kind == "late":
            return None
        if coming.receiver.order:
            arrays = coming.done() if coming.receiver.complete else Flat()
        elif arrays:
            mean = unpack(arrays, sizes, self.exchange.wire)
            self.outer.update(start, stop, mean, self.exchange)
        self._last = base, arrays
        met = MeetingRecord(
            round=self.round,
            fragment=self.fragment,
            islands=answer.islands,
            seconds=time.monotonic() - began,
            finite=finite,
        )
        self.round += 1
        return met

    def _mean(self, kind: str, base: int, sent: Flat, coming: ArrivingMean) -> tuple[Answer, Flat]:
        """Sends, and waits until the round is closed."""
        message_kind, receiver = kind, coming.receiver
        order = order_text(receiver.order) if receiver.order else ""
        arrivals = receiver if receiver.order else None
        while True:
            ask = Ask(
                kind=message_kind,
                worker=self.number,
                start=self.entry,
                round=self.round,
                weight=self.weight,
                base=base,
                about=order,
            )
            answer, arrays = self._ask(ask, sent if message_kind == "send" else None, arrivals)
            if answer.kind in ("ok", "late"):
                return answer, arrays
            if answer.kind == "behind":
                answer = self._repeat()
                if answer.kind == "late":
                    return answer, Flat()
            message_kind = "collect" if answer.kind == "wait" else kind

    def _repeat(self) -> Answer:
        """Tells a server that was started again of the round before."""
        base, arrays = self._last
        ask = Ask(
            kind="repeat", worker=self.number, start=self.entry, round=self.round - 1, base=base
        )
        return self._ask(ask, arrays)[0]

    def _ask(
        self, ask: Ask, arrays: Flat | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        answer, received = self.link.ask(ask, arrays, arrivals)
        if answer.kind in ("refused", "failed"):
            verb = "refuses" if answer.kind == "refused" else "ends"
            raise LaunchError(f"the outer server {verb} island {self.number}: {answer.why}")
        return answer, received


# --------------------------------------------------------------------------------------------------
# Runs of parameters to the host, and outer parameters back into them.
#
# A run may begin and end anywhere in a parameter; what lies outside of it stays as it is. Copies
# are made on the devices, so that a step may donate the parameters while they are on their way.


def copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies in float32, which nothing donates."""
    return [_copy(array) for array in arrays]


def runs(arrays: Sequence[jax.Array], parts: Sequence[Part]) -> list[np.ndarray]:
    """The runs of parameters, on the host."""
    return [
        whole(array).reshape(-1)[part.start : part.stop]
        for array, part in zip(arrays, parts, strict=True)
    ]


def placed_outer(parameter: jax.Array, outer: np.ndarray) -> jax.Array:
    """An outer parameter, placed as the island's is."""
    # A buffer of its own: on CPU devices a placed array may share the host's, which changes.
    return jax.device_put(np.array(outer), parameter.sharding)


def mixed(parameter: jax.Array, placed: jax.Array, part: Part, mixing: float) -> jax.Array:
    """A parameter whose run has become `mixing` times itself and the rest of the outer one;
    `parameter` is donated.
    """
    bounds = (
        None if part.stop - part.start == math.prod(parameter.shape) else (part.start, part.stop)
    )
    return _mixer(parameter.sharding)(parameter, placed, bounds, mixing)


@cache
def _mixer(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    return jax.jit(_mixed, static_argnums=(2, 3), donate_argnums=0, out_shardings=sharding)


def _mixed(parameter: Value, outer: Value, bounds: tuple[int, int] | None, mixing: float) -> Value:
    new = outer_mixed(mixing, parameter, outer).astype(parameter.dtype)
    return new if bounds is None else jnp.where(_within(parameter.shape, *bounds), new, parameter)


def _within(shape: tuple[int, ...], start: int, stop: int) -> Value:
    """Returns the elements with a place from `start` to before `stop`; rows and places in a row are
    told apart, so that no number is larger than an int32.
    """
    each = math.prod(shape[1:])
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    place = jnp.zeros(shape, jnp.int32)
    for dim in range(1, len(shape)):
        stride = math.prod(shape[dim + 1 :])
        place = place + jax.lax.broadcasted_iota(jnp.int32, shape, dim) * stride

    def before(limit: int) -> Value:
        rows, columns = divmod(limit, each)
        return (row < rows) | ((row == rows) & (place < columns))

    return before(stop) & ~before(start)


@jax.jit
def _copy(array: Value) -> Value:
    return jnp.copy(array.astype(jnp.float32))


# --------------------------------------------------------------------------------------------------
# An island that is a process of its own: its planned, sharded program, and its meetings.


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientInFlight:
    """An outer gradient in flight: sent, not yet applied.

    Attributes:
        due: the step after which it is taken in.
        parts: runs of parameters that it is about.
        met: the meeting, once it is done.
    """

    due: int
    parts: tuple[Part, ...]
    met: PendingMeeting


@dataclass(kw_only=True, eq=False)
class Island:
    """One of the islands of a run; the others are processes elsewhere.

    Attributes:
        program: of this island.
        exchanging: its way to the outer server.
        findings: what it has to say.
        say: is told what happens.
        steps: of the run, so far: where this island has come late, it begins where the others are.
        meetings: of this island, in order.
        events: what has happened and somebody should know.
    """

    program: Program
    exchanging: Exchanging
    findings: tuple[Finding, ...] = ()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    steps: int = 0
    meetings: list[MeetingRecord] = field(default_factory=list[MeetingRecord])
    events: list[str] = field(default_factory=list[str])
    _crossing: GradientInFlight | None = None

    @property
    def number(self) -> int:
        """Of this island, from 0 on."""
        return self.exchanging.number

    @property
    def exchange(self) -> DiLoCo:
        """Returns the exchange of the islands."""
        return self.exchanging.exchange

    @property
    def round(self) -> int:
        """The round that comes next, from 1 on."""
        return self.exchanging.round

    def start(self, seed: int = 0) -> TrainState:
        """Waits for the others, and makes the state before the first step: parameters are the outer
        ones, random streams of the model are others on each island.
        """
        return self.begin(with_own_streams(self.number, self.program.init(seed)))

    def begin(self, state: TrainState) -> TrainState:
        """Waits for the others, and goes on from a state, such as one of a checkpoint: its
        parameters become the outer ones, the rest stays.
        """
        self.exchanging.enter(lambda: self._on_host(state))
        self.steps = (self.round - 1) * self.exchange.between
        return self.outer(state)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """Runs one step of this island, then sends and receives what is due."""
        if not self.round:
            raise StateError("the island has not started\nTry: state = island.start(seed=0)")
        state, metrics = self.program.step(state, batch)
        self.steps += 1
        if self._crossing is not None and self.steps >= self._crossing.due:
            state, on_time = self._taken(state)
            if not on_time:
                return state, metrics
        if self.exchange.due(self.steps) is not None:
            self._crossing = self._sent(state)
            if not self.exchange.delay:
                state, _ = self._taken(state)
        return state, metrics

    def finish(self, state: TrainState) -> TrainState:
        """Takes in what is still crossing, and leaves: the others go on without this island."""
        if self._crossing is not None:
            state, _ = self._taken(state, again=False)
        try:
            self.exchanging.leave()
        except LaunchError as error:  # the state is worth more
            self._note(f"island {self.number} cannot say that it leaves: {error}")
        return state

    def outer(self, state: TrainState) -> TrainState:
        """The state with the outer parameters, those of the last meeting; see
        `Program.evaluate`.
        """
        if self._crossing is not None:
            self._crossing.met.result()
        outer = self.exchanging.outline.arrays(self.exchanging.outer.theta)
        copied = {path: np.array(array) for path, array in outer.items()}
        return replace(state, params=with_trained(self.program, state.params, copied))

    def module(self, state: TrainState) -> UserModule:
        """The user's own model with the outer parameters."""
        return self.program.module(self.outer(state))

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *raised: object) -> None:
        self.exchanging.close()

    def _sent(self, state: TrainState) -> GradientInFlight:
        """Sends the fragment of the next round, once the devices have it."""
        exchanging, leaves = self.exchanging, self._leaves(state)
        parts = exchanging.parts()
        arrays = copies([leaves[part.path] for part in parts])
        return GradientInFlight(
            due=self.steps + self.exchange.delay,
            parts=parts,
            met=exchanging.send(lambda: runs(arrays, parts)),
        )

    def _taken(self, state: TrainState, *, again: bool = True) -> tuple[TrainState, bool]:
        """The state with what has crossed, and whether this island was in time; where it was not,
        it begins the next round with the others.
        """
        assert self._crossing is not None
        began, crossing = time.monotonic(), self._crossing
        placed = self._placed(crossing, self._leaves(state))
        met, self._crossing = crossing.met.result(), None
        if met is None:
            self._note(f"round {self.round} was closed without island {self.number}")
            if again:
                state = self.begin(state)
                self._note(f"island {self.number} begins round {self.round}")
            return state, False
        self.meetings.append(replace(met, waited_s=time.monotonic() - began))
        mixing = self.exchange.mixing if self.exchange.delay and met.finite else 0.0
        outer = self.exchanging.outline.arrays(self.exchanging.outer.theta)
        leaves = self._leaves(state)
        for part in crossing.parts:
            parameter, there = leaves[part.path], placed.get(part.path)
            there = placed_outer(parameter, outer[part.path]) if there is None else there
            leaves[part.path] = mixed(parameter, there, part, mixing)
        return replace(state, params=with_placed(self.program, state.params, leaves)), True

    def _placed(
        self, crossing: GradientInFlight, leaves: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Outer parameters, each placed as soon as it has come, those that are used first in front;
        not all of them where the meeting ends otherwise.
        """
        placed, exchanging = dict[str, jax.Array](), self.exchanging
        before = exchanging.outline.arrays(exchanging.outer.theta)
        for part in in_use_order(exchanging.uses, {part.path: part for part in crossing.parts}):
            run = crossing.met.run(part)
            if run is None:
                break
            array = before[part.path]
            if run.size == array.size:
                array = run.reshape(array.shape)
            else:
                array = np.array(array)
                array.reshape(-1)[part.start : part.stop] = run
            placed[part.path] = placed_outer(leaves[part.path], array)
        return placed

    def _leaves(self, state: TrainState) -> dict[str, jax.Array]:
        return by_path(self.program.model.partition.trained(state.params))

    def _on_host(self, state: TrainState) -> dict[str, np.ndarray]:
        return {path: whole(leaf).astype(np.float32) for path, leaf in self._leaves(state).items()}

    def _note(self, text: str) -> None:
        self.events.append(text)
        if is_first():
            self.say(text)


# --------------------------------------------------------------------------------------------------
# An island of several processes: the first of them speaks to the outer server, and the others hear
# from it.
#
# Parameters are gathered to the hosts in the step after which they are sent, by all processes;
# what crosses is in a thread of the first. All of them wait for it in the step in which it is
# taken in, and get the outer parameters of the fragment from the first.

#: Numbers that the first process says of a meeting: in time, its round, finite, islands in it.
SAID = 4


@dataclass(kw_only=True)
class SeveralProcesses(Exchanging):
    """An island's way to the outer server, where it has several processes; all of them make the
    same calls in the same order.
    """

    def enter(self, first: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """See `Exchanging.enter`; `first` gathers parameters from all processes."""
        parameters, enter = first(), super().enter
        first_decides("the entry of an island", lambda: enter(lambda: parameters))
        number = _of_first(np.int32(self.round))
        theta = self.outer.theta if is_process_zero() else np.zeros(self.outline.total, np.float32)
        theta = _of_first(theta)
        if not is_process_zero():
            self.round, self._outer = int(number), Outer.first(theta)

    def send(self, runs: Runs) -> PendingMeeting:
        """See `Exchanging.send`; `runs` gathers parameters from all processes, before this
        returns.
        """
        parameters, span, fragment = runs(), self.span(), self.fragment
        crossed = super().send(lambda: parameters) if is_process_zero() else None
        return BroadcastMeeting(island=self, crossed=crossed, span=span, fragment=fragment)

    def leave(self) -> None:
        """See `Exchanging.leave`."""
        if is_process_zero():
            super().leave()


@dataclass(kw_only=True)
class BroadcastMeeting:
    """A meeting, which all processes hear of.

    Attributes:
        island: of this process.
        crossed: the meeting, in the first process.
        span: of the fragment.
        fragment: its number.
    """

    island: SeveralProcesses
    crossed: PendingMeeting | None
    span: tuple[int, int]
    fragment: int
    _met: tuple[MeetingRecord | None] | None = None

    def result(self) -> MeetingRecord | None:
        """The meeting, once it is done; to be called by all."""
        if self._met is None:
            self._met = (self._heard(),)
        return self._met[0]

    def run(self, part: Part) -> np.ndarray | None:
        """None: all processes hear of a meeting as a whole."""
        return None

    def _heard(self) -> MeetingRecord | None:
        crossed, (start, stop) = self.crossed, self.span
        met = first_decides("a meeting", crossed.result if crossed is not None else _nothing)
        header = np.zeros(SAID, np.int32)
        if met is not None:
            header[:] = 1, met.round, met.finite, len(met.islands)
        in_time, number, finite, _ = (int(field) for field in _of_first(header))
        if not in_time:
            return None
        theta = _of_first(self.island.outer.theta[start:stop])
        if is_process_zero():
            return met
        self.island.outer.theta[start:stop] = theta
        self.island.round = number + 1
        return MeetingRecord(
            round=number, fragment=self.fragment, islands=(), seconds=0.0, finite=bool(finite)
        )


def _nothing() -> None:
    """Stands in for the exchange on processes that are not the first."""


def _of_first(array: np.ndarray | np.int32) -> np.ndarray:
    """Returns an array of the first process, on all."""
    return np.array(jax.device_get(multihost_utils.broadcast_one_to_all(array)))
