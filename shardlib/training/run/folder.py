"""The folder of a run: what is in it, and whether this process may go on with it.

    run.json         what is trained, in words and as digests of what is traced
                     (`shardlib.training.run.identity`), and what was changed on purpose
    plan.json        the plan of the newest process
    metrics.jsonl    a line a step (`shardlib.training.measures.metrics`)
    checkpoints/     `shardlib.checkpointing`; in `owner/` there, who may write to the run
    heartbeat/       a file a process (`shardlib.processes.watchdog`)
    tensorboard/     event files
    compiled/        programs that XLA compiled, so that a process that starts again need not
    profiles/        traces, on demand

A run is what `run.json` says. Who opens the folder for another model, another loss, other data or
another batch is told so and nothing is touched: its checkpoints would be of no use, or its loss
curve would no longer be one. Who means it names what may be another; that is done and written down,
with what was there before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from etils import epath

from shardlib.checkpointing.folder import Folder
from shardlib.errors import MissingFileError, RunError
from shardlib.processes.heartbeat import Heartbeat, read_heartbeat, write_whole
from shardlib.training.run.differences import Difference, versions
from shardlib.training.run.manifest import (
    FORMAT,
    UNKNOWN,
    allowed_differences,
    read_manifest,
    unknown_checkpoints,
)
from shardlib.training.run.writable import probe, unwritable
from shardlib.untrusted.json_types import JsonMapping, JsonObject


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
        found = (
            read_heartbeat(path) for path in sorted((self.path / "heartbeat").glob("rank-*.json"))
        )
        return sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank)

    def open(
        self,
        identity: JsonMapping,
        trace: JsonMapping | None = None,
        allow: Sequence[str] = (),
    ) -> Opened:
        """Makes the folder, or checks that it is that of this run; for its owner."""
        wanted = json.loads(json.dumps(identity))
        try:
            known = read_manifest(self.manifest)
            if known is None:
                unknown = unknown_checkpoints(self.manifest, self.saved(), allow)
                self._make(wanted, trace or {}, unknown, allow)
                return Opened(known=False, changes=unknown)
            changes = allowed_differences(self.path, known, wanted, trace, allow)
            if changes or (trace is not None and "traced" not in known):
                self._change(known, wanted, trace, changes)
        except OSError as error:
            raise self.unwritable(error) from error
        return Opened(
            known=True, changes=tuple(changes), untraced=trace is not None and "traced" not in known
        )

    def write_plan(self, text: str) -> None:
        """Keeps the plan of this process."""
        try:
            write_whole(self.plan, text)
        except OSError as error:
            raise self.unwritable(error) from error

    def check(
        self,
        identity: JsonMapping,
        trace: JsonMapping | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Looks at a part of what two processes have in common, before anything takes time; a
        folder without a run is fine, and nothing is touched.
        """
        known = read_manifest(self.manifest)
        if known is None:
            unknown_checkpoints(self.manifest, self.saved(), allow)
        else:
            wanted = json.loads(json.dumps(identity))
            allowed_differences(
                self.path,
                {**known, "run": {word: known["run"].get(word) for word in wanted}},
                wanted,
                trace,
                allow,
            )

    def identity(self) -> JsonObject | None:
        """What is trained, as it was written down; None where there is no run."""
        known = read_manifest(self.manifest)
        return known["run"] if known is not None else None

    def changed(self) -> frozenset[str]:
        """Names of what was changed on purpose since the run was begun."""
        changes = (read_manifest(self.manifest) or {}).get("changes", [])
        return (
            frozenset(
                name
                for change in changes
                if isinstance(change, Mapping)
                for name in change.get("names", ())
                if isinstance(name, str)
            )
            if isinstance(changes, list)
            else frozenset()
        )

    def require(self) -> JsonObject:
        """What is trained."""
        found = self.identity() if self.path.is_dir() else None
        if found is None:
            raise MissingFileError(
                f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train"
                " --run`"
            )
        return found

    def unwritable(self, error: OSError) -> RunError:
        """The error where something of the folder could not be written."""
        return unwritable(self.path, error)

    def probe(self) -> None:
        """Looks whether the folder can be made, or written to, before anything takes time; what
        this makes for it is gone afterwards.
        """
        probe(self.path)

    def _make(
        self,
        identity: JsonMapping,
        trace: JsonMapping,
        unknown: Sequence[Difference],
        allow: Sequence[str],
    ) -> None:
        for folder in (self.path, self.checkpoints, self.path / "heartbeat"):
            folder.mkdir(parents=True, exist_ok=True)
        changes = [self._entry(dict.fromkeys((UNKNOWN, *allow)), unknown, {})] if unknown else []
        self._write(
            {
                "format": FORMAT,
                "run": dict(identity),
                **({"traced": dict(trace), "versions": versions()} if trace else {}),
                **({"changes": changes} if changes else {}),
            }
        )

    def _change(
        self,
        known: JsonMapping,
        wanted: JsonMapping,
        trace: JsonMapping | None,
        changes: Sequence[Difference],
    ) -> None:
        """Writes down what the run is from now on, and what it was."""
        before = {name: known[name] for name in ("run", "traced", "versions") if name in known}
        history = known["changes"] if isinstance(known.get("changes"), list) else []
        entry = self._entry(dict.fromkeys(one.name for one in changes), changes, before)
        self._write(
            {
                **known,
                "run": dict(wanted),
                **({"traced": dict(trace), "versions": versions()} if trace else {}),
                **({"changes": [*history, entry]} if changes else {}),
            }
        )

    def _entry(
        self, names: Iterable[str], changes: Sequence[Difference], before: JsonMapping
    ) -> JsonObject:
        """What is written down of changes on purpose."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "after_step": max(self.saved(), default=0),
            "names": list(names),
            "differences": [one.text for one in changes],
            "before": dict(before),
        }

    def _write(self, data: JsonMapping) -> None:
        write_whole(self.manifest, json.dumps(data, indent=1) + "\n")
