"""How a run is doing: what its folder says, for `shardlib status RUN`; no process of the run is
asked, and JAX is not imported.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardlib.checkpointing.owner_files import Claim, described
from shardlib.cost.estimate import Estimate
from shardlib.planning.plan import Plan
from shardlib.processes.heartbeat import ENDED, Heartbeat, Observer
from shardlib.training.measures.busy import in_words
from shardlib.training.measures.metrics import by_step, number, read_records
from shardlib.training.run.folder import RunFolder
from shardlib.untrusted import read_regular
from shardlib.untrusted.json_types import JsonMapping, JsonObject

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
    """How fast the last steps were.

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
        kept = ", ".join(map(str, self.checkpoints)) or "none yet"
        lines.append(f"  checkpoints: {kept}")
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
    told = [record for record in records if "event" in record]
    beats = _beats(folder)
    estimate = None
    with contextlib.suppress(
        OSError, ValueError, RecursionError
    ):  # a plan that another version wrote predicts nothing here
        estimate = Plan.from_json(read_regular(folder.plan)).estimate
    return Status(
        run=str(path),
        state=_state(told, beats, bool(done)),
        step=done[-1]["step"] if done else 0,
        steps=steps if isinstance(steps := run.get("steps"), int) else 0,
        loss=done[-1]["loss"] if done else None,
        checkpoints=folder.saved(),
        pace=_pace(done, estimate),
        processes=beats,
        events=tuple(told[-events:]),
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
    known = [number(record, "others_busy") for record in done if "others_busy" in record]
    return statistics.fmean(known) if known else None


def _beats(folder: RunFolder) -> tuple[tuple[Heartbeat, float], ...]:
    """Heartbeats of loops that go on, and how long each has been silent: those of this machine say
    it themselves, others are watched until all of them have changed, or for `WATCHED` seconds.
    """
    found = [beat for beat in folder.heartbeats() if beat.phase != ENDED]
    silent = {beat.rank: age for beat in found if (age := beat.age()) is not None}
    others, observer, end = (
        [beat for beat in found if beat.rank not in silent],
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
        for beat in found
    )


def _state(told: list[JsonObject], beats: tuple[tuple[Heartbeat, float], ...], begun: bool) -> str:
    alive = [beat for beat, age in beats if age < SILENT and _lives(beat)]
    last = told[-1]["event"] if told else ""
    if alive:
        return "training"
    if any(beat.age() is not None and _lives(beat) for beat, _ in beats):
        return "stuck"
    return last if last in ("finished", "stopped") else "failed" if begun or beats else "new"


def _lives(beat: Heartbeat) -> bool:
    """Whether there is such a process; of another machine nobody knows, and its heartbeat
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
