"""What the outer server holds of a run: its exchange, outer parameters, what came in a round."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import PinError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.reading import read_exchange
from shardlib.servers.ownership import Flat
from shardlib.servers.rounds.outer import Outer, checksum, mean
from shardlib.servers.rounds.outline import Outline
from shardlib.servers.rounds.packing import pack, unpack
from shardlib.servers.server.shard import RefusedError
from shardlib.untrusted import Limits, construct, parse_json


@dataclass(frozen=True, kw_only=True)
class About:
    """What an island says of itself as it enters.

    Attributes:
        exchange: as plain data, in one text.
        digest: of the outline of its parameters.
    """

    exchange: str
    digest: str

    def text(self) -> str:
        """As it is sent."""
        return json.dumps([self.exchange, self.digest])


def about(exchange: DiLoCo, outline: Outline) -> str:
    """What an island says of itself."""
    return About(exchange=json.dumps(exchange.to_json()), digest=outline.digest).text()


@dataclass(frozen=True, kw_only=True)
class Last:
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
class Held:
    """What is outer, and the open round.

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
    last: Last | None = None
    _base: tuple[int, int] = (0, 0)

    @staticmethod
    def offered(text: str, arrays: Mapping[str, np.ndarray], islands: int) -> Held:
        """Begins with the parameters of an island."""
        description = read_about(text)
        exchange = exchange_of(description.exchange)
        outline = Outline.of({path: array.shape for path, array in arrays.items()})
        wrong = [path for path, array in arrays.items() if array.dtype != np.float32]
        if wrong or outline.digest != description.digest or not arrays:
            raise RefusedError("what is offered is not what it says, or no float32")
        if exchange.islands != islands:
            raise RefusedError(
                f"its exchange is of {exchange.islands} islands, and this run is of {islands}"
            )
        theta = outline.vector(arrays)
        if not np.isfinite(theta).all():
            raise RefusedError("what is offered is not finite")
        return Held(exchange=exchange, outline=outline, outer=Outer.first(theta))

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
        """Whether a word is that of an island's newest entry."""
        era, _, number = word.partition(".")
        newest = self.entries.get(island, 0)
        if era == self.era and number.isdigit() and int(number) < newest:
            raise RefusedError("another process has entered as this island since")
        return word == f"{self.era}.{newest}"

    def sizes(self, number: int) -> list[int]:
        """Elements of each parameter in the fragment of a round."""
        fragments = self.exchange.fragments
        parts = self.outline.parts((number - 1) % fragments, fragments)
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
        """Does the outer update of a round whose mean is known; nothing where it changed nothing."""
        span, self.gradients = self.span(number), {}
        if arrays:
            theta, momentum = self.outer.after(*span, self.unpacked(number, arrays), self.exchange)
            if not np.isfinite(theta).all() or not np.isfinite(momentum).all():
                raise RefusedError("with it, outer parameters would not be finite")
            start, stop = span
            self.outer.theta[start:stop], self.outer.momentum[start:stop] = theta, momentum
        everyone = tuple(islands)
        self.last = Last(number=number, islands=everyone, sent=everyone, arrays=dict(arrays))

    def span(self, number: int) -> tuple[int, int]:
        """Where the fragment of a round begins and ends."""
        fragments = self.exchange.fragments
        return self.outline.span((number - 1) % fragments, fragments)

    def close(self, number: int, sent: tuple[int, ...]) -> tuple[Last, str]:
        """Does the outer update by what has come."""
        gradients, self.gradients = self.gradients, {}
        span, wire = self.span(number), self.exchange.wire
        arrays, why = Flat(), "" if gradients else "no outer gradient was finite"
        if gradients:
            arrays = pack(mean(gradients), self.sizes(number), wire)
            rounded = self.unpacked(number, arrays)
            theta, momentum = self.outer.after(*span, rounded, self.exchange)
            if np.isfinite(theta).all() and np.isfinite(momentum).all():
                start, stop = span
                self.outer.theta[start:stop], self.outer.momentum[start:stop] = theta, momentum
            else:
                arrays, why = Flat(), "with it, outer parameters would not be finite"
        self.last = Last(number=number, islands=tuple(sorted(gradients)), sent=sent, arrays=arrays)
        return self.last, why


def read_about(text: str) -> About:
    """What an island says of itself."""
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
