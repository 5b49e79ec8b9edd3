"""What a run keeps open from its first step to its last: the folder, records and checkpoints, the
watchdog, the profiler, and whether somebody wants it to stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from shardlib.checkpointing.store import Checkpoints
from shardlib.doctor.examine import examine
from shardlib.processes.agreement import agree
from shardlib.processes.code import user_code, versions
from shardlib.processes.ranks import rank
from shardlib.processes.signals import StopRequest, stop_requests
from shardlib.processes.watchdog import Watchdog
from shardlib.training.measures.profiler import Profiler
from shardlib.training.run.folder import RunFolder
from shardlib.training.run.held import Held
from shardlib.training.stepping.idle import idle_text, is_idle
from shardlib.training.stepping.records import Records
from shardlib.training.stepping.saving import Saving
from shardlib.training.stepping.task import Task


@dataclass(frozen=True, kw_only=True, eq=False)
class Equipment:
    """What a run keeps open.

    Attributes:
        folder: of the run; None where nothing is kept.
        held: the folder in the hands of this job; None where there is none.
        records: losses, metrics and events.
        saving: checkpoints; None where nothing is kept.
        stop: whether somebody wants the run to stop.
        watchdog: ends a process that hangs.
        profiler: records traces on demand.
    """

    folder: RunFolder | None
    held: Held | None
    records: Records
    saving: Saving | None
    stop: StopRequest
    watchdog: Watchdog
    profiler: Profiler

    def agree_and_examine(self, task: Task, say: Callable[[str], None]) -> None:
        """Makes sure that all processes mean the same, and that several find their hosts sound."""
        with self.watchdog.phase("agree", patience=10):
            meant = task.meant(self.held.trace if self.held is not None else None)
            agree("program", {**versions(), **user_code(), **meant})
            if jax.process_count() > 1 and (text := idle_text(task.program)):
                say(text)
        seconds = task.settings.doctor_seconds
        if seconds is None or jax.process_count() == 1:
            return
        run = str(self.folder.path) if self.folder is not None else None
        for finding in examine(run=run, seconds=seconds, measure=False).require().findings:
            say(str(finding))

    def open_records(self, task: Task, step: int, stack: contextlib.ExitStack) -> None:
        """Opens the records of the folder and loggers, and says what was changed in it on purpose."""
        self.records.open(self.folder, step, stack, task.settings.loggers, task.words)
        if self.held is None:
            return
        for text in self.held.texts:
            self.records.say(text)
        if self.held.changes:
            self.records.event(
                "changed",
                step,
                names=list(dict.fromkeys(one.name for one in self.held.changes)),
                differences=[one.text for one in self.held.changes],
            )


def equipped(task: Task, stack: contextlib.ExitStack, say: Callable[[str], None]) -> Equipment:
    """Opens all of it, until the end of `stack`."""
    settings = task.settings
    folder = RunFolder(Path(settings.run)) if settings.run is not None else None
    held = _held(task, folder, stack, say) if folder is not None else None
    records = Records(say, held.owner if held is not None else None)
    checkpoints = None
    if folder is not None and held is not None:
        checkpoints = stack.enter_context(
            contextlib.closing(
                Checkpoints(folder.checkpoints, keep=settings.kept, owner=held.owner)
            )
        )
    stop = stack.enter_context(stop_requests())
    beats = folder.heartbeat(rank()) if folder is not None else None
    watchdog = stack.enter_context(
        contextlib.closing(Watchdog(beats, rank=rank(), seconds=settings.hang_seconds))
    )
    profiles = folder.profiles if folder is not None and not is_idle(task.program) else None
    profiler = stack.enter_context(
        contextlib.closing(Profiler(profiles, settings.profile, records.say))
    )
    return Equipment(
        folder=folder,
        held=held,
        records=records,
        saving=(
            Saving(checkpoints, folder, task, watchdog, records)
            if folder is not None and checkpoints is not None
            else None
        ),
        stop=stop,
        watchdog=watchdog,
        profiler=profiler,
    )


def _held(
    task: Task, folder: RunFolder, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> Held:
    return Held.of(
        folder,
        task.programs,
        task.data,
        task.seed,
        task.identity,
        task.settings.allow_changes,
        stack,
        say,
    )
