"""What a worker asks of a server, and what it answers; every question has one answer.

| asked    | of the worker                          | answered                                   |
|----------|----------------------------------------|--------------------------------------------|
| `offer`  | parameters that it begins with         | whether parameters are there               |
| `enter`  | that it is about to do a step          | `ok`, or `wait` and why                    |
| `fetch`  |                                        | parameters and clock                       |
| `push`   | a gradient, its serial, the clock seen | clock and staleness                        |
| `skip`   | that a gradient was not finite         |                                            |
| `leave`  | that it is done                        |                                            |
| `report` |                                        | clock, histogram of staleness, events      |
| `save`   |                                        | once the checkpoint is on disk             |

The last two are asked by who has started the servers. An answer `refused` has changed nothing. What
islands and the outer server say to each other has the same form; its table is in
`shardlib.servers.rounds.service`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from shardlib.errors import ShardlibError
from shardlib.servers.ownership import Flat
from shardlib.servers.wire.bodies import Outgoing, made
from shardlib.untrusted import construct
from shardlib.untrusted.json_types import Json, JsonMapping, JsonObject

#: Number of who is no worker, but has started all of them.
STARTER = -1


class MessageError(ShardlibError, ValueError):
    """A header that is no message."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question.

    Attributes:
        kind: which, see above.
        worker: who asks.
        start: a word that each start of a worker has of its own.
        serial: of a push, from 1 on.
        seen: the clock at the fetch that a gradient belongs to.
        step: of the worker's own count.
        round: that an outer gradient belongs to.
        weight: of an outer gradient in the mean.
        about: what an island says of itself; of a fetch or a push, the order of elements
            (`shardlib.servers.ordering`).
        base: checksum of the outer parameters that an outer gradient belongs to.
    """

    kind: str
    worker: int
    start: str = ""
    serial: int = 0
    seen: int = 0
    step: int = 0
    round: int = 0
    weight: float = 0.0
    about: str = ""
    base: int = 0

    def to_json(self) -> JsonObject:
        """The question as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer.

    Attributes:
        kind: "ok", "wait" or "refused".
        why: it waits, or is refused.
        clock: updates of the server.
        staleness: of the gradient that was pushed.
        report: what the server has to tell.
        round: that is open.
        islands: in the mean.
        start: a word that islands name with what they send.
    """

    kind: str = "ok"
    why: str = ""
    clock: int = 0
    staleness: int = 0
    report: Json = None
    round: int = 0
    islands: tuple[int, ...] = ()
    start: str = ""

    def to_json(self) -> JsonObject:
        """The answer as plain data."""
        return asdict(self)


def read_ask(header: JsonMapping) -> Ask:
    """The question of a header."""
    return construct(Ask, header, "the message", MessageError, least=STARTER)


def read_answer(header: JsonMapping) -> Answer:
    """The answer of a header."""
    return construct(Answer, header, "the answer", MessageError)


class Arrivals(Protocol):
    """What takes an answer while it comes; where a connection breaks, it begins again."""

    def begin(self, answer: Answer) -> None:
        """The answer is there, its arrays are not."""
        ...

    def take(self, name: str, array: np.ndarray) -> None:
        """The next of its arrays is there."""
        ...


class Link(Protocol):
    """A way to one server, whatever carries it."""

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        """Asks, and waits for the answer."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


def handed(answer: Answer, arrays: Outgoing, arrivals: Arrivals | None) -> tuple[Answer, Flat]:
    """What `Link.ask` gives for an answer that has come as a whole."""
    arrays_made = made(arrays)
    if arrivals is None:
        return answer, arrays_made
    arrivals.begin(answer)
    for name, array in arrays_made.items():
        arrivals.take(name, array)
    return answer, Flat()
