"""What a process that trains says of itself, and how it is seen from outside that it has stopped
saying so.

A heartbeat has a number that rises. Whoever watches looks when the number changes, by a clock of
its own that nobody sets (`Observer`): clocks of other hosts may be wrong, and that of this one may
be set while it looks. Processes of one boot of one machine share a clock that nobody sets either,
and need not wait to see how old a heartbeat is.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from pathlib import Path

from shardlib.processes.lifetime import who
from shardlib.untrusted import read_regular

#: Seconds between two heartbeats.
EVERY = 1.0
#: Phase of a loop that has ended; its process may go on with something else, and writes no more
#: heartbeats.
ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a process says of itself.

    Attributes:
        rank: number of the process.
        host: name of its machine.
        pid: of the operating system there.
        step: steps done.
        phase: what the loop is doing: "compile", "data", "step", "save", ...
        lasts: seconds that the phase had taken when this was written.
        number: of heartbeats that the process has written, this one included.
        boot: which boot of which machine; empty where the system does not say.
        clock: seconds since that boot when this was written.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    lasts: float
    number: int
    boot: str
    clock: float

    def age(self) -> float | None:
        """Seconds since it was written; None where it is of another machine, or of this one before
        it was started again.
        """
        return max(who.clock() - self.clock, 0.0) if self.boot and self.boot == who.boot() else None


_KINDS = {"int": (int,), "str": (str,), "float": (int, float)}


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The heartbeat in a file; None where there is none, or none that can be read."""
    try:
        data = json.loads(read_regular(path))
        heartbeat = Heartbeat(**data)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    right = all(
        isinstance(getattr(heartbeat, field.name), _KINDS[str(field.type)])
        and not isinstance(getattr(heartbeat, field.name), bool)
        for field in fields(Heartbeat)
    )
    return heartbeat if right else None


class Observer:
    """Sees which processes have stopped to give signs of life, by the clock of the one that
    looks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def silent(self, key: Hashable, beat: Heartbeat | None) -> float:
        """Seconds since the heartbeat of something was seen to change; or since it was asked for
        first.

        Args:
            beat: as it is now; None where there is none.
        """
        now, mark = self._clock(), (beat.host, beat.pid, beat.number) if beat is not None else None
        if key not in self._seen or self._seen[key][0] != mark:
            self._seen[key] = (mark, now)
        return now - self._seen[key][1]


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, also after a loss of power; what
    stands in the place of the draft, a link to somewhere perhaps, is not written to.
    """
    draft = path.with_name(f"{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with draft.open("x", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
