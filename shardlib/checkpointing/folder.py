"""The folder of checkpoints: whole ones, remnants of those that were interrupted, and damaged ones.

A whole checkpoint is a folder with its step as name; nothing else is. Orbax writes into a folder of another name and renames it when all is
written; what is to go is renamed before it is deleted. So a process that is killed at any moment leaves whole checkpoints and remnants.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass

from etils import epath

from shardlib.errors import CheckpointError

#: Names that an interrupted save (of Orbax, which appends this) or deletion leaves behind.
_REMNANT = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|discarded)")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of checkpoints.

    Attributes:
        path: local, or of a kind that `etils.epath` knows.
    """

    path: epath.Path

    def prepare(self) -> None:
        """Makes the folder, tries to write into it, and deletes what interrupted saves have left.

        Raises:
            CheckpointError: it cannot be made or written.
        """
        probe = self.path / f"writable-{os.getpid()}.probe"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("probe")
            probe.unlink()
            for entry in self._remnants():
                entry.rmtree()
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {self.path} ({error})\nTry: another folder, or Checkpoints(folder, read_only=True) to restore alone") from error

    def steps(self) -> tuple[int, ...]:
        """Steps of the whole checkpoints, the oldest first; damaged ones that have been found are not among them."""
        if not self.path.is_dir():
            return ()
        entries = [entry for entry in self.path.iterdir() if entry.name.isdigit()]
        if not entries:
            return ()
        import orbax.checkpoint as ocp  # with it comes JAX, which processes that only watch need not load

        return tuple(sorted(int(entry.name) for entry in entries if ocp.utils.is_checkpoint_finalized(entry)))

    def checkpoint(self, step: int) -> epath.Path:
        """Where the checkpoint of a step is."""
        return self.path / str(step)

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint and returns its new name; nothing of it is deleted."""
        names = {entry.name for entry in self.path.iterdir()}
        name = next(name for i in range(len(names) + 1) if (name := f"{step}.damaged{f'-{i + 1}' if i else ''}") not in names)
        self.checkpoint(step).rename(self.path / name)
        return name

    def discard(self, step: int) -> None:
        """Deletes a checkpoint; after a kill there is all of it or none."""
        gone = self.path / f"{step}.discarded"
        self.checkpoint(step).rename(gone)
        gone.rmtree()

    def clear(self, step: int) -> None:
        """Deletes what a failed save of a step has left; Orbax's other threads may write to it for a moment after one has failed."""
        for _ in range(10):
            for entry in self._remnants(f"{step}."):
                with contextlib.suppress(OSError):
                    entry.rmtree(missing_ok=True)
            time.sleep(0.1)
            if not self._remnants(f"{step}."):
                return

    def _remnants(self, start: str = "") -> list[epath.Path]:
        return [entry for entry in self.path.iterdir() if _REMNANT.fullmatch(entry.name) and entry.name.startswith(start)]
