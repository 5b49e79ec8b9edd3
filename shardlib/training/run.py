"""The folder of a run: its owner, its description, accepted changes, and its status."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

from shardlib import _moved
from shardlib.checkpointing.folder import Claim, Folder, described
from shardlib.cost.pricing import Estimate
from shardlib.errors import MissingFileError, RunError, raise_all
from shardlib.planner.plan import Plan
from shardlib.processes.place import ENDED, Heartbeat, Observer, read_heartbeat, write_whole
from shardlib.processes.timing import in_words
from shardlib.training.measures import by_step, number, read_records
from shardlib.untrusted.data import JsonMapping, JsonObject, read_regular, shown

#: Former submodules are resolved by `shardlib._moved`.
__path__: list[str] = []

#: Maximum number of differences of one kind in a message.
SHOWN = 4

# --------------------------------------------------------------------------------------------------
# Differences between the current training task and that of the stored run; imports no JAX.

#: Parts of a training task that can differ.
NAMES = ("loss", "optimizer", "lr", "data", "seed", "model", "batch", "exchange")
#: Accepts checkpoints without a description of their run.
UNKNOWN = "identity"
#: Packages whose versions affect traces.
PACKAGES = ("jax", "flax", "optax")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between the training tasks of two processes of a run.

    Attributes:
        name: its name in `allow_changes`, such as "loss".
        text: description.
    """

    name: str
    text: str


def unknown_names(allow: Sequence[str], identity: JsonMapping) -> list[str]:
    """The errors in the names of accepted changes."""
    words = dict.fromkeys((*NAMES, *identity, UNKNOWN))
    unknown = sorted({*allow} - {*words})
    if not unknown:
        return []
    return [f"allow_changes has {', '.join(map(repr, unknown))}; known are {', '.join(words)}"]


def versions() -> dict[str, str]:
    """Versions of the packages that affect traces."""
    return {name: metadata.version(name) for name in PACKAGES}


def differences(
    stored: JsonMapping,
    current: JsonMapping,
    before: JsonMapping,
    now: JsonMapping,
) -> list[Difference]:
    """The differences between a stored and a current trace."""
    others = [
        f"{name} {before.get(name, 'of an unknown version')} -> {version}"
        for name, version in now.items()
        if before.get(name) != version
    ]
    hint = (
        f"; it was traced by other versions ({', '.join(others)}), which may write the same down"
        " otherwise"
        if others
        else ""
    )
    results: list[Difference] = []
    for name, value in current.items():
        old = stored.get(name, _BEFORE.get(name) if stored else None)
        if (
            isinstance(old, Mapping)
            and _plain(old) != _plain(value)
            and not (name in _WORDS and old.get("digest") == value.get("digest"))
        ):
            results.append(
                Difference(
                    name=name,
                    text=_differences_text(name, old, value)
                    + (hint if name in ("loss", "optimizer", "lr") else ""),
                )
            )
    if all(difference.name != "model" for difference in results):
        return results
    same = [word.name for word in results if _follows(word.name, stored, current)]
    return [
        replace(word, text=f"{word.text}, with which {' and '.join(same)} are traced")
        if word.name == "model" and same
        else word
        for word in results
        if word.name not in same
    ]


#: Parts of traces whose kinds stay where only the arrays of the model are others.
_KINDS = {"loss": "operations", "optimizer": "operations", "lr": "constants"}


def _follows(name: str, *traces: JsonMapping) -> bool:
    """Whether a difference follows from other arrays of the model: the operations or numbers of a
    trace are of the same kinds.
    """
    kinds = {
        frozenset(map(repr, trace.get(name, {}).get(_KINDS.get(name)) or ())) for trace in traces
    }
    return name in _KINDS and len(kinds) == 1


#: Values of entries that descriptions of older runs lack.
_BEFORE = {"exchange": {"value": "exact"}}
_WORDS = {
    "loss": "the loss computes something else",
    "optimizer": "the optimizer is another, or has other guards",
    "lr": "numbers of the optimizer are others",
    "data": "the data are others",
    "model": "the model has other arrays",
}


def _differences_text(name: str, old: JsonMapping, new: JsonMapping) -> str:
    if name not in _WORDS:
        return f"{name} is {_short(new)}, the run has {_short(old)}"
    more = _operations(old.get("operations"), new.get("operations")) or _numbers(
        old.get("constants"), new.get("constants")
    )
    return f"{name}: {_WORDS[name]}{f' ({more})' if more else ''}"


def _short(value: Mapping[str, Any]) -> str:
    text = ", ".join(map(str, value.values()))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _operations(old: Any, new: Any) -> str:
    """The difference in the counts of operations, in words."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return ""
    counts = {
        name: _count(new.get(name)) - _count(old.get(name))
        for name in sorted({*old, *new}, key=str)
    }
    changed = [
        f"{abs(count)} {name} {'more' if count > 0 else 'less'}"
        for name, count in counts.items()
        if count
    ]
    return ", ".join(changed[:SHOWN]) + (
        f" and {len(changed) - SHOWN} more kinds" if len(changed) > SHOWN else ""
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _numbers(old: Any, new: Any) -> str:
    """The numbers that differ, if there are as many in both."""
    if not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        return ""
    changed = [
        f"{two!r} in place of {before!r}"
        for before, two in zip(old, new, strict=True)
        if before != two
    ]
    return ", ".join(dict.fromkeys(changed[:SHOWN])) + (
        f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --------------------------------------------------------------------------------------------------
# The contents of `run.json`, compared with the current run.

#: Format version of `run.json`.
FORMAT = 1


class OtherRunError(RunError):
    """The folder contains another run; the differences are listed."""


def read_manifest(path: Path) -> JsonObject | None:
    """The content of a `run.json`; None if there is none."""
    try:
        data = json.loads(read_regular(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = "it is a folder" if isinstance(error, IsADirectoryError) else error.strerror or error
        raise _undescribed(path, f"it cannot be read: {why}") from error
    except UnicodeDecodeError as error:
        raise _undescribed(path, "its bytes are not text (UTF-8)") from error
    except RecursionError as error:
        raise _undescribed(path, "it is nested too deeply") from error
    except ValueError as error:
        raise _undescribed(path, "it is empty, cut off, or something else than JSON") from error
    wrong = _wrong(data)
    if wrong:
        raise _undescribed(path, wrong)
    if data["format"] != FORMAT:
        raise RunError(
            f"{path} is of format {shown(data['format'])}; this version reads"
            f" {FORMAT}\nTry: the version of shardlib that wrote it, or another folder. Nothing"
            " was changed"
        )
    return data


def _undescribed(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} is not a description of a run: {why}\nTry: a copy of that file, if there"
        " is one, or another folder; to keep the checkpoints beside it, which need no repair,"
        f" rename it and go on with --allow-changes {UNKNOWN}. Nothing was changed"
    )


def unknown_checkpoints(
    manifest: Path, saved: Sequence[int], allow: Sequence[str]
) -> tuple[Difference, ...]:
    """An accepted difference if a folder without `run.json` has checkpoints; raises an error if it
    is not accepted.
    """
    if not saved:
        return ()
    what = (
        f"{manifest.parent} has checkpoints, the newest of step {saved[-1]}, and no"
        f" {manifest.name}: nobody knows of what run they are"
    )
    if UNKNOWN not in allow:
        raise RunError(
            f"{what}\nTry: a copy of {manifest.name}, if there is one, or another folder;"
            f" where they are known to be of this very run, --allow-changes {UNKNOWN}, or "
            f'Settings(allow_changes=("{UNKNOWN}",)). Nothing was changed'
        )
    return (
        Difference(
            name=UNKNOWN,
            text=f"{what}; they were taken for those of the run that is written down now",
        ),
    )


def allowed_differences(
    path: Path,
    stored: JsonMapping,
    current: JsonMapping,
    trace: JsonMapping | None,
    allow: Sequence[str],
) -> list[Difference]:
    """The accepted differences between a stored run and the current one.

    Args:
        trace: digests of the traced programs; None if not traced yet.
    """
    words = [
        Difference(name=word, text=text)
        for word in {**stored["run"], **current}
        for text in _unlike(word, stored["run"].get(word), current.get(word))
    ]
    changed_words = {difference.name for difference in words}
    traced = (
        differences(stored.get("traced", {}), trace or {}, stored.get("versions", {}), versions())
        if trace
        else []
    )
    results = [
        *words,
        *(difference for difference in traced if difference.name not in changed_words),
    ]
    if any(difference.name not in allow for difference in results):
        names = ",".join(dict.fromkeys(difference.name for difference in results))
        raise_all(
            OtherRunError,
            f"{path} holds another run",
            [difference.text for difference in results if difference.name not in allow],
            hint=(
                "another folder, or what the run was begun with; to go on with these changes"
                f" on purpose, --allow-changes {names}, or Settings(allow_changes=...). Nothing"
                " was changed"
            ),
        )
    return results


def _wrong(data: Any) -> str:
    """The errors in the plain data of a description; "" if it is valid."""
    if not isinstance(data, dict):
        return "it is JSON, but not an object"
    missing = [name for name in ("format", "run") if name not in data]
    if missing:
        return f"it does not say its {' and '.join(missing)}"
    broken = [
        name for name in ("run", "traced", "versions") if not isinstance(data.get(name, {}), dict)
    ]
    return (
        f"its {' and '.join(broken)} {'are not objects' if len(broken) > 1 else 'is not an object'}"
        if broken
        else ""
    )


def _unlike(word: str, stored: Any, current: Any) -> list[str]:
    """The difference between two values; of objects, field by field."""
    if isinstance(stored, dict) and isinstance(current, dict):
        return [
            text
            for key in {**stored, **current}
            for text in _unlike(f"{word}.{key}", stored.get(key), current.get(key))
        ]
    return (
        [f"{word} is {_manifest_text(current)}, the run has {_manifest_text(stored)}"]
        if _manifest_text(stored) != _manifest_text(current)
        else []
    )


def _manifest_text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _remedy(error: OSError, what: str) -> str:
    """The remedy for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or another folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"move {what} away, which is something else than what a run has there; or another"
            " folder"
        )
    return "another folder, or other permissions"


# --------------------------------------------------------------------------------------------------
# The folder of a run: its contents, and whether this process may resume it.
#
#     run.json         the training task, in words and as digests of the traced programs, and
#                      accepted changes
#     plan.json        the plan of the newest process
#     metrics.jsonl    one line per step (`shardlib.training.measures`)
#     checkpoints/     `shardlib.checkpointing`; `owner/` in it records the writer of the run
#     heartbeat/       one file per process (`shardlib.processes.place`)
#     tensorboard/     event files
#     compiled/        programs that XLA compiled, so that a restarted process need not
#     profiles/        traces, on demand
#
# A run is defined by its `run.json`. Opening the folder for another model, loss, data or batch is
# an error that leaves it untouched: its checkpoints would be useless, or its loss curve
# meaningless. Accepted changes are named explicitly, and recorded with the previous values.


@dataclass(frozen=True, kw_only=True)
class Opened:
    """State of a folder when it was opened.

    Attributes:
        known: whether the run existed.
        changes: accepted changes.
        untraced: whether the stored run had no digests of traced programs; they are added now.
    """

    known: bool
    changes: tuple[Difference, ...] = ()
    untraced: bool = False


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    path: Path

    @property
    def manifest(self) -> Path:
        """The description of the training task."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The plan of the newest process."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of states."""
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
        """Steps of the complete checkpoints, the oldest first."""
        return Folder(path=epath.Path(self.checkpoints)).steps()

    def heartbeat(self, rank: int) -> Path:
        """The heartbeat file of one process."""
        return self.path / "heartbeat" / f"rank-{rank}.json"

    def heartbeats(self) -> list[Heartbeat]:
        """The heartbeats of the processes of the run, by rank."""
        beats = (
            read_heartbeat(path) for path in sorted((self.path / "heartbeat").glob("rank-*.json"))
        )
        return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)

    def open(
        self,
        identity: JsonMapping,
        trace: JsonMapping | None = None,
        allow: Sequence[str] = (),
    ) -> Opened:
        """Creates the folder, or checks that it belongs to this run; only for its owner."""
        plain = json.loads(json.dumps(identity))
        try:
            manifest = read_manifest(self.manifest)
            if manifest is None:
                unknown = unknown_checkpoints(self.manifest, self.saved(), allow)
                self._make(plain, trace or {}, unknown, allow)
                return Opened(known=False, changes=unknown)
            changes = allowed_differences(self.path, manifest, plain, trace, allow)
            if changes or (trace is not None and "traced" not in manifest):
                self._change(manifest, plain, trace, changes)
        except OSError as error:
            raise self.unwritable(error) from error
        return Opened(
            known=True,
            changes=tuple(changes),
            untraced=trace is not None and "traced" not in manifest,
        )

    def write_plan(self, text: str) -> None:
        """Stores the plan of this process."""
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
        """Checks the task against the folder before slow work; an empty folder is fine, and nothing
        is changed.
        """
        manifest = read_manifest(self.manifest)
        if manifest is None:
            unknown_checkpoints(self.manifest, self.saved(), allow)
        else:
            plain = json.loads(json.dumps(identity))
            allowed_differences(
                self.path,
                {**manifest, "run": {word: manifest["run"].get(word) for word in plain}},
                plain,
                trace,
                allow,
            )

    def identity(self) -> JsonObject | None:
        """The stored training task; None if there is no run."""
        manifest = read_manifest(self.manifest)
        return manifest["run"] if manifest is not None else None

    def changed(self) -> frozenset[str]:
        """Names of changes accepted since the run was started."""
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
        """The stored training task; raises an error if there is no run."""
        identity = self.identity() if self.path.is_dir() else None
        if identity is None:
            raise MissingFileError(
                f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train"
                " --run`"
            )
        return identity

    def unwritable(self, error: OSError) -> RunError:
        """The error for a failed write in the folder: its cause and a remedy."""
        names = [str(name) for name in (error.filename2, error.filename) if name]
        what = next((name for name in names if name != str(self.path)), "")
        return RunError(
            f"the folder of the run, {self.path}, cannot be written:"
            f" {error.strerror or error}{f' ({what})' if what else ''}\nTry:"
            f" {_remedy(error, what or str(self.path))}"
        )

    def probe(self) -> None:
        """Checks that the folder can be created or written to before slow work; leaves nothing
        behind.
        """
        folders = (self.path, *self.path.absolute().parents)
        place = next(folder for folder in folders if os.path.lexists(folder))
        trial = place / f".shardlib-{secrets.token_hex(8)}"
        try:
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            error.filename = str(place)
            raise self.unwritable(error) from error

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
        manifest: JsonMapping,
        identity: JsonMapping,
        trace: JsonMapping | None,
        changes: Sequence[Difference],
    ) -> None:
        """Records the new training task, and the previous one."""
        before = {
            name: manifest[name] for name in ("run", "traced", "versions") if name in manifest
        }
        history = manifest["changes"] if isinstance(manifest.get("changes"), list) else []
        entry = self._entry(dict.fromkeys(change.name for change in changes), changes, before)
        self._write(
            {
                **manifest,
                "run": dict(identity),
                **({"traced": dict(trace), "versions": versions()} if trace else {}),
                **({"changes": [*history, entry]} if changes else {}),
            }
        )

    def _entry(
        self, names: Iterable[str], changes: Sequence[Difference], before: JsonMapping
    ) -> JsonObject:
        """The record of accepted changes."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "after_step": max(self.saved(), default=0),
            "names": list(names),
            "differences": [change.text for change in changes],
            "before": dict(before),
        }

    def _write(self, data: JsonMapping) -> None:
        write_whole(self.manifest, json.dumps(data, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------
# The status of a run from its folder, for `shardlib status RUN`; contacts no process of the run and
# does not import JAX.

#: Seconds without a heartbeat after which a process counts as dead.
SILENT = 15.0
#: Maximum seconds for which processes of other machines are watched for a new heartbeat.
WATCHED = 5.0
#: Polling interval of heartbeats, seconds.
LOOK_EVERY = 0.1
#: Number of steps over whose median the figures are computed.
RECENT = 100


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of the last steps.

    Attributes:
        step_seconds: median; 0 if there is no step.
        tokens_per_second: the same.
        data_share: fraction of the step time spent waiting for batches.
        predicted_seconds: seconds per step by the plan; 0 if there is none.
        mfu: model FLOPs utilisation at the measured time; 0 if the plan predicts none.
        busy: fraction of processor time used by other programs; None if unknown.
    """

    step_seconds: float
    tokens_per_second: float
    data_share: float
    predicted_seconds: float
    mfu: float
    busy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run, seen from outside.

    Attributes:
        run: its folder.
        state: "training", "stuck" (a process is alive, but its phase takes too long), "stopped",
            "failed" (no process, and no record of an end), "finished" or "new".
        step: newest step whose loss is known.
        steps: total number of steps; 0 if unknown.
        loss: of that step.
        checkpoints: steps of the committed checkpoints.
        pace: of the last steps.
        processes: heartbeats of the running loops by rank, each with the seconds since its last
            change; for other machines, as far as observed.
        owner: the process that may write to the folder, if any.
        events: the last ones.
    """

    run: str
    state: str
    step: int
    steps: int
    loss: float | None
    checkpoints: tuple[int, ...]
    pace: Pace
    processes: tuple[tuple[Heartbeat, float], ...]
    events: tuple[JsonMapping, ...]
    owner: Claim | None = None

    def to_json(self) -> JsonObject:
        """The status as plain data."""
        return {
            "run": self.run,
            "state": self.state,
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss,
            "checkpoints": [*self.checkpoints],
            "step_seconds": self.pace.step_seconds,
            "tokens_per_second": self.pace.tokens_per_second,
            "data_share": self.pace.data_share,
            "others_busy": self.pace.busy,
            "predicted_seconds": self.pace.predicted_seconds,
            "mfu": self.pace.mfu,
            "processes": [
                {
                    "rank": beat.rank,
                    "pid": beat.pid,
                    "step": beat.step,
                    "phase": beat.phase,
                    "phase_seconds": beat.lasts,
                    "silent_seconds": age,
                }
                for beat, age in self.processes
            ],
            "owner": asdict(self.owner) if self.owner is not None else None,
            "events": [dict(event) for event in self.events],
        }

    def __str__(self) -> str:
        of = f" of {self.steps}" if self.steps else ""
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        lines = [f"{self.run}: {self.state}, step {self.step}{of}{loss}"]
        if self.pace.step_seconds:
            others = f", while {text}" if (text := in_words(self.pace.busy)) else ""
            predicted = (
                f" ({self.pace.step_seconds / self.pace.predicted_seconds:.2f} x predicted{others})"
                if self.pace.predicted_seconds
                else ""
            )
            lines.append(
                f"  {self.pace.step_seconds * 1e3:,.1f} ms a step{predicted},"
                f" {self.pace.tokens_per_second:,.0f} tokens/s, MFU {_mfu(self.pace.mfu)},"
                f" {self.pace.data_share:.1%} of the time waiting for data"
            )
        listed = ", ".join(map(str, self.checkpoints)) or "none yet"
        lines.append(f"  checkpoints: {listed}")
        lines += [
            f"  rank {beat.rank} (process {beat.pid}): {beat.phase} since {beat.lasts:.0f} s, seen"
            f" {age:.0f} s ago"
            for beat, age in self.processes
        ]
        lines += [f"  {_event(event)}" for event in self.events]
        return "\n".join(lines)


def status(path: str | Path, *, events: int = 5) -> Status:
    """Reads the folder of a run."""
    folder = RunFolder(Path(path))
    run = folder.require()
    records = read_records(folder.metrics)
    done = [*by_step(records).values()][-RECENT:]
    events_all = [record for record in records if "event" in record]
    beats = _beats(folder)
    estimate = None
    with contextlib.suppress(
        OSError, ValueError, RecursionError
    ):  # no prediction from a plan of another version
        estimate = Plan.from_json(read_regular(folder.plan)).estimate
    return Status(
        run=str(path),
        state=_state(events_all, beats, bool(done)),
        step=done[-1]["step"] if done else 0,
        steps=steps if isinstance(steps := run.get("steps"), int) else 0,
        loss=done[-1]["loss"] if done else None,
        checkpoints=folder.saved(),
        pace=_pace(done, estimate),
        processes=beats,
        events=tuple(events_all[-events:]),
        owner=described(folder.checkpoints),
    )


def _pace(done: Sequence[JsonMapping], estimate: Estimate | None) -> Pace:
    """The pace of the known steps, with the plan's prediction."""
    predicted = estimate.step_seconds if estimate is not None else 0.0
    if not done:
        return Pace(
            step_seconds=0.0,
            tokens_per_second=0.0,
            data_share=0.0,
            predicted_seconds=predicted,
            mfu=0.0,
            busy=_busy(done),
        )
    seconds = statistics.median(number(record, "seconds") for record in done)
    return Pace(
        step_seconds=seconds,
        tokens_per_second=statistics.median(number(record, "tokens_per_second") for record in done),
        data_share=(
            sum(number(record, "data_seconds") for record in done)
            / max(sum(number(record, "seconds") for record in done), 1e-9)
        ),
        predicted_seconds=predicted,
        mfu=estimate.mfu * predicted / seconds if estimate is not None and seconds else 0.0,
        busy=_busy(done),
    )


def _mfu(share: float) -> str:
    """Model FLOPs utilisation in words; above 1, the peak of the plan is too low and the value is
    meaningless.

    >>> _mfu(0.412), _mfu(1.3)
    ('41.2%', 'unknown (the steps do more than the peak of which the plan knows)')
    """
    if share > 1:
        return "unknown (the steps do more than the peak of which the plan knows)"
    return f"{share:.1%}"


def _busy(done: Sequence[JsonMapping]) -> float | None:
    shares = [number(record, "others_busy") for record in done if "others_busy" in record]
    return statistics.fmean(shares) if shares else None


def _beats(folder: RunFolder) -> tuple[tuple[Heartbeat, float], ...]:
    """Heartbeats of running loops, and the seconds since their last change: on this machine by
    their time, on others by watching until all of them have changed, or for `WATCHED` seconds.
    """
    beats = [beat for beat in folder.heartbeats() if beat.phase != ENDED]
    silent = {beat.rank: age for beat in beats if (age := beat.age()) is not None}
    others, observer, end = (
        [beat for beat in beats if beat.rank not in silent],
        Observer(),
        time.monotonic() + WATCHED,
    )
    first = {beat.rank: beat for beat in others}
    while others and time.monotonic() < end:
        others = [
            beat for beat in folder.heartbeats() if beat.rank in first and beat.phase != ENDED
        ]
        silent |= {beat.rank: observer.silent(beat.rank, beat) for beat in others}
        if all(beat != first[beat.rank] for beat in others):
            break
        time.sleep(LOOK_EVERY)
    still = {beat.rank for beat in others if beat == first[beat.rank]}
    return tuple(
        (
            beat,
            (
                max(silent.get(beat.rank, 0.0), SILENT)
                if beat.rank in still
                else silent.get(beat.rank, 0.0)
            ),
        )
        for beat in beats
    )


def _state(
    events: list[JsonObject], beats: tuple[tuple[Heartbeat, float], ...], begun: bool
) -> str:
    alive = [beat for beat, age in beats if age < SILENT and _lives(beat)]
    last = events[-1]["event"] if events else ""
    if alive:
        return "training"
    if any(beat.age() is not None and _lives(beat) for beat, _ in beats):
        return "stuck"
    return last if last in ("finished", "stopped") else "failed" if begun or beats else "new"


def _lives(beat: Heartbeat) -> bool:
    """True if the process exists; one on another machine is assumed to."""
    if beat.age() is None:
        return True
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _event(event: JsonMapping) -> str:
    more = ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in ("event", "step", "time")
    )
    return f"step {event['step']}: {event['event']}{': ' + more if more else ''}"


_moved.keep_name(__name__, "status")
