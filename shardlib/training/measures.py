"""Measurements of a run: losses and metrics, rates, profiles.

Detection of bad losses: those that are not finite, and spikes. A spike is measured against the last
losses by their median and the median absolute deviation, which one outlier does not move; PaLM
(arXiv:2204.02311, 5.1) met about twenty of them, and got past each by restarting about 100 steps
earlier and skipping the batches around it.

>>> judge = Judge(Policy(window=4, spike=10.0, action="roll-back"))
>>> [judge.see(loss) for loss in (5.0, 4.9, 5.1, 4.8, 4.9, 90.0)]
['go', 'go', 'go', 'go', 'go', 'roll-back']
>>> judge.see(float("nan"))
'roll-back'

Metrics files: one line of JSON per step, flushed when written, so that a killed process loses at
most the last line. A run that resumes at an earlier step writes those steps again; readers take the
last line of each step, so the file is never rewritten.

>>> steps = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
>>> again = [{"event": "resumed", "step": 1}, {"step": 2, "loss": 2.5}]
>>> list(by_step([*steps, *again]).items())
[(1, {'step': 1, 'loss': 3.0}), (2, {'step': 2, 'loss': 2.5})]
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter

from shardlib.errors import ModelError, RunError, SettingsError, raise_all
from shardlib.untrusted.data import JsonMapping, JsonObject, read_regular, require_types

#: Former submodules are resolved by `shardlib._moved`.
__path__: list[str] = []


#: Responses to a spike: a warning; skipping the step, by a guard of the program
#: (`shardlib.Guards(spike=True)`); rolling back to the newest checkpoint and skipping the batches
#: since; an error.
ACTIONS = ("warn", "skip", "roll-back", "stop")
#: Standard deviation over median absolute deviation, for a normal distribution.
MAD_OF_SIGMA = 1.4826
#: Minimum deviation as a fraction of the median, so that a converged loss has no spikes.
FLOOR = 0.01


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Conditions for a bad loss, and the response.

    Attributes:
        window: number of losses that the next one is compared with; spikes are detected once there
            are that many.
        spike: standard deviations above the median of the window that make a spike; 0 for no
            detection.
        action: response to a spike, one of `ACTIONS`. A loss that is not finite stops the run under
            "stop", and otherwise rolls it back.
        attempts: maximum number of roll-backs without a new checkpoint in between.
        metric: the metric of a step that is judged; of a user's own step, the one that is its loss.
        skips: steps in a row that guards may skip; one more is a bad loss. A loss scale that starts
            too high takes up to twenty.

    Raises:
        ModelError: values of another kind or out of range, all of them listed.
    """

    window: int = 64
    spike: float = 20.0
    action: str = "roll-back"
    attempts: int = 3
    metric: str = "loss"
    skips: int = 20

    def __post_init__(self) -> None:
        require_types(self, "shardlib.training.measures.Policy", SettingsError)
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be at least {minimum}"
            for name, minimum in (("window", 2), ("spike", 0), ("attempts", 0), ("skips", 0))
            if not getattr(self, name) >= minimum
        ]
        if self.action not in ACTIONS:
            failures.append(f"action is {self.action!r}; it is one of {', '.join(ACTIONS)}")
        if failures:
            raise_all(ModelError, "the policy for bad losses is not usable", failures)


class Judge:
    """Judges every loss in order; its state is `seen`, which checkpoints store, so that a resumed
    run judges like an uninterrupted one.
    """

    def __init__(self, policy: Policy, seen: Iterable[float] = ()) -> None:
        self.policy = policy
        self.seen: deque[float] = deque(seen, maxlen=policy.window)
        self.skipped = 0

    def see(self, loss: float) -> str:
        """The response to a loss, "go" or an action of the policy; bad losses are not added to
        `seen`.
        """
        if math.isfinite(loss):
            self.skipped = 0
        if not math.isfinite(loss):
            return "stop" if self.policy.action == "stop" else "roll-back"
        if loss > self.limit():
            return self.policy.action
        self.seen.append(loss)
        return "go"

    def skip(self) -> str:
        """The response to a step that guards have skipped."""
        self.skipped += 1
        return "go" if self.skipped <= self.policy.skips else self.see(math.nan)

    def limit(self) -> float:
        """The largest loss that is not a spike; infinite until `window` losses were seen."""
        if not self.policy.spike or len(self.seen) < self.policy.window:
            return math.inf
        middle = statistics.median(self.seen)
        spread = statistics.median(abs(loss - middle) for loss in self.seen) * MAD_OF_SIGMA
        return middle + self.policy.spike * max(spread, FLOOR * abs(middle))


#: The event with numbers.
VALIDATION = "validation"


class Sink(Protocol):
    """A receiver of metrics."""

    def write(self, record: JsonMapping) -> None:
        """Writes one record: "step" and numbers, or an "event" with "step" and further fields."""
        ...

    def close(self) -> None:
        """Flushes and closes."""
        ...


class JsonLines:
    """Appends records to a file; a line that a killed process left unfinished is terminated first.

    Args:
        path: of the file.
        own: whether the file must be a regular file with a single link: a folder from elsewhere may
            link to another's file.

    Raises:
        OSError: it cannot be opened, or is not such a file.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        opener = _opened_own if own else None
        self._file = open(path, "a", encoding="utf-8", opener=opener)  # noqa: SIM115
        torn = _torn(path)
        if torn:
            self._file.write("\n")

    def write(self, record: JsonMapping) -> None:
        self._file.write(json.dumps(_plain(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class EventFiles:
    """Writes numbers as scalars and events as text, for TensorBoard."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Args: folder: of event files. after: steps beyond this one, written by an earlier
        process, are hidden.
        """
        self._writer = SummaryWriter(
            str(folder), purge_step=after + 1 if after else None, flush_secs=10
        )

    def write(self, record: JsonMapping) -> None:
        step = int(record["step"])
        numbers = scalars(record)
        if "event" in record and not numbers:
            self._writer.add_text("events", json.dumps(_plain(record)), step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def page(self, name: str, text: str, step: int) -> None:
        """Writes a separate text."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class Records:
    """Contents of a file of metrics.

    Attributes:
        records: in file order; those of steps have a number as "loss".
        unread: number of invalid lines: left unfinished by a killed process, or written by others.
    """

    records: list[JsonObject]
    unread: int


def read_records(path: Path) -> list[JsonObject]:
    """All records of a file in file order; invalid lines are skipped (`read_lines` counts them)."""
    return read_lines(path).records


def read_lines(path: Path) -> Records:
    """All records of a file, and the number of invalid lines."""
    try:
        lines = read_regular(path).decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        lines = list[str]()
    except OSError as error:
        raise RunError(
            f"the metrics of the run, {path}, cannot be read: {error.strerror or error}\nTry: other"
            " permissions, or another name for what is there; nothing was changed"
        ) from error
    lines = [line for line in lines if line.strip()]
    records = [record for line in lines if (record := _record(line)) is not None]
    return Records(records=records, unread=len(lines) - len(records))


def _record(line: str) -> JsonObject | None:
    """The record of a line; None if it is not valid."""
    try:
        record = json.loads(line)
        step = record["step"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31:
            return None
        record = _read(record)
        if "event" in record:
            return record if isinstance(record["event"], str) else None
        loss = record["loss"]
        if isinstance(loss, bool) or not isinstance(loss, (int, float)):
            return None
        record["loss"] = float(loss)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        RecursionError,
        OverflowError,
    ):
        return None
    return record


def scalars(record: JsonMapping) -> dict[str, float]:
    """The numbers of a step or a validation by name; {} for other events."""
    if record.get("event", VALIDATION) != VALIDATION:
        return {}
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


def number(record: JsonMapping, name: str) -> float:
    """A number of a record; 0 if it is missing or not finite."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def _opened_own(path: str, flags: int) -> int:
    """Opens a regular file that is not a link and has no other links."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    os.close(file)
    raise OSError(errno.EEXIST, "it is a link, or no regular file", path)


def _torn(path: Path) -> bool:
    """True if the last line of a file is unfinished."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def by_step(records: Iterable[JsonMapping]) -> dict[int, JsonMapping]:
    """The last record of every step; steps that a resumed or rolled back run has not repeated are
    left out.
    """
    latest: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            latest = {step: entry for step, entry in latest.items() if step <= record["step"]}
        elif "event" not in record:
            latest[record["step"]] = record
    return dict(sorted(latest.items()))


def _plain(record: JsonMapping) -> JsonObject:
    """The record with non-finite numbers as strings, since JSON has none."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _read(record: JsonObject) -> JsonObject:
    return {
        name: float(value) if value in ("nan", "inf", "-inf") else value
        for name, value in record.items()
    }
