"""Checkpoints of a run: when one is due, how it is saved, and how the newest good one is restored.

A save that fails is said and written down, and training goes on; only the last one must succeed.
"""

from __future__ import annotations

import time

from shardlib.checkpointing.restoring import Restored
from shardlib.checkpointing.store import Checkpoints
from shardlib.checkpointing.tree import OtherOptimizerError
from shardlib.errors import CheckpointError
from shardlib.lowering.runtime.state import TrainState
from shardlib.processes.ranks import anywhere
from shardlib.processes.watchdog import Watchdog
from shardlib.training.run.folder import RunFolder
from shardlib.training.stepping.records import Records
from shardlib.training.stepping.task import Task
from shardlib.untrusted.json_types import JsonMapping


class Saving:
    """The checkpoints of a run, as the loop uses them.

    Args:
        checkpoints: of the folder.
        folder: of the run.
        task: what the run does.
        watchdog: told while something is saved.
        records: where failures are written down.

    Attributes:
        saved: step of the newest checkpoint of this process; 0 where there is none.
        saved_at: when it was saved (`time.perf_counter`).
        seconds: spent on saving, in all.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        folder: RunFolder,
        task: Task,
        watchdog: Watchdog,
        records: Records,
    ) -> None:
        self.checkpoints, self.folder, self.task = checkpoints, folder, task
        self.watchdog, self.records = watchdog, records
        self.saved, self.saved_at, self.seconds = 0, 0.0, 0.0

    def prepare(self) -> None:
        """Compiles what saving runs on the devices."""
        self.checkpoints.prepare(self.task.program)

    def found(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self.checkpoints.steps())

    def kept(self) -> bool:
        """Whether there is a checkpoint, once the save that is under way has ended."""
        self.checkpoints.wait()
        return self.found()

    def restore(self) -> Restored:
        """The newest good checkpoint; where the optimizer was changed on purpose, and has other
        arrays, with that as before its first step.
        """
        try:
            return self.checkpoints.restore(self.task.program)
        except OtherOptimizerError:
            if "optimizer" not in self.folder.changed():
                raise
            return self.checkpoints.restore(self.task.program, parameters_only=True)

    def due(self, step: int) -> bool:
        """Whether to save after a step; all processes agree."""
        if step == self.saved:
            return False
        settings = self.task.settings
        late = (
            settings.save_seconds is not None
            and time.perf_counter() - self.saved_at >= settings.save_seconds
        )
        return step % settings.save_every == 0 or anywhere(
            late, needed=settings.save_seconds is not None
        )

    def save(self, step: int, state: TrainState, extra: JsonMapping, *, wait: bool = False) -> bool:
        """Saves a state; whether that was begun."""
        begin, begun = time.perf_counter(), False
        with self.watchdog.phase("save", patience=10):
            try:
                self._written(step)
                self.checkpoints.save(
                    step,
                    state,
                    plan=self.task.program.plan,
                    extra=extra,
                    metrics={
                        "loss": self.records.last(),
                        **self.records.validations.get(step, {}),
                    },
                    wait=wait,
                )
                self.saved, begun = step, True
            except CheckpointError as error:
                self._not_saved(step, error)
                if wait:
                    raise
        self.saved_at = time.perf_counter()
        self.seconds += self.saved_at - begin
        return begun

    def wait(self) -> None:
        """Waits for the save that is under way."""
        with self.watchdog.phase("save", patience=10):
            self.checkpoints.wait()

    def _written(self, step: int) -> None:
        """Waits for the save before this one; that it failed is said, and training goes on."""
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._not_saved(step, error)

    def _not_saved(self, step: int, error: CheckpointError) -> None:
        self.saved = max(self.folder.saved(), default=0)
        self.records.event("not-saved", step, message=str(error))
        self.records.say(str(error))
