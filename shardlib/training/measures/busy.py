"""The share of this machine that others used while this process trained.

A time that was measured while other programs computed says little about a prediction for a machine
of one's own. The system counts the time that its processors were at work (proc(5), the first line
of /proc/stat; time that a hypervisor gave to other machines is among it), and that of this process;
the rest is that of others.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
#: Share of the processors up to which a machine counts as quiet.
QUIET = 0.1
#: Seconds after which the share of the last ones is looked at again: the system counts in
#: hundredths of a second.
EVERY = 1.0


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Ticks since the boot: of all processors together, at work or not; at work; and by this
    process.
    """

    total: float
    busy: float
    own: float


class Busy:
    """What others use of the processors from now on."""

    def __init__(self, *, alone: bool = True) -> None:
        """Args: alone: whether this is the only process of its job here; of several, each would
        take the others for strangers.
        """
        self._first = self._last = _sample() if alone else None
        self._looked, self._recent = time.monotonic(), None

    def share(self) -> float | None:
        """Of all processors, from 0 to 1, used by others since the beginning; None where the system
        does not say.
        """
        return _share(self._first, _sample())

    def recent(self) -> float | None:
        """The same of the last second or more; None at first, and where the system does not say."""
        if self._last is not None and time.monotonic() - self._looked >= EVERY:
            now = _sample()
            self._recent, self._last, self._looked = _share(self._last, now), now, time.monotonic()
        return self._recent


def in_words(share: float | None) -> str:
    """Why times are not compared with a prediction; empty where the machine was quiet.

    >>> in_words(0.43), in_words(0.02)
    ('other programs used 43% of the processors', '')
    """
    if share is None:
        return "how much other programs used of the processors is not known"
    return f"other programs used {share:.0%} of the processors" if share > QUIET else ""


def _share(before: _Sample | None, now: _Sample | None) -> float | None:
    if before is None or now is None or now.total <= before.total:
        return None
    others = (now.busy - before.busy) - (now.own - before.own)
    return min(max(others / (now.total - before.total), 0.0), 1.0)


def _sample() -> _Sample | None:
    try:
        words = STAT.read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
        own = os.times()
        return _Sample(
            total=sum(ticks),
            busy=sum(ticks) - ticks[3] - ticks[4],
            own=(own.user + own.system + own.children_user + own.children_system)
            * os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, ValueError, IndexError):
        return None
