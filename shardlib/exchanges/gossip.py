"""Islands that average with neighbours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from shardlib.errors import PinError, raise_all
from shardlib.exchanges.checks import one_of, whole
from shardlib.exchanges.shown import Shown
from shardlib.exchanges.spelling import spelled
from shardlib.untrusted.json_types import JsonObject

#: Who hears whom.
GRAPHS = ("exponential", "ring")


@dataclass(frozen=True, kw_only=True)
class Gossip(Shown):
    """Islands train apart and average their parameters with neighbours, after every step or every
    so many; there are no outer parameters. Weights of what is averaged sum to one over what an
    island hears and over who hears it, so that the mean over islands stays as it is.

    "exponential": one peer at a time, at distance 1, 2, 4, ... in turn, half and half; after as
    many meetings as there are distances all islands have the mean (stochastic gradient push, Assran
    et al., arXiv:1811.10792, whose weights stay 1 here). "ring": both neighbours, a third each
    (D-PSGD, Lian et al., arXiv:1705.09056).

    Attributes:
        islands: their number, at least 2 and a power of two for "exponential", at least 3 for
            "ring"; they divide the machine and the rows of the batch.
        graph: "exponential" or "ring".
        every: steps between two meetings.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "gossip"
    places: ClassVar[tuple[str, ...]] = ("islands", "graph")
    keeps: ClassVar[bool] = False

    islands: int = 8
    graph: str = "exponential"
    every: int = 1

    def __post_init__(self) -> None:
        failures = [
            *whole("islands", self.islands, 2),
            *one_of("graph", self.graph, GRAPHS),
            *whole("every", self.every, 1),
        ]
        if not failures and self.graph == "exponential" and self.islands & (self.islands - 1):
            failures.append(
                f"islands is {self.islands}; over an exponential graph it is a power of two, since"
                " others never reach the mean"
            )
        if not failures and self.graph == "ring" and self.islands < 3:
            failures.append(f"islands is {self.islands}; a ring has at least 3")
        if failures:
            raise_all(PinError, "exchange=Gossip is not usable", failures)

    @property
    def meetings(self) -> int:
        """Number of meetings that differ: at one distance each."""
        return self.islands.bit_length() - 1 if self.graph == "exponential" else 1

    @property
    def period(self) -> int:
        """Steps between two meetings at the same distance."""
        return self.every * self.meetings

    @property
    def heard(self) -> int:
        """Number of islands that one hears at a meeting."""
        return 1 if self.graph == "exponential" else 2

    def distances(self, meeting: int) -> tuple[int, ...]:
        """How far those are from an island that it hears, with a weight of 1 / (their number + 1)
        each.

        >>> [Gossip().distances(meeting) for meeting in range(3)]
        [(1,), (2,), (4,)]

        Args:
            meeting: 0 to `meetings` - 1.
        """
        return (1 << meeting,) if self.graph == "exponential" else (1, self.islands - 1)

    def due(self, step: int) -> int | None:
        """The meeting after a step; None where there is none.

        Args:
            step: number of steps done.
        """
        return None if step % self.every else (step // self.every - 1) % self.meetings

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, **asdict(self)}

    def __str__(self) -> str:
        return spelled(self)
