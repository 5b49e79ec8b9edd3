"""Who has come to the roll call so far, who has said nothing yet, and how many were none of the
job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.untrusted import fit

#: Callers that have not said who they are yet; of more, those that have been silent the longest are
#: sent away.
SILENT_CALLERS = 512


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What process 0 told everybody.

    Attributes:
        failures: why the processes cannot work together; empty where they can.
        again: whether another start may go well.
    """

    failures: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What a process says of itself: its number, of how many, where it is, the word of its start,
    and what all must have in common.
    """

    process: int
    processes: int
    host: str
    pid: int
    start: str
    about: Mapping[str, str]

    def __str__(self) -> str:
        return f"process {self.pid} on {fit(self.host, 255)}"


@dataclass(kw_only=True)
class Book:
    """Who has come so far."""

    processes: int
    start: str
    secret: str
    said: dict[int, Caller] = field(default_factory=dict[int, Caller])
    #: Callers that were none of the job.
    strangers: int = 0
    #: Callers that have not said who they are, the first to come first.
    silent: dict[asyncio.StreamWriter, None] = field(
        default_factory=dict["asyncio.StreamWriter", None]
    )
    wrong: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = field(default_factory=Answer)
    talks: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def enter(self, caller: Caller) -> None:
        """Writes somebody down; what is wrong with him ends the call for all."""
        number = caller.process
        if caller.processes != self.processes or not 0 <= number < self.processes:
            self.wrong.append(
                f"{caller} says that it is process {number} of {caller.processes}, process 0 waits"
                f" for {self.processes}"
            )
        elif number in self.said and str(self.said[number]) != str(caller):
            self.wrong.append(f"process {number} is there twice: {self.said[number]} and {caller}")
        else:
            self.said[number] = caller
        self.changed.set()

    @property
    def absent(self) -> list[int]:
        """Who has not come."""
        return [number for number in range(self.processes) if number not in self.said]

    def let_in(self, writer: asyncio.StreamWriter) -> None:
        """A new caller; where too many say nothing, the first of them goes."""
        self.silent[writer] = None
        if len(self.silent) > SILENT_CALLERS:
            first = next(iter(self.silent))
            del self.silent[first]
            self.strangers += 1
            first.transport.abort()

    def count_stranger(self) -> None:
        """One who is none of the job."""
        self.strangers += 1
