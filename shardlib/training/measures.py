"""Measurements of a run: losses and metrics, rates, the load of the machine, profiles.

The loss of a bigram model of bytes: the baseline that a trained model must beat.

>>> text = np.frombuffer(b"abababab", np.uint8)
>>> batch = {"inputs": text[None, :-1], "targets": text[None, 1:]}
>>> round(cross_entropy(fit([batch], smoothing=0.01), [batch]), 2)
0.54

Detection of bad losses.

Two things go wrong with a loss: it is no longer finite, or it jumps. A jump is measured against the
last steps by their median and by the median distance from it, which one outlier does not move; PaLM
(arXiv:2204.02311, 5.1) met about twenty of them, and got past each by going back about 100 steps
and leaving out the batches around it.

>>> judge = Judge(Policy(window=4, spike=10.0, action="roll-back"))
>>> [judge.see(loss) for loss in (5.0, 4.9, 5.1, 4.8, 4.9, 90.0)]
['go', 'go', 'go', 'go', 'go', 'roll-back']
>>> judge.see(float("nan"))
'roll-back'

Metrics of every step, and their files.

A run's metrics are lines of JSON, one a step, flushed as they are written: a process that is killed
loses at most the line it was writing. A run that resumes at an earlier step writes those steps
again; whoever reads takes the last line of each step, so the file is never rewritten.

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
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboardX import SummaryWriter

from shardlib.errors import ModelError, RunError, raise_all
from shardlib.untrusted.data import JsonMapping, JsonObject, read_regular

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []


#: Of a batch: "inputs" and "targets" [batch, seq], bytes.
Batch = Mapping[str, np.ndarray]


def fit(batches: Iterable[Batch], *, smoothing: float = 1.0) -> np.ndarray:
    """Log probabilities [previous byte, next byte], float64, of a byte bigram model with additive
    smoothing.

    Args:
        batches: what it learns from.
        smoothing: added to every count.
    """
    counts = np.full(256 * 256, smoothing)
    for batch in batches:
        pairs = batch["inputs"].astype(np.int64) * 256 + batch["targets"]
        counts += np.bincount(pairs.ravel(), minlength=256 * 256)
    table = counts.reshape(256, 256)
    return np.log(table / table.sum(1, keepdims=True))


def cross_entropy(log_probabilities: np.ndarray, batches: Iterable[Batch]) -> float:
    """Mean cross entropy in nats a byte over the predictions of batches of equal size.

    Args:
        log_probabilities: of the next byte, [256, 256].
        batches: with "inputs" and "targets", bytes [batch, seq] each.
    """
    return float(
        np.mean([-log_probabilities[batch["inputs"], batch["targets"]].mean() for batch in batches])
    )


# --------------------------------------------------------------------------------------------------
# The share of this machine that others used while this process trained.
#
# A time that was measured while other programs computed says little about a prediction for a
# machine of one's own. The system counts the time that its processors were at work (proc(5), the
# first line of /proc/stat; time that a hypervisor gave to other machines is among it), and that of
# this process; the rest is that of others.

STAT = Path("/proc/stat")
#: Share of the processors up to which a machine counts as quiet.
QUIET = 0.1
#: Seconds after which the share of the last ones is looked at again: the system counts in
#: hundredths of a second.
EVERY = 1.0


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Ticks since the boot: of all processors together, at work or not; at work; and by this
    process.
    """

    total: float
    busy: float
    own: float


class Busy:
    """Processor time that others use from now on."""

    def __init__(self, *, alone: bool = True) -> None:
        """Args: alone: whether this is the only process of its job here; of several, each would
        take the others for strangers.
        """
        self._first = self._last = _sample() if alone else None
        self._looked, self._recent = time.monotonic(), None

    def share(self) -> float | None:
        """Of all processors, from 0 to 1, used by others since the beginning; None where the system
        does not say.
        """
        return _share(self._first, _sample())

    def recent(self) -> float | None:
        """The same of the last second or more; None at first, and where the system does not say."""
        if self._last is not None and time.monotonic() - self._looked >= EVERY:
            now = _sample()
            self._recent, self._last, self._looked = _share(self._last, now), now, time.monotonic()
        return self._recent


def in_words(share: float | None) -> str:
    """Returns why times are not compared with a prediction; empty where the machine was quiet.

    >>> in_words(0.43), in_words(0.02)
    ('other programs used 43% of the processors', '')
    """
    if share is None:
        return "how much other programs used of the processors is not known"
    return f"other programs used {share:.0%} of the processors" if share > QUIET else ""


def _share(before: _Sample | None, now: _Sample | None) -> float | None:
    if before is None or now is None or now.total <= before.total:
        return None
    others = (now.busy - before.busy) - (now.own - before.own)
    return min(max(others / (now.total - before.total), 0.0), 1.0)


def _sample() -> _Sample | None:
    try:
        words = STAT.read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
        times = os.times()
        return _Sample(
            total=sum(ticks),
            busy=sum(ticks) - ticks[3] - ticks[4],
            own=(times.user + times.system + times.children_user + times.children_system)
            * os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, ValueError, IndexError):
        return None


#: What may follow a spike: nothing but a warning; the step is left out, by a guard of the program
#: (`shardlib.Guards(spike=True)`); back to the newest checkpoint, and past the batches since; an
#: error.
ACTIONS = ("warn", "skip", "roll-back", "stop")
#: Median absolute deviations of a normal distribution in one standard deviation.
MAD_OF_SIGMA = 1.4826
#: Deviations below this part of the median are taken for it: a loss that has settled is not made of
#: spikes.
FLOOR = 0.01


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The conditions of a bad loss, and the response.

    Attributes:
        window: losses that the next one is compared with; a spike is not looked for before there
            are that many.
        spike: standard deviations above the median of the window that make a spike; 0 looks for
            none.
        action: after a spike, one of `ACTIONS`. A loss that is not finite warns nobody: it rolls
            back, or stops.
        attempts: times that a run may roll back without a new checkpoint between.
        metric: the metric of a step that is judged; of a step of the user's own it is what stands
            for the loss.
        skips: steps in a row that guards may leave out; one more is a bad loss. A scale of the loss
            that begins too high takes up to twenty.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    window: int = 64
    spike: float = 20.0
    action: str = "roll-back"
    attempts: int = 3
    metric: str = "loss"
    skips: int = 20

    def __post_init__(self) -> None:
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
    """Sees every loss in its order; its memory is `seen`, which checkpoints keep, so that a resumed
    run judges as one that was never interrupted.
    """

    def __init__(self, policy: Policy, seen: Iterable[float] = ()) -> None:
        self.policy = policy
        self.seen: deque[float] = deque(seen, maxlen=policy.window)
        self.skipped = 0

    def see(self, loss: float) -> str:
        """ "go", or an action of the policy; a bad loss is not remembered."""
        if math.isfinite(loss):
            self.skipped = 0
        if not math.isfinite(loss):
            return "stop" if self.policy.action == "stop" else "roll-back"
        if loss > self.limit():
            return self.policy.action
        self.seen.append(loss)
        return "go"

    def skip(self) -> str:
        """The same for a step that guards have left out."""
        self.skipped += 1
        return "go" if self.skipped <= self.policy.skips else self.see(math.nan)

    def limit(self) -> float:
        """The largest loss that is not a spike; infinite as long as too little was seen."""
        if not self.policy.spike or len(self.seen) < self.policy.window:
            return math.inf
        middle = statistics.median(self.seen)
        spread = statistics.median(abs(loss - middle) for loss in self.seen) * MAD_OF_SIGMA
        return middle + self.policy.spike * max(spread, FLOOR * abs(middle))


#: The event that has numbers of its own.
VALIDATION = "validation"


class Sink(Protocol):
    """A receiver of metrics."""

    def write(self, record: JsonMapping) -> None:
        """Takes one record: "step" and numbers, or an "event" with "step" and whatever belongs to
        it.
        """
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class JsonLines:
    """Appends records to a file; a line that a killed process left unfinished is ended first.

    Args:
        path: of the file.
        own: whether it has to be a file of one name, in its own place: what a folder of a stranger
            links to is somebody else's.

    Raises:
        OSError: it cannot be opened, or is not of its own.
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
        """Args: folder: of event files. after: steps beyond this one are hidden, where an earlier
        process wrote them.
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
        """Writes a text of its own."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class Records:
    """Contents of a file of metrics.

    Attributes:
        records: in the order they were written; those of steps have a number as "loss".
        unread: how many lines are none: a process that was killed left them unfinished, or somebody
            else wrote them.
    """

    records: list[JsonObject]
    unread: int


def read_records(path: Path) -> list[JsonObject]:
    """All records of a file in the order they were written; lines that are none are passed over
    (`read_lines` counts them).
    """
    return read_lines(path).records


def read_lines(path: Path) -> Records:
    """All records of a file, whatever else is in it."""
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
    """Returns what a line says; None where it says nothing that a reader could count on."""
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
    """The numbers of a step or a validation by name; of other events none."""
    if record.get("event", VALIDATION) != VALIDATION:
        return {}
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


def validations(records: Iterable[JsonMapping]) -> dict[int, dict[str, float]]:
    """The numbers of every validation that counts, by step."""
    by_step: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            by_step = {step: numbers for step, numbers in by_step.items() if step <= record["step"]}
        elif record.get("event") == VALIDATION:
            numbers = scalars(record)
            numbers.pop("seconds", None)
            by_step[record["step"]] = numbers
    return dict(sorted(by_step.items()))


def number(record: JsonMapping, name: str) -> float:
    """A number of a record; 0 where it has none that is finite."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def _opened_own(path: str, flags: int) -> int:
    """Opens a regular file of one name that is not a link."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    os.close(file)
    raise OSError(errno.EEXIST, "it is a link, or no regular file", path)


def _torn(path: Path) -> bool:
    """Returns whether the last line of a file has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def by_step(records: Iterable[JsonMapping]) -> dict[int, JsonMapping]:
    """The record of every step that counts: the last one written; steps that a resumed or rolled
    back run has not done again are not there.
    """
    latest: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            latest = {step: entry for step, entry in latest.items() if step <= record["step"]}
        elif "event" not in record:
            latest[record["step"]] = record
    return dict(sorted(latest.items()))


def _plain(record: JsonMapping) -> JsonObject:
    """JSON has no infinite numbers; they are written as words."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _read(record: JsonObject) -> JsonObject:
    return {
        name: float(value) if value in ("nan", "inf", "-inf") else value
        for name, value in record.items()
    }
