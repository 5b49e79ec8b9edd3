"""The folder of a run: its owner, its description, changes of what is trained in it, and its
status.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

from shardlib.checkpointing.folder import Claim, Folder, described
from shardlib.cost.estimate import Estimate
from shardlib.errors import MissingFileError, RunError, raise_all
from shardlib.planner.plan import Plan
from shardlib.processes.place import ENDED, Heartbeat, Observer, read_heartbeat, write_whole
from shardlib.training.measures import by_step, in_words, number, read_records
from shardlib.untrusted.data import JsonMapping, JsonObject, read_regular, shown

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []

#: Differences of one kind that a message shows.
SHOWN = 4

# --------------------------------------------------------------------------------------------------
# Differences between what is trained and what a run was begun with; imports no JAX.

#: What can be another than before.
NAMES = ("loss", "optimizer", "lr", "data", "seed", "model", "batch", "exchange")
#: What allows to go on from checkpoints of which nobody has written down what they are of.
UNKNOWN = "identity"
#: Packages that write down what is traced.
PACKAGES = ("jax", "flax", "optax")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting on which another process of the run differs.

    Attributes:
        name: what it is called where it is allowed: "loss".
        text: what is different, in words.
    """

    name: str
    text: str


def unknown_names(allow: Sequence[str], identity: JsonMapping) -> list[str]:
    """Returns what is wrong with the names of what may be another; nothing where nothing is."""
    words = dict.fromkeys((*NAMES, *identity, UNKNOWN))
    unknown = sorted({*allow} - {*words})
    if not unknown:
        return []
    return [f"allow_changes has {', '.join(map(repr, unknown))}; known are {', '.join(words)}"]


def versions() -> dict[str, str]:
    """Versions of what traces."""
    return {name: metadata.version(name) for name in PACKAGES}


def differences(
    stored: JsonMapping,
    current: JsonMapping,
    before: JsonMapping,
    now: JsonMapping,
) -> list[Difference]:
    """Returns what of a run is not as it was traced before."""
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
    return results


#: What runs are that were begun before it was written down.
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
    """Returns which operations there are more or less of."""
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
    """Returns which numbers are others, where there are as many."""
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
# The contents of `run.json`, read and compared with the current run.

#: Of `run.json`.
FORMAT = 1


class OtherRunError(RunError):
    """A folder that holds another run; the differences are listed."""


def read_manifest(path: Path) -> JsonObject | None:
    """All of a `run.json`; None where there is none."""
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
    """Returns what there is to say of checkpoints that stand in a folder without `run.json`;
    nothing where there are none.
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
    """Differences between a run and what is wanted now that are allowed.

    Args:
        trace: what is traced; None where that is not known yet.
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
    """Returns what is wrong with the plain data of a description; nothing where it is one."""
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
    """Returns how two values differ; of objects, which of their fields do."""
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
    """Returns what helps where something cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or another folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"move {what} away, which is something else than what a run has there; or another"
            " folder"
        )
    return "another folder, or other permissions"


# --------------------------------------------------------------------------------------------------
# The folder of a run: its contents, and whether this process may go on with it.
#
#     run.json         what is trained, in words and as digests of what is traced
#                      (`shardlib.training.run`), and what was changed on purpose
#     plan.json        the plan of the newest process
#     metrics.jsonl    a line a step (`shardlib.training.measures`)
#     checkpoints/     `shardlib.checkpointing`; in `owner/` there, who may write to the run
#     heartbeat/       a file a process (`shardlib.processes.place`)
#     tensorboard/     event files
#     compiled/        programs that XLA compiled, so that a process that starts again need not
#     profiles/        traces, on demand
#
# A run is what `run.json` says. Who opens the folder for another model, another loss, other data
# or another batch is told so and nothing is touched: its checkpoints would be of no use, or its
# loss curve would no longer be one. Who means it names what may be another; that is done and
# written down, with what was there before.


@dataclass(frozen=True, kw_only=True)
class Opened:
    """State of a folder when it was opened.

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
        """Returns what is trained."""
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
        """Returns what the processes of the run say, by rank."""
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
        """Makes the folder, or checks that it is that of this run; for its owner."""
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
        """Returns what is trained, as it was written down; None where there is no run."""
        manifest = read_manifest(self.manifest)
        return manifest["run"] if manifest is not None else None

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
        """Returns what is trained."""
        identity = self.identity() if self.path.is_dir() else None
        if identity is None:
            raise MissingFileError(
                f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train"
                " --run`"
            )
        return identity

    def unwritable(self, error: OSError) -> RunError:
        """The error where something of the folder could not be written: what stands in the way,
        and what helps.
        """
        names = [str(name) for name in (error.filename2, error.filename) if name]
        what = next((name for name in names if name != str(self.path)), "")
        return RunError(
            f"the folder of the run, {self.path}, cannot be written:"
            f" {error.strerror or error}{f' ({what})' if what else ''}\nTry:"
            f" {_remedy(error, what or str(self.path))}"
        )

    def probe(self) -> None:
        """Looks whether the folder can be made, or written to, before anything takes time; what
        this makes for it is gone afterwards.
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
        """Writes down what the run is from now on, and what it was."""
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
        """Returns what is written down of changes on purpose."""
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
# The status of a run by its folder, for `shardlib status RUN`; no process of the run is asked, and
# JAX is not imported.

#: Seconds without a heartbeat after which a process counts as gone.
SILENT = 15.0
#: Seconds that processes of other machines are watched for a sign of life.
WATCHED = 5.0
#: Seconds between two looks at them.
LOOK_EVERY = 0.1
#: Steps whose median makes the figures.
RECENT = 100


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of the last steps.

    Attributes:
        step_seconds: median; 0 where there is no step.
        tokens_per_second: the same.
        data_share: part of the step's time spent waiting for batches.
        predicted_seconds: of a step, by the plan; 0 where there is none.
        mfu: model FLOPs utilisation at the measured time; 0 where the plan predicts none.
        busy: share of the processors that other programs used; None where nobody knows.
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
        state: "training", "stuck" (a process lives, and its phase lasts), "stopped", "failed" (no
            process, and no word of an end), "finished" or "new".
        step: newest step whose loss is known.
        steps: that it is to do; 0 where nobody said.
        loss: of that step.
        checkpoints: steps of the committed checkpoints.
        pace: of the last steps.
        processes: heartbeats of those whose loop goes on, by rank, and for how many seconds each
            has been silent; of those of other machines as long as somebody watched.
        owner: who may write to the folder, and has not given it back; None where nobody may.
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
    ):  # a plan that another version wrote predicts nothing here
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
    """The pace of the steps that are known, beside what the plan predicts."""
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
    """Model FLOPs utilisation in words; a measured one says nothing where the peak was taken too
    low.

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
    """Heartbeats of loops that go on, and how long each has been silent: those of this machine say
    it themselves, others are watched until all of them have changed, or for `WATCHED` seconds.
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
    """Returns whether there is such a process; of another machine nobody knows, and its heartbeat
    counts.
    """
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
