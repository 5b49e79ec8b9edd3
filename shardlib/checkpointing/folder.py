"""The folder of checkpoints: whole ones, remnants of those that were interrupted, and damaged ones.

A whole checkpoint is a folder with its step as name; nothing else is. Orbax writes into a folder of
another name and renames it when all is written; what is to go is renamed before it is deleted. So a
process that is killed at any moment leaves whole checkpoints and remnants. Whatever else is in the
folder, under whatever name, stays as it is.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from shardlib.checkpointing.owner import Owner, claim
from shardlib.errors import CheckpointError

#: Names that an interrupted save (of Orbax, which appends this) or deletion leaves behind.
_REMNANT = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|discarded)", re.ASCII)
#: Names of checkpoints: numbers as Python writes them, in the digits of ASCII.
_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
#: The largest step: states count them in 32 bits.
LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of checkpoints.

    Attributes:
        path: local, or of a kind that `etils.epath` knows.
    """

    path: epath.Path

    def claimed(self, what: str = "") -> Owner | None:
        """Makes this process the one that writes here. Object stores ("gs://...") have no files
        that one of many can make, and no owner.
        """
        if "://" in str(self.path):
            return None
        try:
            return claim(Path(self.path), what=what)
        except OSError as error:
            raise self._unwritable(error) from error

    def prepare(self) -> None:
        """Makes the folder, tries to write into it, and deletes what interrupted saves have left;
        for its owner.
        """
        probe = self.path / f"writable-{secrets.token_hex(8)}.probe"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("probe")
            probe.unlink()
            for entry in self._remnants():
                _delete(entry)
        except OSError as error:
            raise self._unwritable(error) from error

    def steps(self) -> tuple[int, ...]:
        """Steps of the whole checkpoints, the oldest first; damaged ones that have been found are
        not among them.
        """
        try:
            entries = (
                [entry for entry in self.path.iterdir() if _step(entry.name) is not None]
                if self.path.is_dir()
                else []
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.path} cannot be listed ({error})\nTry: other"
                " permissions; nothing was changed"
            ) from error
        if not entries:
            return ()
        return tuple(sorted(int(entry.name) for entry in entries if _whole(entry)))

    def taken(self, step: int) -> str:
        """Why a checkpoint of a step cannot be written, and what helps; nothing where there is room
        for it.
        """
        place = self.checkpoint(step)
        if not (place.exists() or _is_link(place)):
            return ""
        if _whole(place):
            return (
                f"there is a checkpoint of step {step} in {self.path}; it is not overwritten\nTry:"
                " restore it, or another folder"
            )
        kind = (
            "a link"
            if _is_link(place)
            else "a folder that is no whole checkpoint"
            if place.is_dir()
            else "a file"
        )
        return (
            f"{place}, where the checkpoint of step {step} belongs, is {kind}; it is not"
            " overwritten\nTry: move it away"
        )

    def refuse_run(self) -> None:
        """Refuses the folder of a run in place of the one of its checkpoints, which has its owner."""
        with contextlib.suppress(OSError):
            if (self.path / "run.json").exists() and (self.path / "checkpoints").is_dir():
                raise CheckpointError(
                    f"{self.path} is the folder of a run; its checkpoints are in"
                    f" {self.path / 'checkpoints'}\nTry: that folder"
                )

    def checkpoint(self, step: int) -> epath.Path:
        """Where the checkpoint of a step is."""
        return self.path / str(step)

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint and returns its new name; nothing of it is deleted."""
        names = {entry.name for entry in self.path.iterdir()}
        name = next(
            name
            for i in range(len(names) + 1)
            if (name := f"{step}.damaged{f'-{i + 1}' if i else ''}") not in names
        )
        self.checkpoint(step).rename(self.path / name)
        return name

    def discard(self, step: int) -> None:
        """Deletes a checkpoint; after a kill there is all of it or none."""
        gone = self.path / f"{step}.discarded"
        self.checkpoint(step).rename(gone)
        _delete(gone)

    def clear(self, step: int) -> None:
        """Deletes what a failed save of a step has left; Orbax's other threads may write to it for
        a moment after one has failed.
        """
        for _ in range(10):
            for entry in self._remnants(f"{step}."):
                with contextlib.suppress(OSError):
                    _delete(entry)
            time.sleep(0.1)
            if not self._remnants(f"{step}."):
                return

    def _remnants(self, start: str = "") -> list[epath.Path]:
        return [
            entry
            for entry in self.path.iterdir()
            if _REMNANT.fullmatch(entry.name) and entry.name.startswith(start)
        ]

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"checkpoints cannot be written to {self.path} ({error})\nTry: another folder, or"
            " Checkpoints(folder, read_only=True) to restore alone"
        )


def _step(name: str) -> int | None:
    """The step that a name stands for: digits of other scripts, leading zeros and numbers that no
    state has are names like any other.

    >>> [_step(name) for name in ("10", "0", "\\N{SUPERSCRIPT TWO}", "007", "99999999999")]
    [10, 0, None, None, None]
    """
    return int(name) if _STEP.fullmatch(name) and int(name) <= LARGEST else None


def _whole(entry: epath.Path) -> bool:
    """Whether an entry is a folder that Orbax has finished; what cannot be looked at is not, and no
    link is, which gives one checkpoint two steps.
    """
    # with it comes JAX, which processes that only watch need not load
    import orbax.checkpoint as ocp

    try:
        return (
            entry.is_dir()
            and not _is_link(entry)
            and bool(ocp.utils.is_checkpoint_finalized(entry))
        )
    except (OSError, ValueError):
        return False


def _is_link(entry: epath.Path) -> bool:
    """Whether an entry is a link; object stores have none."""
    return "://" not in str(entry) and Path(entry).is_symlink()


def _delete(entry: epath.Path) -> None:
    """Deletes a folder; of a link only the link, since what it points to is somebody's."""
    local = Path(entry) if "://" not in str(entry) else None
    if local is not None and (local.is_symlink() or not local.is_dir()):
        local.unlink(missing_ok=True)
    else:
        entry.rmtree(missing_ok=True)
