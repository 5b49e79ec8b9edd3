"""What is in the folder of a run, and may this process go on with it?

    run.json         what is trained, in words and as digests of what is traced (`shardlib.training.identity`), and what was changed on purpose
    plan.json        the plan of the newest process
    metrics.jsonl    a line a step (`shardlib.training.metrics`)
    checkpoints/     `shardlib.checkpointing`; in `owner/` there, who may write to the run
    heartbeat/       a file a process (`shardlib.training.watchdog`)
    tensorboard/     event files
    compiled/        programs that XLA compiled, so that a process that starts again need not
    profiles/        traces, on demand

A run is what `run.json` says. Who opens the folder for another model, another loss, other data or another batch is told so and nothing is touched: its checkpoints would be of no use, or its
loss curve would no longer be one. Who means it names what may be another; that is done and written down, with what was there before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etils import epath

from shardlib.checkpointing.folder import Folder
from shardlib.errors import MissingFileError, RunError, raise_all
from shardlib.training.differences import Difference, differences, versions
from shardlib.training.files import write_whole
from shardlib.training.heartbeat import Heartbeat, read_heartbeat

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Opened:
    """How a folder was found.

    Attributes:
        known: whether the run was there already.
        changes: what is another than before, on purpose.
        untraced: whether nobody had written down what is traced; it is, from now on.
    """

    known: bool
    changes: tuple[Difference, ...] = ()
    untraced: bool = False


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

    def open(self, identity: Mapping[str, Any], trace: Mapping[str, Any] | None = None, allow: Sequence[str] = ()) -> Opened:
        """Makes the folder, or checks that it is that of this run; for its owner.

        Args:
            identity: what is trained, as plain data: what two processes of one run have in common.
            trace: what is traced (`shardlib.training.identity.traced`).
            allow: names of what may be another than before; that is written down.

        Raises:
            RunError: it holds another run, all differences listed; or it is no folder that can be written.
        """
        wanted = json.loads(json.dumps(identity))
        try:
            known = self._read()
            if known is None:
                self._make(wanted, trace or {})
                return Opened(known=False)
            changes = self._differences(known, wanted, trace, allow)
            if changes or (trace is not None and "traced" not in known):
                self._change(known, wanted, trace, changes)
        except OSError as error:
            raise self._unwritable(error) from error
        return Opened(known=True, changes=tuple(changes), untraced=trace is not None and "traced" not in known)

    def write_plan(self, text: str) -> None:
        """Keeps the plan of this process.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            write_whole(self.plan, text)
        except OSError as error:
            raise self._unwritable(error) from error

    def check(self, identity: Mapping[str, Any], trace: Mapping[str, Any] | None = None, allow: Sequence[str] = ()) -> None:
        """Looks at a part of what two processes have in common, before anything takes time; a folder without a run is fine, and nothing is touched.

        Raises:
            RunError: it holds another run.
        """
        known = self._read()
        if known is not None:
            wanted = json.loads(json.dumps(identity))
            self._differences({**known, "run": {word: known["run"].get(word) for word in wanted}}, wanted, trace, allow)

    def identity(self) -> dict[str, Any] | None:
        """What is trained, as it was written down; None where there is no run.

        Raises:
            RunError: the file cannot be understood.
        """
        known = self._read()
        return known["run"] if known is not None else None

    def changed(self) -> frozenset[str]:
        """Names of what was changed on purpose since the run was begun.

        Raises:
            RunError: the file cannot be understood.
        """
        changes = (self._read() or {}).get("changes", [])
        return frozenset(name for change in changes if isinstance(change, Mapping) for name in change.get("names", ()) if isinstance(name, str)) if isinstance(changes, list) else frozenset()

    def _read(self) -> dict[str, Any] | None:
        """All of `run.json`; None where there is none."""
        if not self.manifest.exists():
            return None
        try:
            data = json.loads(self.manifest.read_text(encoding="utf-8"))
            version, run = data["format"], data["run"]
            if not isinstance(run, dict) or not isinstance(data.get("traced", {}), dict) or not isinstance(data.get("versions", {}), dict):
                raise TypeError("its parts are no objects of JSON")
        except (ValueError, TypeError, KeyError, RecursionError, OSError) as error:
            raise RunError(f"{self.manifest} is no description of a run: {type(error).__name__}: {error}\nTry: another folder; nothing was changed") from error
        if version != FORMAT:
            raise RunError(f"{self.manifest} is of format {version!r}; this version reads {FORMAT}")
        return data

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

    def _make(self, identity: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
        for folder in (self.path, self.checkpoints, self.path / "heartbeat"):
            folder.mkdir(parents=True, exist_ok=True)
        self._write({"format": FORMAT, "run": dict(identity), **({"traced": dict(trace), "versions": versions()} if trace else {})})

    def _differences(self, known: Mapping[str, Any], wanted: Mapping[str, Any], trace: Mapping[str, Any] | None, allow: Sequence[str]) -> list[Difference]:
        """Differences that are allowed.

        Raises:
            RunError: there are others.
        """
        words = [Difference(name=word, text=text) for word in {**known["run"], **wanted} for text in _unlike(word, known["run"].get(word), wanted.get(word))]
        told = {one.name for one in words}
        traced = differences(known.get("traced", {}), trace or {}, known.get("versions", {}), versions()) if trace else []
        found = [*words, *(one for one in traced if one.name not in told)]
        if any(one.name not in allow for one in found):
            names = ",".join(dict.fromkeys(one.name for one in found))
            raise_all(RunError, f"{self.path} holds another run", [one.text for one in found if one.name not in allow],
                      hint=f"another folder, or what the run was begun with; to go on with these changes on purpose, --allow-changes {names}, or Settings(allow_changes=...). Nothing was changed")
        return found

    def _change(self, known: Mapping[str, Any], wanted: Mapping[str, Any], trace: Mapping[str, Any] | None, changes: Sequence[Difference]) -> None:
        """Writes down what the run is from now on, and what it was."""
        before = {name: known[name] for name in ("run", "traced", "versions") if name in known}
        history = known["changes"] if isinstance(known.get("changes"), list) else []
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "after_step": max(self.saved(), default=0), "names": list(dict.fromkeys(one.name for one in changes)),
                 "differences": [one.text for one in changes], "before": before}
        self._write({**known, "run": dict(wanted), **({"traced": dict(trace), "versions": versions()} if trace else {}), **({"changes": [*history, entry]} if changes else {})})

    def _write(self, data: Mapping[str, Any]) -> None:
        write_whole(self.manifest, json.dumps(data, indent=1) + "\n")


def _unlike(word: str, known: Any, wanted: Any) -> list[str]:
    """How two values differ; of objects, which of their fields do."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        return [text for key in {**known, **wanted} for text in _unlike(f"{word}.{key}", known.get(key), wanted.get(key))]
    return [f"{word} is {_text(wanted)}, the run has {_text(known)}"] if _text(known) != _text(wanted) else []


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
