"""What is in the folder of a run, and may this process go on with it?

    run.json         what is trained, in words and as digests of what is traced (`shardlib.training.run.identity`), and what was changed on purpose
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

import errno
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etils import epath

from shardlib.checkpointing.folder import Folder
from shardlib.errors import MissingFileError, RunError, raise_all
from shardlib.processes.heartbeat import Heartbeat, read_heartbeat, write_whole
from shardlib.training.run.differences import Difference, differences, versions
from shardlib.untrusted import read_regular, shown

FORMAT = 1
#: What allows to go on from checkpoints of which nobody has written down what they are of.
UNKNOWN = "identity"


class OtherRunError(RunError):
    """A folder that holds another run; the differences are listed."""


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
        identity: Mapping[str, Any],
        trace: Mapping[str, Any] | None = None,
        allow: Sequence[str] = (),
    ) -> Opened:
        """Makes the folder, or checks that it is that of this run; for its owner.

        Args:
            identity: what is trained, as plain data: what two processes of one run have in common.
            trace: what is traced (`shardlib.training.run.identity.traced`).
            allow: names of what may be another than before; that is written down.

        Raises:
            RunError: it holds another run, all differences listed; or checkpoints of which nobody
                knows what they are of; or it is no folder that can be written.
        """
        wanted = json.loads(json.dumps(identity))
        try:
            known = self._read()
            if known is None:
                unknown = self._unknown(allow)
                self._make(wanted, trace or {}, unknown, allow)
                return Opened(known=False, changes=unknown)
            changes = self._differences(known, wanted, trace, allow)
            if changes or (trace is not None and "traced" not in known):
                self._change(known, wanted, trace, changes)
        except OSError as error:
            raise self.unwritable(error) from error
        return Opened(
            known=True, changes=tuple(changes), untraced=trace is not None and "traced" not in known
        )

    def write_plan(self, text: str) -> None:
        """Keeps the plan of this process.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            write_whole(self.plan, text)
        except OSError as error:
            raise self.unwritable(error) from error

    def check(
        self,
        identity: Mapping[str, Any],
        trace: Mapping[str, Any] | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Looks at a part of what two processes have in common, before anything takes time; a
        folder without a run is fine, and nothing is touched.

        Raises:
            RunError: it holds another run, or checkpoints of which nobody knows what they are of.
        """
        known = self._read()
        if known is None:
            self._unknown(allow)
        else:
            wanted = json.loads(json.dumps(identity))
            self._differences(
                {**known, "run": {word: known["run"].get(word) for word in wanted}},
                wanted,
                trace,
                allow,
            )

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

    def _read(self) -> dict[str, Any] | None:
        """All of `run.json`; None where there is none.

        Raises:
            RunError: it cannot be read, or is no description of a run.
        """
        try:
            data = json.loads(read_regular(self.manifest).decode("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._undescribed(
                "it cannot be read:"
                f" {'it is a folder' if isinstance(error, IsADirectoryError) else error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise self._undescribed("its bytes are no text (UTF-8)") from error
        except RecursionError as error:
            raise self._undescribed("it is nested too deeply") from error
        except ValueError as error:
            raise self._undescribed("it is empty, cut off, or something else than JSON") from error
        wrong = _wrong(data)
        if wrong:
            raise self._undescribed(wrong)
        if data["format"] != FORMAT:
            raise RunError(
                f"{self.manifest} is of format {shown(data['format'])}; this version reads"
                f" {FORMAT}\nTry: the version of shardlib that wrote it, or another folder. Nothing"
                " was changed"
            )
        return data

    def _undescribed(self, why: str) -> RunError:
        return RunError(
            f"{self.manifest} is no description of a run: {why}\nTry: a copy of that file, if there"
            " is one, or another folder; to keep the checkpoints beside it, which need no repair,"
            f" rename it and go on with --allow-changes {UNKNOWN}. Nothing was changed"
        )

    def _unknown(self, allow: Sequence[str]) -> tuple[Difference, ...]:
        """What there is to say of checkpoints that stand in a folder without `run.json`; nothing
        where there are none.

        Raises:
            RunError: there are some, and nobody has said that they may be of anything.
        """
        saved = self.saved()
        if not saved:
            return ()
        what = (
            f"{self.path} has checkpoints, the newest of step {saved[-1]}, and no"
            f" {self.manifest.name}: nobody knows of what run they are"
        )
        if UNKNOWN not in allow:
            raise RunError(
                f"{what}\nTry: a copy of {self.manifest.name}, if there is one, or another folder;"
                f" where they are known to be of this very run, --allow-changes {UNKNOWN}, or "
                f'Settings(allow_changes=("{UNKNOWN}",)). Nothing was changed'
            )
        return (
            Difference(
                name=UNKNOWN,
                text=f"{what}; they were taken for those of the run that is written down now",
            ),
        )

    def require(self) -> dict[str, Any]:
        """What is trained.

        Raises:
            MissingFileError: there is no run.
        """
        found = self.identity() if self.path.is_dir() else None
        if found is None:
            raise MissingFileError(
                f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train"
                " --run`"
            )
        return found

    def unwritable(self, error: OSError) -> RunError:
        """The error where something of the folder could not be written: what stands in the way, and
        what helps.
        """
        what = [
            str(name)
            for name in (error.filename2, error.filename)
            if name and str(name) != str(self.path)
        ][:1]
        where = f" ({what[0]})" if what else ""
        return RunError(
            f"the folder of the run, {self.path}, cannot be written:"
            f" {error.strerror or error}{where}\nTry:"
            f" {_remedy(error, what[0] if what else str(self.path))}"
        )

    def probe(self) -> None:
        """Looks whether the folder can be made, or written to, before anything takes time; what
        this makes for it is gone afterwards.

        Raises:
            RunError: it cannot.
        """
        place = next(
            one for one in (self.path, *self.path.absolute().parents) if os.path.lexists(one)
        )
        trial = place / f".shardlib-{secrets.token_hex(8)}"
        try:
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            error.filename = str(place)
            raise self.unwritable(error) from error

    def _make(
        self,
        identity: Mapping[str, Any],
        trace: Mapping[str, Any],
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

    def _differences(
        self,
        known: Mapping[str, Any],
        wanted: Mapping[str, Any],
        trace: Mapping[str, Any] | None,
        allow: Sequence[str],
    ) -> list[Difference]:
        """Differences that are allowed.

        Raises:
            RunError: there are others.
        """
        words = [
            Difference(name=word, text=text)
            for word in {**known["run"], **wanted}
            for text in _unlike(word, known["run"].get(word), wanted.get(word))
        ]
        told = {one.name for one in words}
        traced = (
            differences(known.get("traced", {}), trace or {}, known.get("versions", {}), versions())
            if trace
            else []
        )
        found = [*words, *(one for one in traced if one.name not in told)]
        if any(one.name not in allow for one in found):
            names = ",".join(dict.fromkeys(one.name for one in found))
            raise_all(
                OtherRunError,
                f"{self.path} holds another run",
                [one.text for one in found if one.name not in allow],
                hint=(
                    "another folder, or what the run was begun with; to go on with these changes"
                    f" on purpose, --allow-changes {names}, or Settings(allow_changes=...). Nothing"
                    " was changed"
                ),
            )
        return found

    def _change(
        self,
        known: Mapping[str, Any],
        wanted: Mapping[str, Any],
        trace: Mapping[str, Any] | None,
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
        self, names: Iterable[str], changes: Sequence[Difference], before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is written down of changes on purpose."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "after_step": max(self.saved(), default=0),
            "names": list(names),
            "differences": [one.text for one in changes],
            "before": dict(before),
        }

    def _write(self, data: Mapping[str, Any]) -> None:
        write_whole(self.manifest, json.dumps(data, indent=1) + "\n")


def _wrong(data: Any) -> str:
    """What is wrong with the plain data of a description; nothing where it is one."""
    if not isinstance(data, dict):
        return "it is JSON, and no object"
    missing = [name for name in ("format", "run") if name not in data]
    if missing:
        return f"it does not say its {' and '.join(missing)}"
    broken = [
        name for name in ("run", "traced", "versions") if not isinstance(data.get(name, {}), dict)
    ]
    return (
        f"its {' and '.join(broken)} {'are' if len(broken) > 1 else 'is'} no object"
        if broken
        else ""
    )


def _remedy(error: OSError, what: str) -> str:
    """What helps where something cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or another folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"move {what} away, which is something else than what a run has there; or another"
            " folder"
        )
    return "another folder, or other permissions"


def _unlike(word: str, known: Any, wanted: Any) -> list[str]:
    """How two values differ; of objects, which of their fields do."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        return [
            text
            for key in {**known, **wanted}
            for text in _unlike(f"{word}.{key}", known.get(key), wanted.get(key))
        ]
    return (
        [f"{word} is {_text(wanted)}, the run has {_text(known)}"]
        if _text(known) != _text(wanted)
        else []
    )


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
