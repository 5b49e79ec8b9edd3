"""Rounds of islands that are processes of their own: attendance, outer parameters, the wire form of
vectors, and the service of the outer server. Free of JAX.

Islands train apart, and send an outer gradient (outer parameters as they last had them, minus their
own) every so many steps. A *round* is about one fragment of the parameters, and has one mean:

    enter                                -> waits for the next round; parameters, momentum, number
    inner steps
    send(round, outer gradient, weight)  -> waits until all that are there have sent, or for
                                            `timeout_s` after the first, with at least `quorum`;
                                            the outer update by d, their weighted mean
                                         <- d, as rounded for the link, and who was in it
    the same update of its own copy, so that theta never crosses again

Both ends do the same sums in the same order, so that outer parameters are alike bit for bit. Whose
round is over, who comes back or comes late enters again, and begins the next with the others.

`Outer` has the parameters that all islands start a round from, and the momentum of their update.

Islands and the server each have a copy, and do the same sums in the same order.

>>> import numpy as np
>>> from shardlib.islands.exchanges import DiLoCo
>>> outer = Outer.first(np.float32([1.0, 1.0]))
>>> outer.update(0, 2, np.float32([0.5, 0.5]), DiLoCo(rate=1.0, momentum=0.5, every=1))
>>> outer.theta.tolist(), outer.momentum.tolist()
([0.25, 0.25], [0.5, 0.5])

An `Outline` is all parameters as one vector, with the fragments of it that meet together.

Parameters stand one after the other, by path, each flattened. A fragment is an equal run of all
elements, wherever it begins and ends: each is as large as the others to an element, so that the
peak of a link is as low as it can be, and it is the same whatever the plans of the islands are,
which may differ. What the server does is done element by element.

>>> outline = Outline(paths=("a", "b"), shapes=((2, 3), (4,)))
>>> [str(part) for part in outline.parts(0, 2)], outline.span(1, 2)
(['a[0:5]'], (5, 10))

`pack` makes the wire form of a vector: float32, bfloat16, or int8 and int4 in blocks that have a
scale each.

Rounding is that of meetings in one process (`shardlib.islands.meeting`), by arrays
of NumPy: blocks are those of one parameter, half of the smallest step rounds to even.

>>> import numpy as np
>>> sent = pack(np.float32([1.0, -0.5, 0.26]), [2, 1], "int8")
>>> {name: array.size for name, array in sent.items()}  # blocks of 256
{'numbers': 512, 'scales': 2}
>>> [round(float(one), 4) for one in unpack(sent, [2, 1], "int8")]
[1.0, -0.5039, 0.26]

`Attendance` says which islands are in a round, which have sent, and when it closes.

Islands begin a round together. Who comes while one is open waits for the next, so that nobody waits
for somebody who has just begun; where too few are in a round for its quorum, or they have waited
for `gather_s`, it takes them in. An island that sends nothing until the timeout is left out, and
enters again once it is back.

>>> from shardlib.islands.servers.rounds import Rounds
>>> now = [0.0]
>>> table = Attendance(islands=2, rounds=Rounds(timeout_s=5), now=lambda: now[0])
>>> table.come(0), table.come(1), sorted(table.active)
(None, None, [0, 1])
>>> table.send(0)
>>> table.closes(), now.append(now.pop() + 5), table.closes()
(False, None, True)
>>> table.close(), table.number, sorted(table.active)
([1], 2, [0])
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from shardlib.errors import ArgumentError, CheckpointError, PinError, raise_all
from shardlib.islands.exchanges import (
    BLOCK,
    DiLoCo,
    Part,
    between,
    blocks,
    one_of,
    read_exchange,
    spaces,
    whole,
)
from shardlib.islands.outer import narrow, outer_update, widen
from shardlib.islands.servers.service import (
    VERSION,
    MessageService,
    packed_file,
    read_file,
)
from shardlib.islands.servers.wire import (
    Answer,
    Ask,
    Flat,
    RefusedError,
    gathered,
    owned,
    read_order,
)
from shardlib.processes.wire import Outgoing
from shardlib.untrusted.data import JsonObject, Limits, construct, parse_json


@dataclass(kw_only=True)
class Outer:
    """Outer parameters.

    Attributes:
        theta: the parameters, one vector.
        momentum: of their update.
    """

    theta: np.ndarray
    momentum: np.ndarray

    @staticmethod
    def first(theta: np.ndarray) -> Outer:
        """Parameters before the first round."""
        return Outer(theta=np.array(theta), momentum=np.zeros_like(theta))

    def after(
        self, start: int, stop: int, gradient: np.ndarray, exchange: DiLoCo
    ) -> tuple[np.ndarray, np.ndarray]:
        """A run of parameters and momentum after an outer gradient; new arrays."""
        theta, momentum = self.theta[start:stop], self.momentum[start:stop]
        with np.errstate(over="ignore", invalid="ignore"):
            return outer_update(exchange, gradient, theta, momentum)

    def update(self, start: int, stop: int, gradient: np.ndarray, exchange: DiLoCo) -> None:
        """Runs the outer update of a run; arguments as those of `after`."""
        self.put(start, stop, *self.after(start, stop, gradient, exchange))

    def put(self, start: int, stop: int, theta: np.ndarray, momentum: np.ndarray) -> None:
        """Replaces a run of parameters and momentum."""
        self.theta[start:stop], self.momentum[start:stop] = theta, momentum


def checksum(theta: np.ndarray, start: int, stop: int) -> int:
    """A number that a run of other parameters does not have: both ends compare theirs, so that no
    mean is taken of gradients that belong to others.
    """
    return zlib.crc32(theta[start:stop].view(np.uint8).data)


def mean(vectors: Mapping[int, tuple[float, np.ndarray]]) -> np.ndarray:
    """The weighted mean of outer gradients, whoever came first."""
    total = sum(weight for weight, _ in vectors.values())
    total_vector: np.ndarray | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for island in sorted(vectors):
            weight, vector = vectors[island]
            part = np.float32(weight / total) * vector
            total_vector = part if total_vector is None else total_vector + part
    assert total_vector is not None
    return total_vector


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Paths and shapes of trained parameters.

    Attributes:
        paths: in their order.
        shapes: of each.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> Outline:
        """The outline of parameters."""
        paths = tuple(sorted(shapes))
        return Outline(paths=paths, shapes=tuple(shapes[path] for path in paths))

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each parameter, by path."""
        return {p: math.prod(shape) for p, shape in zip(self.paths, self.shapes, strict=True)}

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """A word that parameters of other paths or shapes do not have."""
        text = json.dumps([[p, list(s)] for p, s in zip(self.paths, self.shapes, strict=True)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def parts(self, fragment: int, fragments: int) -> tuple[Part, ...]:
        """Returns a fragment's part of each parameter."""
        return owned(self.sizes, fragments)[fragment]

    def span(self, fragment: int, fragments: int) -> tuple[int, int]:
        """Returns begin and end of a fragment in the vector."""
        total = self.total
        return total * fragment // fragments, total * (fragment + 1) // fragments

    def vector(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Arrays as one vector of float32."""
        flat = [np.asarray(arrays[path], np.float32).reshape(-1) for path in self.paths]
        return np.concatenate([np.zeros(0, np.float32), *flat])

    def arrays(self, vector: np.ndarray) -> Flat:
        """The arrays of a vector, with their shapes; views of it."""
        arrays, start = Flat(), 0
        for path, shape in zip(self.paths, self.shapes, strict=True):
            size = math.prod(shape)
            arrays[path] = vector[start : start + size].reshape(shape)
            start += size
        return arrays


def pack(vector: np.ndarray, sizes: Sequence[int], wire: str) -> Flat:
    """A vector as arrays that cross."""
    if wire == "float32":
        return {"numbers": vector}
    rows = (_padded(vector, sizes) if blocks(wire) else vector)[None]
    with np.errstate(over="ignore", invalid="ignore"):
        numbers, scales = narrow(rows, wire)
    return (
        {"numbers": numbers[0]} if scales is None else {"numbers": numbers[0], "scales": scales[0]}
    )


def unpack(arrays: Mapping[str, np.ndarray], sizes: Sequence[int], wire: str) -> np.ndarray:
    """The vector of what `pack` gave; float32."""
    _require_form(arrays, sizes, wire)
    numbers = arrays["numbers"]
    if wire == "float32":
        return numbers
    if not blocks(wire):
        return widen(numbers[None], None, wire)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        padded = widen(numbers[None], arrays["scales"][None], wire)[0]
    return _without_padding(padded, sizes)


def _require_form(arrays: Mapping[str, np.ndarray], sizes: Sequence[int], wire: str) -> None:
    count = sum(spaces(wire, sizes))
    expected = {"numbers": (_DTYPES[wire], count // 2 if wire == "int4" else count)}
    if blocks(wire):
        expected["scales"] = (np.dtype(np.float32), count // BLOCK)
    received = {
        name: (array.dtype, array.size) for name, array in arrays.items() if array.ndim == 1
    }
    if received != expected or len(arrays) != len(expected):
        described = ", ".join(
            f"{name} of {size} {dtype}" for name, (dtype, size) in expected.items()
        )
        raise RefusedError(f"the arrays are not {wire} of this fragment, which has {described}")


_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8),
}


def _padded(vector: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The parameters of a vector, each with zeros to whole blocks."""
    padded_sizes = spaces("int8", sizes)
    padded, start, place = np.zeros(sum(padded_sizes), np.float32), 0, 0
    for size, space in zip(sizes, padded_sizes, strict=True):
        padded[place : place + size] = vector[start : start + size]
        start, place = start + size, place + space
    return padded


def _without_padding(padded: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    vector, place = np.empty(sum(sizes), np.float32), 0
    start = 0
    for size, space in zip(sizes, spaces("int8", sizes), strict=True):
        vector[start : start + size] = padded[place : place + size]
        start, place = start + size, place + space
    return vector


# --------------------------------------------------------------------------------------------------
# State of the outer server: its exchange, outer parameters, and what came in a round.


@dataclass(frozen=True, kw_only=True)
class About:
    """An island as it introduces itself.

    Attributes:
        exchange: as plain data, in one text.
        digest: of the outline of its parameters.
    """

    exchange: str
    digest: str

    @staticmethod
    def of(exchange: DiLoCo, outline: Outline) -> About:
        """Of an island that trains the parameters of an outline."""
        return About(exchange=json.dumps(exchange.to_json()), digest=outline.digest)

    def text(self) -> str:
        """As it is sent."""
        return json.dumps([self.exchange, self.digest])


#: Why a round changes nothing.
NOT_FINITE = "with it, outer parameters would not be finite"


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """A round that has closed.

    Attributes:
        number: of the round.
        islands: whose outer gradients are in the mean.
        sent: who has sent, also what was not finite.
        arrays: the mean as it crosses; none where it changed nothing.
    """

    number: int
    islands: tuple[int, ...]
    sent: tuple[int, ...]
    arrays: Flat


@dataclass(kw_only=True)
class RoundState:
    """The outer values, and the open round.

    Attributes:
        exchange: how islands meet.
        outline: of the parameters.
        outer: parameters and momentum.
        era: a word of these rounds; another one where some were lost.
        entries: of each island, the number of its newest entry.
        gradients: of the open round, with their weights.
        last: the round that has closed last.
    """

    exchange: DiLoCo
    outline: Outline
    outer: Outer
    era: str = field(default_factory=lambda: secrets.token_hex(8))
    entries: dict[int, int] = field(default_factory=dict[int, int])
    gradients: dict[int, tuple[float, np.ndarray]] = field(
        default_factory=dict[int, "tuple[float, np.ndarray]"]
    )
    last: ClosedRound | None = None
    _base: tuple[int, int] = (0, 0)

    @staticmethod
    def offered(text: str, arrays: Mapping[str, np.ndarray], islands: int) -> RoundState:
        """Begins with the parameters of an island."""
        description = read_about(text)
        exchange = exchange_of(description.exchange)
        outline = Outline.of({path: array.shape for path, array in arrays.items()})
        wrong = [path for path, array in arrays.items() if array.dtype != np.float32]
        if wrong or outline.digest != description.digest or not arrays:
            raise RefusedError("what is offered is not what it says, or is not float32")
        if exchange.islands != islands:
            raise RefusedError(
                f"its exchange is of {exchange.islands} islands, and this run is of {islands}"
            )
        theta = outline.vector(arrays)
        if not np.isfinite(theta).all():
            raise RefusedError("what is offered is not finite")
        return RoundState(exchange=exchange, outline=outline, outer=Outer.first(theta))

    def require_same(self, text: str) -> None:
        """Refuses an island of another run."""
        description = read_about(text)
        theirs = exchange_of(description.exchange)
        if theirs != self.exchange:
            raise RefusedError(f"its exchange is {theirs}, and that of this run {self.exchange}")
        if description.digest != self.outline.digest:
            raise RefusedError(
                "it trains other parameters than this run, by path or shape; this run has"
                f" {len(self.outline.paths)} of {self.outline.total:,} elements"
            )

    def entry(self, island: int, word: str) -> str:
        """The word of an island's entry, which it names with what it sends."""
        if island not in self.entries or word != f"{self.era}.{self.entries[island]}":
            self.entries[island] = max(self.entries.values(), default=0) + 1
        return f"{self.era}.{self.entries[island]}"

    def knows(self, island: int, word: str) -> bool:
        """Returns whether a word is that of an island's newest entry."""
        era, _, number = word.partition(".")
        newest = self.entries.get(island, 0)
        if era == self.era and number.isdigit() and int(number) < newest:
            raise RefusedError("another process has entered as this island since")
        return word == f"{self.era}.{newest}"

    def sizes(self, number: int) -> list[int]:
        """Elements of each parameter in the fragment of a round."""
        parts = self.outline.parts(self.exchange.fragment(number), self.exchange.fragments)
        return [part.stop - part.start for part in parts]

    def base(self, number: int) -> int:
        """The checksum of the outer parameters that a round begins with, those of its fragment."""
        if self._base[0] != number:
            self._base = number, checksum(self.outer.theta, *self.span(number))
        return self._base[1]

    def unpacked(self, number: int, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """An outer gradient as it came."""
        return unpack(arrays, self.sizes(number), self.exchange.wire)

    def repeat(self, number: int, arrays: Mapping[str, np.ndarray], islands: Iterable[int]) -> None:
        """Runs the outer update of a round whose mean is known; nothing where it changed
        nothing.
        """
        self.gradients = {}
        if arrays and not self._updated(number, arrays):
            raise RefusedError(NOT_FINITE)
        everyone = tuple(islands)
        self.last = ClosedRound(number=number, islands=everyone, sent=everyone, arrays=dict(arrays))

    def _updated(self, number: int, arrays: Mapping[str, np.ndarray]) -> bool:
        """Runs the outer update by a mean as it crosses; False, and nothing has changed, where
        outer parameters would not be finite.
        """
        span, gradient = self.span(number), self.unpacked(number, arrays)
        theta, momentum = self.outer.after(*span, gradient, self.exchange)
        if not np.isfinite(theta).all() or not np.isfinite(momentum).all():
            return False
        self.outer.put(*span, theta, momentum)
        return True

    def span(self, number: int) -> tuple[int, int]:
        """Returns begin and end of the fragment of a round."""
        return self.outline.span(self.exchange.fragment(number), self.exchange.fragments)

    def close(self, number: int, sent: tuple[int, ...]) -> tuple[ClosedRound, str]:
        """Runs the outer update with what has arrived."""
        gradients, self.gradients = self.gradients, {}
        arrays, why = Flat(), "" if gradients else "no outer gradient was finite"
        if gradients:
            arrays = pack(mean(gradients), self.sizes(number), self.exchange.wire)
            if not self._updated(number, arrays):
                arrays, why = Flat(), NOT_FINITE
        self.last = ClosedRound(
            number=number, islands=tuple(sorted(gradients)), sent=sent, arrays=arrays
        )
        return self.last, why


def read_about(text: str) -> About:
    """Reads the text by which an island introduces itself."""
    limits = Limits(bytes=1 << 16, depth=8)
    data = parse_json(text, "what it says of itself", RefusedError, limits=limits)
    return construct(About, data, "what it says of itself", RefusedError)


def exchange_of(text: str) -> DiLoCo:
    """The exchange of a text."""
    data = parse_json(text, "its exchange", RefusedError, limits=Limits(bytes=1 << 16, depth=4))
    try:
        exchange = read_exchange("exchange", data)
    except PinError as error:
        raise RefusedError(str(error)) from error
    if not isinstance(exchange, DiLoCo):
        raise RefusedError(f"its exchange is {exchange}, and islands over a server meet as DiLoCo")
    return exchange


# --------------------------------------------------------------------------------------------------
# Timeouts of rounds, and their quorum.

#: What follows where a round has too few islands.
Short = Literal["wait", "fail"]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Options of the rounds of islands.

    Attributes:
        timeout_s: seconds that a round waits after the first outer gradient for islands that are
            there and have sent none.
        away_s: seconds that a round waits for an island whose connection has closed.
        gather_s: seconds that the first round waits for islands that have not come; they begin
            together.
        quorum: least islands that send in a round.
        short: "wait": a round without its quorum waits for islands to come; "fail": after its
            timeout all islands end with an error.
        save_every: rounds between two checkpoints; with 1 a round is on disk before it is answered.
        restarts: how often the server may be started again.

    Raises:
        ArgumentError: values out of range; all of them are listed.
    """

    timeout_s: float = 60.0
    away_s: float = 10.0
    gather_s: float = 600.0
    quorum: int = 1
    short: Short = "wait"
    save_every: int = 1
    restarts: int = 3

    def __post_init__(self) -> None:
        failures = [
            *between("timeout_s", self.timeout_s, most=math.inf, above=True),
            *between("away_s", self.away_s, most=math.inf, above=False),
            *between("gather_s", self.gather_s, most=math.inf, above=True),
            *whole("quorum", self.quorum, 1),
            *one_of("short", self.short, get_args(Short)),
            *whole("save_every", self.save_every, 1),
            *whole("restarts", self.restarts, 0),
        ]
        if failures:
            raise_all(ArgumentError, "Rounds is not usable", failures)

    def to_json(self) -> JsonObject:
        """The settings as plain data."""
        return asdict(self)


@dataclass(kw_only=True)
class Attendance:
    """The open round; used by one thread at a time.

    Attributes:
        islands: how many there may be.
        rounds: how long a round waits, and for how many.
        number: of the open round, from 1 on.
        active: islands that have begun it.
        waiting: islands that wait for a round, since when.
        away: islands whose connection has closed, since when.
        sent: islands that have sent.
        first: when the first of them did.
        now: seconds of a clock.
    """

    islands: int
    rounds: Rounds
    number: int = 1
    active: set[int] = field(default_factory=set[int])
    waiting: dict[int, float] = field(default_factory=dict[int, float])
    away: dict[int, float] = field(default_factory=dict[int, float])
    sent: set[int] = field(default_factory=set[int])
    first: float | None = None
    now: Callable[[], float] = time.monotonic

    def come(self, island: int) -> None:
        """An island is there, and wants to begin a round."""
        self.active.discard(island)
        self.waiting.setdefault(island, self.now())
        self.admit()

    def admit(self) -> None:
        """Takes in who waits, where it is time to."""
        if self.active or self.sent:
            short = len(self.active | self.sent) < self.rounds.quorum
            ready = short or self.gathered()  # those who are in it may never send
        else:
            all_there = len(self.waiting) >= self.islands
            ready = all_there or (self.gathered() and len(self.waiting) >= self.rounds.quorum)
        if ready:
            self.active |= self.waiting.keys()
            self.waiting.clear()

    def gathered(self) -> bool:
        """Returns whether islands that have come have waited long enough for the others, or for the
        open round to close.
        """
        oldest = min(self.waiting.values(), default=self.now())
        return self.now() - oldest >= self.rounds.gather_s

    def send(self, island: int) -> None:
        """An island has sent, or says that it has nothing to send."""
        if self.first is None:
            self.first = self.now()
        self.sent.add(island)

    def gone(self, island: int) -> None:
        """An island has left; what it has sent stays."""
        self.active.discard(island)
        self.waiting.pop(island, None)
        self.away.pop(island, None)
        if not self.active:
            self.first = None  # who comes next has its time

    def gone_for_good(self) -> list[int]:
        """Leaves out islands that have been away for too long; gives them."""
        limit = self.now() - self.rounds.away_s
        absent = [island for island, since in self.away.items() if since <= limit]
        for island in absent:
            self.gone(island)
        return absent

    def late(self) -> bool:
        """Returns whether the round has waited long enough."""
        return self.first is not None and self.now() - self.first >= self.rounds.timeout_s

    def enough(self) -> bool:
        """Returns whether the round has its quorum."""
        return len(self.sent) >= self.rounds.quorum

    def fails(self) -> str:
        """Returns the reason why islands that wait are to end; empty where they are not."""
        rounds, minimum = self.rounds, f"of at least {self.rounds.quorum}"
        if rounds.short != "fail":
            return ""
        if self.late() and not self.enough():
            state = f"round {self.number} has {len(self.sent)} {minimum} islands"
            return f"{state} {rounds.timeout_s:g} s after the first"
        begun = self.active or self.sent
        if not begun and self.gathered() and len(self.waiting) < rounds.quorum:
            return f"{len(self.waiting)} {minimum} islands have come in {rounds.gather_s:g} s"
        return ""

    def closes(self) -> bool:
        """Returns whether nothing is to be waited for any more."""
        return self.enough() and (self.active <= self.sent or self.late())

    def stalled(self) -> list[int]:
        """Leaves out islands that have sent nothing in a round that is late and short, so that it
        takes in others; gives them.
        """
        if not self.late() or self.enough():
            return []
        out = sorted(self.active - self.sent)
        self.active &= self.sent
        return out

    def reopen(self) -> None:
        """Opens the next round for the same islands."""
        self._next(self.active)

    def close(self) -> list[int]:
        """Opens the next round, and gives the islands that were in this one and have sent nothing;
        they are in no round.
        """
        out = sorted(self.active - self.sent)
        self._next(self.active & self.sent)
        return out

    def _next(self, stay: set[int]) -> None:
        """Opens the next round for islands that stay, and those that wait."""
        self.active = stay | self.waiting.keys()
        self.waiting.clear()
        self.sent.clear()
        self.first = None
        self.number += 1


# --------------------------------------------------------------------------------------------------
# The outer server's checkpoint. It has the outer parameters by path, their momentum, and the round
# that has closed last, so that islands which have not heard its mean hear it from a server that was
# started again.

FILE = "outer.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoredAbout:
    """Facts in a checkpoint beside its arrays.

    Attributes:
        version: of the form of the file.
        exchange: as plain data, in one text.
        era: see `RoundState`.
        entries: pairs of an island and its newest entry.
        round: that is open.
        active: islands that have begun it.
        islands: in the mean of the round before.
        sent: who has sent in it.
    """

    version: int
    exchange: str
    era: str
    entries: tuple[tuple[int, int], ...]
    round: int
    active: tuple[int, ...]
    islands: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(kw_only=True)
class Checkpoint:
    """The file of a checkpoint, written in a thread: islands do not wait for the disk. A server
    that ends before is one round behind, and hears that round from an island.

    Attributes:
        replace: (content, moment) -> nothing; writes the file.
    """

    replace: Callable[[bytes, str], None]
    _writing: threading.Thread | None = None

    def save(self, state: RoundState, number: int, active: Sequence[int]) -> None:
        """Begins to write what there is now, once the one before is written."""
        self.wait()
        outer = Outer(theta=state.outer.theta.copy(), momentum=state.outer.momentum.copy())
        frozen = replace(state, outer=outer, entries=dict(state.entries), gradients={})
        arguments = (frozen, number, tuple(active))
        self._writing = threading.Thread(target=self._write, args=arguments)
        self._writing.start()

    def wait(self) -> None:
        """Waits until it is on disk."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, state: RoundState, number: int, active: Sequence[int]) -> None:
        self.replace(packed_state(state, number, active), f"before round {number}")


def packed_state(state: RoundState, number: int, active: Sequence[int]) -> bytes:
    """The checkpoint of a server, all of it."""
    last = state.last
    header = {
        "exchange": json.dumps(state.exchange.to_json()),
        "era": state.era,
        "entries": [list(pair) for pair in state.entries.items()],
        "round": number,
        "active": list(active),
        "islands": [] if last is None else list(last.islands),
        "sent": [] if last is None else list(last.sent),
    }
    arrays = {
        "outer": state.outline.arrays(state.outer.theta),
        "momentum": state.outline.arrays(state.outer.momentum),
        "mean": {} if last is None else last.arrays,
    }
    return packed_file(header, arrays)


def restored(path: Path) -> tuple[RoundState, int, tuple[int, ...]] | None:
    """Reads a checkpoint: the outer values, the open round, islands that have begun it; None where
    there is none.
    """
    stored = read_file(path, StoredAbout, ("outer", "momentum", "mean"))
    if stored is None:
        return None
    what = f"the checkpoint {path}"
    header, (theta, momentum, mean_arrays) = stored
    outline = Outline.of({name: array.shape for name, array in theta.items()})
    if header.version != VERSION or theta.keys() != momentum.keys():
        raise CheckpointError(f"{what} has another form than version {VERSION}")
    try:
        exchange = exchange_of(header.exchange)
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be used: {error}") from error
    state = RoundState(
        exchange=exchange,
        outline=outline,
        outer=Outer(theta=outline.vector(theta), momentum=outline.vector(momentum)),
        era=header.era,
        entries=dict(header.entries),
    )
    if header.sent:
        state.last = ClosedRound(
            number=header.round - 1, islands=header.islands, sent=header.sent, arrays=mean_arrays
        )
    return state, header.round, header.active


# --------------------------------------------------------------------------------------------------
# From a message of an island to its answer: what the outer server does, whatever carries messages.
#
# | asked     | of an island                            | answered                              |
# |-----------|-----------------------------------------|---------------------------------------|
# | `enter`   | its exchange and outline (`about`)      | `wait`; `empty`; or what is outer     |
# | `offer`   | parameters to begin with, where `empty` |                                       |
# | `send`    | an outer gradient, its round and weight | the mean; `wait`; `late`; `again`     |
# | `skip`    | that its outer gradient is not finite   | the same                              |
# | `collect` | whether the round is closed             | the same                              |
# | `repeat`  | the mean of the round before, `behind`  |                                       |
# | `leave`   | that it is done                         |                                       |
#
# `late`: the round was closed without it, and it enters again. `again`: the server was started
# again, and does not have what it had sent; `behind`: nor the round before. `failed`: there are
# too few islands. What is `refused` has changed nothing. Questions are held for up to
# `HOLD_SECONDS`.

#: Seconds for which an island that waits is not answered; then it asks again.
HOLD_SECONDS = 10.0
#: Seconds between two looks at the clock.
LOOK_SECONDS = 0.2


@dataclass(kw_only=True)
class RoundService(MessageService):
    """The outer server without its connections.

    Attributes:
        islands: how many there may be.
        rounds: for how long they wait, and for how many.
        closed: is told of each round that has closed.
    """

    asker = "island"

    islands: int
    rounds: Rounds = field(default_factory=Rounds)
    closed: Callable[[ClosedRound], None] = lambda last: None

    def __post_init__(self) -> None:
        self.table = Attendance(islands=self.islands, rounds=self.rounds)
        self.state: RoundState | None = None
        self._changed = threading.Condition()
        path = self.checkpoint
        self._file = None if path is None else Checkpoint(replace=self.replace_checkpoint)
        stored = None if path is None else restored(path)
        if stored is not None:
            self.state, self.table.number, active = stored
            if self.rounds.save_every == 1:
                self.table.active = set(active)
            else:  # rounds may be lost, and islands have to begin anew
                self.state.era = secrets.token_hex(8)
            self.note(f"it goes on at its checkpoint, before round {self.table.number}")

    @property
    def askers(self) -> int:
        """Number of islands that may ask."""
        return self.islands

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the parameters; None before they are known."""
        return None if self.state is None else self.state.outer.theta.nbytes

    @property
    def progress(self) -> Answer:
        """The open round."""
        return Answer(round=self.table.number)

    def answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        """Answers a message of an island."""
        with self._changed:
            self.table.away.pop(ask.worker, None)
            return self._answered(ask, arrays)

    def gone(self, who: int) -> None:
        """The connection of an island has closed; it is not waited for, if it does not come
        back.
        """
        with self._changed:
            self.table.waiting.pop(who, None)
            if who in self.table.active:
                self.table.away[who] = self.table.now()
            self._tick()

    def save(self) -> None:
        """Writes the checkpoint, where there are parameters and a place for it."""
        with self._changed:
            self._save()
            if self._file is not None:
                self._file.wait()

    def _answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        if ask.kind == "enter":
            return self._enter(ask)
        if ask.kind == "offer":
            if self.state is None:
                self.state = RoundState.offered(ask.about, arrays, self.islands)
                self._save()
            return Answer(), {}
        if ask.kind in ("send", "skip", "collect"):
            return self._met(ask, arrays)
        if ask.kind == "repeat":
            return self._repeated(ask, arrays), {}
        if ask.kind == "leave":
            self.table.gone(ask.worker)
            self._tick()
            return Answer(), {}
        if ask.kind == "report":
            return replace(self.progress, report=self.report()), {}
        raise RefusedError("there is no such message")

    def _enter(self, ask: Ask) -> tuple[Answer, Flat]:
        if self.state is None:
            return Answer(kind="empty"), {}
        self.state.require_same(ask.about)
        word = self.state.entry(ask.worker, ask.start)
        self.table.come(ask.worker)
        self._tick()
        until = time.monotonic() + HOLD_SECONDS
        while ask.worker not in self.table.active:
            if why := self.table.fails():
                return Answer(kind="failed", why=why), {}
            if time.monotonic() > until:
                return Answer(kind="wait", round=self.table.number, start=word), {}
            self._changed.wait(LOOK_SECONDS)
            self._tick()
        outer = self.state.outer
        # Copies: they are sent outside of the lock.
        arrays = {"theta": outer.theta.copy(), "momentum": outer.momentum.copy()}
        return Answer(round=self.table.number, start=word), arrays

    def _met(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        state, late = self.state, Answer(kind="late")
        if state is None or not state.knows(ask.worker, ask.start):
            return late, {}
        if ask.round == self.table.number + 1:
            return Answer(kind="behind"), {}
        if ask.round == self.table.number and ask.kind != "collect":
            if ask.base != state.base(ask.round):
                self.note(f"island {ask.worker} has other outer parameters; it enters again")
                return late, {}
            self._take(state, ask, arrays)
        until = time.monotonic() + HOLD_SECONDS
        while ask.round == self.table.number:
            if ask.worker not in self.table.sent:
                return Answer(kind="again", round=self.table.number), {}
            if why := self.table.fails():
                return Answer(kind="failed", why=why), {}
            if time.monotonic() > until:
                return Answer(kind="wait", round=self.table.number), {}
            self._changed.wait(LOOK_SECONDS)
            self._tick()
        last = state.last
        if last is None or last.number != ask.round or ask.worker not in last.sent:
            return late, {}
        answer = Answer(round=self.table.number, islands=last.islands)
        if not last.arrays or not ask.about:
            return answer, last.arrays
        return answer, gathered(last.arrays, read_order(ask.about))

    def _repeated(self, ask: Ask, arrays: Flat) -> Answer:
        """Runs a round once more that was closed before the server was started again."""
        state, number = self.state, self.table.number
        if state is None or not state.knows(ask.worker, ask.start):
            return Answer(kind="late")
        if ask.round == number - 1:
            return Answer()  # another island has said so
        if ask.round != number or ask.base != state.base(number):
            return Answer(kind="late")
        state.repeat(number, arrays, range(self.islands))
        self.table.reopen()
        self.note(f"it has heard of round {number} from island {ask.worker}")
        self._tick()
        return Answer()

    def _take(self, state: RoundState, ask: Ask, arrays: Flat) -> None:
        """Takes an outer gradient, once."""
        if ask.worker in self.table.sent:
            return
        of = f"of island {ask.worker}, round {ask.round}"
        if ask.kind == "skip":
            self.note(f"the outer gradient {of}, is not finite")
        else:
            vector = state.unpacked(self.table.number, arrays)
            if not np.isfinite(vector).all():
                self.refused += 1
                self.note(f"refused the outer gradient {of}: it is not finite")
            elif not 0 < ask.weight < 1e300:
                raise RefusedError(f"its weight is {ask.weight:g}; it is more than 0")
            else:
                state.gradients[ask.worker] = (ask.weight, vector)
        self.table.send(ask.worker)
        self.table.active.add(ask.worker)
        self._tick()

    def _tick(self) -> None:
        """Runs what is due by time: closes rounds, takes in islands that wait."""
        for island in self.table.gone_for_good():
            self.note(f"island {island} is gone in round {self.table.number}; the others go on")
        for island in self.table.stalled():
            self._silent(island)
        self.table.admit()
        while self.table.closes():
            self._close()
        self._changed.notify_all()

    def _close(self) -> None:
        state, number = self.state, self.table.number
        assert state is not None
        last, why = state.close(number, tuple(sorted(self.table.sent)))
        if why:
            self.note(f"round {number} changes nothing: {why}")
        for island in self.table.close():
            self._silent(island)
        if number % self.rounds.save_every == 0:
            self._save()
        self.closed(last)

    def _silent(self, island: int) -> None:
        self.note(
            f"island {island} has sent nothing {self.rounds.timeout_s:g} s after the first; the"
            " others go on without it"
        )

    def _save(self) -> None:
        if self._file is not None and self.state is not None:
            self._file.save(self.state, self.table.number, sorted(self.table.active))

    def report(self) -> JsonObject:
        """Returns the server's report, as plain data."""
        return {
            "round": self.table.number,
            "islands": sorted(self.table.active),
            **super().report(),
        }
