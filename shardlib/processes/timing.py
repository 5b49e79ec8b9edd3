"""Seconds of programs on a machine that other programs use, too: their share of its processors, and
runs of programs in turns.

The kernel counts the busy time of its processors (proc(5), /proc/stat; it includes time that a
hypervisor gave to other machines), and that of this process; the rest is that of other programs.

>>> passes = [Pass(walls=(0.2, 0.3), processor=(0.2, 0.2), others=0.4),
...           Pass(walls=(0.12, 0.11, 0.13), processor=(0.2, 0.2, 0.2), others=0.02)]
>>> seconds_of(passes, cores=2, all_busy=True)  # the median of the quiet pass
0.12
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

STAT = Path("/proc/stat")
#: Fraction of processor time up to which a machine counts as idle.
QUIET = 0.1
#: Minimum seconds between two recent samples: the kernel counts in hundredths of a second.
EVERY = 1.0


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(_processors()) or os.cpu_count() or 1


def _processors() -> frozenset[int]:
    """Numbers of the processors that this process may run on; empty if the system does not say."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Ticks since the boot: of the processors together, busy, and used by this process."""

    total: float
    busy: float
    own: float


class Busy:
    """Processor time used by other programs since the start."""

    def __init__(self, *, alone: bool = True) -> None:
        """Args: alone: whether this is the only process of its job here; several would count each
        other as other programs.
        """
        self._first = self._last = _sample() if alone else None
        self._looked, self._recent = time.monotonic(), None

    def share(self) -> float | None:
        """Fraction of the processors used by others since the start, 0 to 1; None if the system
        does not report it.
        """
        return _share(self._first, _sample())

    def recent(self) -> float | None:
        """The same over the last second or more; None at first, or if the system does not report
        it.
        """
        if self._last is not None and time.monotonic() - self._looked >= EVERY:
            now = _sample()
            self._recent, self._last, self._looked = _share(self._last, now), now, time.monotonic()
        return self._recent


def in_words(share: float | None) -> str:
    """The reason why times are not compared with a prediction; "" if the machine was idle.

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
        ticks = _ticks(STAT.read_text())
        times = os.times()
        return _Sample(
            total=sum(ticks),
            busy=sum(ticks) - ticks[3] - ticks[4],
            own=(times.user + times.system + times.children_user + times.children_system)
            * os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, ValueError, IndexError):
        return None


def _ticks(stat: str) -> list[int]:
    """Ticks of the processors that this process may use, or else of all: what runs on others does
    not disturb it.
    """
    rows = {name: words for name, *words in map(str.split, stat.splitlines()) if words}
    usable = [rows[name] for n in sorted(_processors()) if (name := f"cpu{n}") in rows]
    counts = [[int(word) for word in row[:8]] for row in usable or [rows.get("cpu", [])]]
    return [sum(column) for column in zip(*counts, strict=True)]


# --------------------------------------------------------------------------------------------------
# Programs that are run in turns, pass after pass, so that other work slows all of them alike.


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Runs of one program in one pass.

    Attributes:
        walls: seconds of each run.
        processor: processor seconds of each run, summed over the cores.
        others: share of the processors that other programs used in the pass; None if unknown.
    """

    walls: tuple[float, ...]
    processor: tuple[float, ...]
    others: float | None


def seconds_of(passes: Sequence[Pass], *, cores: int, all_busy: bool) -> float:
    """Seconds of a program on a quiet machine: the median of the runs of quiet passes, or else what
    other programs cannot have slowed; of all runs where nothing is known of other programs.
    """
    known = [runs for runs in passes if runs.others is not None]
    quiet = [runs for runs in known if (runs.others or 0.0) <= QUIET]
    if quiet or not known:
        return statistics.median(wall for runs in quiet or passes for wall in runs.walls)
    walls = [wall for runs in known for wall in runs.walls]
    processor = [used for runs in known for used in runs.processor]
    return quiet_seconds(walls, processor, cores=cores, all_busy=all_busy)


def quiet_seconds(
    walls: Sequence[float], processor: Sequence[float], *, cores: int, all_busy: bool
) -> float:
    """Seconds of a program without the influence of other processes.

    Other processes only ever slow a run down, so the fastest of several runs counts. If a program
    keeps all cores busy, its processor time over the cores is its time on an idle machine;
    otherwise processor time is too low.

    >>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=True)
    0.2
    >>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=False)
    0.3

    Args:
        walls: seconds of each run.
        processor: processor seconds of each run, summed over the cores.
    """
    if not all_busy:
        return min(walls)
    return min(min(walls), sorted(processor)[len(processor) // 4] / cores)


#: Minimum and maximum number of runs of a program in a pass, regardless of their time.
RUNS, MOST_RUNS = 3, 1000
_counts = itertools.count()


class Clock:
    """Programs that are compiled once and run in passes, each for some time; in a job of several
    processes by all of them, as often as the first one says.

    Attributes:
        passes: by program, its runs.
    """

    def __init__(self, *, budget_s: float, runs: int = RUNS) -> None:
        self.passes: dict[str, list[Pass]] = {}
        self._only: int | None = None
        self._programs: dict[str, tuple[Callable[[], object], bool]] = {}
        self._budget_s, self._runs = budget_s, runs
        import jax  # who only watches a run times nothing, and loads no JAX

        self._alone = jax.process_count() == 1

    def seconds(
        self, name: str, make: Callable[[], Callable[[], object]], *, devices: int
    ) -> float:
        """Seconds of a program by the passes so far; a new one is made and run for the first time.

        Args:
            make: gives the program, which returns the arrays that it computes.
            devices: that it keeps busy.
        """
        if name not in self._programs:
            self._programs[name] = make(), self._alone and devices >= cores()
            self._run([name], in_sight=False)
        _, all_busy = self._programs[name]
        chosen = self.passes[name]
        if self._only is not None:
            chosen = [replace(chosen[self._only], others=None)]
        return seconds_of(chosen, cores=cores(), all_busy=all_busy)

    def again(self, passes: int) -> None:
        """Runs all programs in so many more passes."""
        for _ in range(passes):
            self._run([*self._programs], in_sight=True)

    @property
    def count(self) -> int:
        """Passes so far, the first one included."""
        return max(map(len, self.passes.values()), default=0)

    def in_pass(self, number: int, figures: Callable[[], T]) -> T:
        """What is computed from the seconds of a single pass."""
        self._only = number
        try:
            return figures()
        finally:
            self._only = None

    @property
    def load(self) -> float | None:
        """The least share of the processors that other programs used in a pass; None if unknown."""
        shares = [single.others for runs in self.passes.values() for single in runs]
        return min((share for share in shares if share is not None), default=None)

    def _run(self, names: Sequence[str], *, in_sight: bool) -> None:
        """One pass; a short one is too short to say what other programs used."""
        busy = Busy(alone=self._alone and in_sight)
        runs = {name: self._timed(self._programs[name][0]) for name in names}
        others = busy.share()
        for name, (walls, processor) in runs.items():
            self.passes.setdefault(name, []).append(
                Pass(walls=tuple(walls), processor=tuple(processor), others=others)
            )

    def _timed(self, program: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Seconds of the runs of a program after one that is not counted."""
        import jax

        from shardlib.processes.values import of_first

        jax.block_until_ready(program())
        walls: list[float] = []
        processor: list[float] = []

        def run(times: int) -> None:
            for _ in range(times):
                start, used = time.perf_counter(), time.process_time()
                jax.block_until_ready(program())
                walls.append(time.perf_counter() - start)
                processor.append(time.process_time() - used)

        run(self._runs)
        extra = min(int(self._budget_s / statistics.median(walls)), MOST_RUNS) - self._runs
        run(int(of_first(f"runs of program {next(_counts)}", lambda: str(extra))))
        return walls, processor
