"""Callbacks of a run: functions that are called while it goes on.

settings = Settings(callbacks=(EarlyStop("validation/loss"), BestCheckpoint("validation/loss")))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardlib.annotation.trees import Tree
from shardlib.errors import ModelError
from shardlib.lowering.training_program import TrainingProgram
from shardlib.training.states import learning_rate
from shardlib.untrusted.data import Json, JsonMapping

# --------------------------------------------------------------------------------------------------
# A moment of a run, as callbacks see it, and requests that they may make.
#
#     def shout(moment):
#         if moment.event == "validation" and moment.numbers["validation/loss"] < 0.1:
#             moment.stop("good enough")
#
# Settings(callbacks=(shout,), validation=...)
#
# Callbacks are called in all processes of a run, with the same numbers; what they ask for must be
# the same in all of them.

#: When callbacks are called: before the first step of a process, after every step, after every
#: validation, after the last step.
EVENTS = ("begin", "step", "validation", "end")


@dataclass(frozen=True, kw_only=True, eq=False)
class Asks:
    """Requests that a callback may make of a run.

    Attributes:
        stop: reason; the run ends after this step, in order.
        save: the state is saved after this step, where the run has a folder.
        log: numbers by name, written beside those of the step; at "begin" and "end" nowhere.
        say: shows a line.
        note: (event, more) writes an event down.
    """

    stop: Callable[[str], None]
    save: Callable[[], None]
    log: Callable[[Mapping[str, float]], None]
    say: Callable[[str], None]
    note: Callable[[str, JsonMapping], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A moment of a run.

    Attributes:
        event: one of `EVENTS`.
        step: steps that are done.
        steps: in all.
        numbers: of the step, or of the validation, by name; empty at "begin" and "end".
        program: that trains.
        state: the newest one, which the next step takes over: nothing of it may be kept without a
            copy. At "step" it is one step further than `numbers` where steps run ahead, which they
            do on accelerators; at all others it is that of `step`.
        asks: what can be asked of the run.
    """

    event: str
    step: int
    steps: int
    numbers: Mapping[str, float]
    program: TrainingProgram
    state: Tree
    asks: Asks

    def stop(self, reason: str) -> None:
        """Ends the run after this step; it is saved, and `Fitted.stopped` has the reason."""
        self.asks.stop(reason)

    def save(self) -> None:
        """Saves the state after this step, whether that is due or not."""
        self.asks.save()

    def log(self, **numbers: float) -> None:
        """Adds numbers to what is written down of this step or validation."""
        self.asks.log(numbers)

    def say(self, text: str) -> None:
        """Shows a line where the run is shown."""
        self.asks.say(text)

    def note(self, event: str, **more: Json) -> None:
        """Writes an event down, to all loggers."""
        self.asks.note(event, more)


class Callback(Protocol):
    """A function of a moment. One that raises ends the run, after its state was saved."""

    def __call__(self, moment: Moment, /) -> None:
        """Looks at the moment."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A callback with a memory, which checkpoints keep: a run that is resumed has the callbacks of
    one that was never interrupted.
    """

    def memory(self) -> JsonMapping:
        """The state of the callback, as plain data."""
        ...

    def remember(self, memory: JsonMapping, /) -> None:
        """Takes over what it knew when a checkpoint was saved; an empty mapping at the beginning
        of a run.
        """
        ...


# --------------------------------------------------------------------------------------------------
# The learning rate, as a metric of every step.


class LearningRate:
    """Writes the learning rate of every step down as "learning_rate".

    Args:
        schedule: the schedule that the optimizer was made with; by default the state says it, as
            that of `optax.inject_hyperparams` does.

    Raises:
        ModelError: at the first step, where neither says it.
    """

    def __init__(self, schedule: Callable[[int], float] | None = None) -> None:
        self._schedule = schedule

    def __call__(self, moment: Moment, /) -> None:
        """Adds it to the numbers of the step."""
        if moment.event != "step":
            return
        if self._schedule is not None:
            moment.log(learning_rate=float(self._schedule(moment.step - 1)))
            return
        rate = learning_rate(moment.state)
        if rate is None:
            raise ModelError(
                "the state does not say the learning rate\nTry: LearningRate(schedule), or"
                " optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
            )
        moment.log(learning_rate=rate)


# --------------------------------------------------------------------------------------------------
# Samples of what was learned, every so many steps.


class Samples:
    """Shows what a model makes, and writes it down.

    Args:
        make: (program, state) -> text, after every validation; called in all processes.
        every: where it is given, steps between two samples, in place of after validations.

    Raises:
        ModelError: `every` is out of range.
    """

    def __init__(
        self, make: Callable[[TrainingProgram, Tree], str], *, every: int | None = None
    ) -> None:
        if every is not None and every < 1:
            raise ModelError(f"every is {every!r}; it must be at least 1")
        self._make, self._every = make, every

    def __call__(self, moment: Moment, /) -> None:
        """Makes a sample where it is time."""
        due = (
            moment.event == "validation"
            if self._every is None
            else moment.event == "step" and moment.step % self._every == 0
        )
        if due:
            text = self._make(moment.program, moment.state)
            moment.say(text)
            moment.note("sample", text=text)


# --------------------------------------------------------------------------------------------------
# A metric that is to fall, or to rise, and the best of it so far.

#: Which values are better.
MODES = ("min", "max")


class Watched:
    """A metric and its best value.

    Attributes:
        metric: its name.
        mode: "min" where less is better, or "max".
        delta: less than this is not an improvement.
        best: the best value so far; not a number before the first.
    """

    def __init__(self, metric: str, mode: str = "min", delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ModelError(f"mode is {mode!r}\nTry: one of {', '.join(MODES)}")
        if not delta >= 0:
            raise ModelError(f"delta is {delta!r}; it must not be negative")
        self.metric, self.mode, self.delta, self.best = metric, mode, delta, math.nan

    def seen(self, numbers: Mapping[str, float]) -> bool | None:
        """Returns whether the metric is better than ever; None where it is not among the
        numbers.
        """
        if self.metric not in numbers:
            return None
        value = numbers[self.metric]
        gain = self.best - value if self.mode == "min" else value - self.best
        better = math.isfinite(value) and (math.isnan(self.best) or gain > self.delta)
        if better:
            self.best = value
        return better


# --------------------------------------------------------------------------------------------------
# The checkpoint with the best metric.


class BestCheckpoint:
    """Saves the state whenever a metric of a validation is better than ever, and keeps the best of
    these checkpoints beside those that `Settings.keep` keeps.

    Args:
        metric: name of a number of a validation.
        mode: "min" where less is better, or "max".
        count: how many of the best stay.

    Raises:
        ModelError: arguments out of range.

    Attributes:
        metric, mode, count: as they were given.
    """

    def __init__(
        self, metric: str = "validation/loss", *, mode: str = "min", count: int = 1
    ) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self._watched = Watched(metric, mode)

    def __call__(self, moment: Moment, /) -> None:
        """Asks for a save where the metric is better than ever."""
        if moment.event == "validation" and self._watched.seen(moment.numbers):
            moment.save()

    def memory(self) -> JsonMapping:
        """The best value so far."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best}

    def remember(self, memory: JsonMapping, /) -> None:
        """Goes on from there."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)


# --------------------------------------------------------------------------------------------------
# The end of a run whose metric no longer improves.


class EarlyStop:
    """Stops a run once a metric has not improved for some time. What it has seen is a part of
    checkpoints, and a run that it has ended stays ended, unless `patience` is larger.

    Args:
        metric: name of a number of a validation, "validation/loss", or of a step, "loss".
        patience: times that the metric may be seen without an improvement.
        mode: "min" where less is better, or "max".
        delta: less than this is not an improvement.

    Raises:
        ModelError: arguments out of range.
    """

    def __init__(
        self,
        metric: str = "validation/loss",
        *,
        patience: int = 3,
        mode: str = "min",
        delta: float = 0.0,
    ) -> None:
        if patience < 1:
            raise ModelError(f"patience is {patience!r}; it must be at least 1")
        self.patience, self._watched, self._waited = patience, Watched(metric, mode, delta), 0

    def __call__(self, moment: Moment, /) -> None:
        """Counts, and asks for the end where it is time."""
        better = self._watched.seen(moment.numbers)
        if better is None and moment.event != "begin":
            return
        if better is not None:
            self._waited = 0 if better else self._waited + 1
        if self._waited >= self.patience:
            moment.stop(
                f"{self._watched.metric} has not improved on {self._watched.best:.6g} for"
                f" {self._waited} times"
            )

    def memory(self) -> JsonMapping:
        """The best value so far, and how often there was none."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best, "waited": self._waited}

    def remember(self, memory: JsonMapping, /) -> None:
        """Goes on from there."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)
        self._waited = int(memory.get("waited", 0))
