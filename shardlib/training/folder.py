"""What is in the folder of a run, and may this process go on with it?

    run.json         what is trained: model, data, seed, batch; written once
    plan.json        the plan of the newest process
    metrics.jsonl    a line a step (`shardlib.training.metrics`)
    checkpoints/     `shardlib.checkpointing`
    heartbeat/       a file a process (`shardlib.training.watchdog`)
    tensorboard/     event files
    compiled/        programs that XLA compiled, so that a process that starts again need not
    profiles/        traces, on demand

A run is what `run.json` says. Who opens the folder for another model, other data or another batch is told so and nothing is touched: its checkpoints would be of no use, and its
loss curve would no longer be one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from shardlib.checkpointing.folder import Folder
from shardlib.errors import MissingFileError, RunError, raise_all
from shardlib.training.watchdog import Heartbeat, read_heartbeat

FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: where it is.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        """What is trained."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The plan of the newest process."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """States."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def compiled(self) -> Path:
        """Compiled programs."""
        return self.path / "compiled"

    @property
    def profiles(self) -> Path:
        """Traces."""
        return self.path / "profiles"

    def saved(self) -> tuple[int, ...]:
        """Steps of the whole checkpoints, the oldest first."""
        return Folder(path=epath.Path(self.checkpoints)).steps()

    def heartbeat(self, rank: int) -> Path:
        """The file of one process."""
        return self.path / "heartbeat" / f"rank-{rank}.json"

    def heartbeats(self) -> list[Heartbeat]:
        """What the processes of the run say, by rank."""
        found = (read_heartbeat(path) for path in sorted((self.path / "heartbeat").glob("rank-*.json")))
        return sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank)

    def open(self, identity: Mapping[str, Any]) -> bool:
        """Makes the folder, or checks that it is that of this run.

        Args:
            identity: what is trained, as plain data: what two processes of one run have in common.

        Returns:
            Whether the run was there already.

        Raises:
            RunError: it holds another run, all differences listed; or it is no folder that can be written.
        """
        wanted = json.loads(json.dumps(identity))
        try:
            known = self.identity()
            if known is None:
                self._make(wanted)
                return False
        except OSError as error:
            raise self._unwritable(error) from error
        _same(self.path, known, wanted)
        return True

    def write_plan(self, text: str) -> None:
        """Keeps the plan of this process.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            write_whole(self.plan, text)
        except OSError as error:
            raise self._unwritable(error) from error

    def check(self, identity: Mapping[str, Any]) -> None:
        """Looks at a part of what two processes have in common, before anything takes time; a folder without a run is fine.

        Raises:
            RunError: it holds another run.
        """
        known = self.identity()
        if known is not None:
            wanted = json.loads(json.dumps(identity))
            _same(self.path, {word: known.get(word) for word in wanted}, wanted)

    def identity(self) -> dict[str, Any] | None:
        """What is trained, as it was written down; None where there is no run.

        Raises:
            RunError: the file cannot be understood.
        """
        if not self.manifest.exists():
            return None
        try:
            data = json.loads(self.manifest.read_text())
            version, run = data["format"], dict(data["run"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self.manifest} is no description of a run: {error}\nTry: another folder; nothing was changed") from error
        if version != FORMAT:
            raise RunError(f"{self.manifest} is of format {version}; this version reads {FORMAT}")
        return run

    def require(self) -> dict[str, Any]:
        """What is trained.

        Raises:
            MissingFileError: there is no run.
        """
        found = self.identity() if self.path.is_dir() else None
        if found is None:
            raise MissingFileError(f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train --run`")
        return found

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(f"the folder of the run, {self.path}, cannot be written: {error.strerror or error}\nTry: another folder, or free some space")

    def _make(self, identity: Mapping[str, Any]) -> None:
        for folder in (self.path, self.checkpoints, self.path / "heartbeat"):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.manifest, json.dumps({"format": FORMAT, "run": dict(identity)}, indent=1) + "\n")


def _same(path: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = [f"{word} is {_text(wanted.get(word))}, the run has {_text(known.get(word))}" for word in {**known, **wanted} if known.get(word) != wanted.get(word)]
    if different:
        raise_all(RunError, f"{path} holds another run", different, hint="another folder, or what the run was begun with; nothing was changed")


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
