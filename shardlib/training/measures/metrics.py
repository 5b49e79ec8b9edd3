"""Metrics: what is written down about every step, where, and how it is read again.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter

from shardlib.errors import RunError
from shardlib.untrusted import read_regular
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: The event that has numbers of its own.
VALIDATION = "validation"


class Sink(Protocol):
    """Where metrics go."""

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
    """What a file of metrics holds.

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
    found = [record for line in lines if (record := _record(line)) is not None]
    return Records(records=found, unread=len(lines) - len(found))


def _record(line: str) -> JsonObject | None:
    """What a line says; None where it says nothing that a reader could count on."""
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
    found: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            found = {step: kept for step, kept in found.items() if step <= record["step"]}
        elif record.get("event") == VALIDATION:
            numbers = scalars(record)
            numbers.pop("seconds", None)
            found[record["step"]] = numbers
    return dict(sorted(found.items()))


def number(record: JsonMapping, name: str) -> float:
    """A number of a record; 0 where it has none that is finite."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def _opened_own(path: str, flags: int) -> int:
    """Opens a regular file of one name that is no link."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return file
    os.close(file)
    raise OSError(errno.EEXIST, "it is a link, or no regular file", path)


def _torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def by_step(records: Iterable[JsonMapping]) -> dict[int, JsonMapping]:
    """The record of every step that counts: the last one written; steps that a resumed or rolled
    back run has not done again are not there.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            found = {step: kept for step, kept in found.items() if step <= record["step"]}
        elif "event" not in record:
            found[record["step"]] = record
    return dict(sorted(found.items()))


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
