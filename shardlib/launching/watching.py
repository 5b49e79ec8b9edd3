"""One start of several processes of this machine, watched until all have ended: the first that
fails or is silent is named, and the others end.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from shardlib.launching.console import Lines
from shardlib.launching.processes import Processes
from shardlib.processes.heartbeat import ENDED, Observer, read_heartbeat
from shardlib.processes.signals import StopRequest
from shardlib.processes.watchdog import HUNG
from shardlib.training.run.folder import RunFolder
from shardlib.training.supervisor import STOPPED, USAGE, Budget, Ended, why

#: Seconds between two looks.
LOOK_EVERY = 0.1
#: Seconds that the others have to end by themselves once one has failed: those that fail too say
#: why.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One start of a program.

    Attributes:
        processes: as they run.
        count: how many there are.
        beats: folder of their signs of life.
        lines: where they are shown.
        folder: of the run; None where the command has none.
    """

    processes: Processes
    count: int
    beats: Path
    lines: Lines
    folder: RunFolder | None


class Watch:
    """One start, watched until its end.

    Args:
        start: what is watched.
        budget: how long a process may be silent, and how long all have to end.
        stop: whether somebody wants an end.
    """

    def __init__(self, start: Watched, budget: Budget, stop: StopRequest) -> None:
        self.start, self.budget, self.stop = start, budget, stop
        self.processes, self.count, self.observer = start.processes, start.count, Observer()
        self.first: int | None = None
        self.silent: dict[int, str] = {}

    def run(self) -> tuple[Ended, int | None]:
        """Waits for the end of all; how it was, and the number of the process that failed first, if
        one did."""
        deadline, reason = float("inf"), ""
        while self.processes.alive:
            end = self.processes.next_end(LOOK_EVERY)
            if self.stop and not reason:
                reason = self.stop.reason
                self.processes.send(
                    signal.Signals[reason]
                    if reason in signal.Signals.__members__
                    else signal.SIGTERM
                )
                deadline = min(deadline, time.monotonic() + self.budget.stop_seconds)
            number = (
                None
                if reason
                else (
                    end.number
                    if end is not None and end.code not in (0, STOPPED)
                    else self._silent()
                )
            )
            if number is not None and self.first is None:
                self.first, deadline = (
                    number,
                    min(
                        deadline,
                        time.monotonic() + self._named(number, end.code if end is not None else 0),
                    ),
                )
            if time.monotonic() > deadline:
                self.processes.kill()
        return self._end(reason)

    def _named(self, number: int, code: int) -> float:
        """Says which process has failed, at once, and gives the seconds that the others have: where
        it was killed or silent they can only wait for it.
        """
        seconds = GRACE_SECONDS if code > 0 and number not in self.silent else 0.0
        others = self.count - 1 - len(self.processes.codes.keys() - {number})
        if others:
            self.start.lines.say(
                f"process {number} of {self.count}"
                f" {self.silent.get(number) or why(code, tuple(self.start.lines.last[number]))};"
                f" ending the {others} that {'is' if others == 1 else 'are'} left"
            )
        return seconds

    def _silent(self) -> int | None:
        """A process that does not say any more that it lives; it is ended."""
        beats = {
            number: read_heartbeat(self.start.beats / f"rank-{number}.json")
            for number in range(self.count)
            if number not in self.processes.codes
        }
        seconds = self.budget.silent_seconds
        spoken = any(beat is not None for beat in beats.values())
        for number, beat in beats.items():
            silent = self.observer.silent(number, beat)
            late = (
                silent > seconds and beat.phase != ENDED
                if beat is not None
                else spoken and silent > 10 * seconds
            )
            if late and number not in self.silent:
                self.silent[number] = (
                    f"gave no sign of life for {silent:.0f} s and was killed{self._doing(number)}"
                )
                self.processes.kill(number)
                return number
        return None

    def _doing(self, number: int) -> str:
        """What the process was doing when it was heard of last, as the folder of the run has it."""
        folder = self.start.folder
        beat = read_heartbeat(folder.heartbeat(number)) if folder is not None else None
        return (
            f"; it was in the phase {beat.phase!r} after step {beat.step}"
            if beat is not None and beat.pid == self.processes.pid(number)
            else ""
        )

    def _end(self, reason: str) -> tuple[Ended, int | None]:
        codes = self.processes.codes
        if self.first is None:
            ended = set(codes.values())
            code = (
                STOPPED
                if ended <= {0, STOPPED} and STOPPED in ended
                else (
                    0
                    if ended == {0}
                    else (
                        128 + signal.Signals[reason].value
                        if reason in signal.Signals.__members__
                        else 1
                    )
                )
            )
            return Ended(code=code, why="", lines=()), None
        lines = tuple(self.start.lines.last[self.first])
        code = HUNG if self.first in self.silent else codes[self.first]
        ended = Ended(
            code=code,
            why=self.silent.get(self.first) or why(code, lines),
            lines=lines,
            who=f"process {self.first} of {self.count}",
        )
        if code == USAGE:
            self.start.lines.say(
                f"{ended.who} {ended.why}: a mistake that another start would not mend"
            )
        return ended, self.first
