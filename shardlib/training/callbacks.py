"""Callbacks: functions of a moment of a run, and what they can ask of it.

    def shout(moment):
        if moment.event == "validation" and moment.numbers["validation/loss"] < 0.1:
            moment.stop("good enough")

    Settings(callbacks=(shout, EarlyStop("validation/loss")), validation=...)

Callbacks are called in all processes of a run, with the same numbers; their requests must be the
same in all of them.
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

#: Events at which callbacks are called: before the first step of a process, after every step, after
#: every validation, after the last step.
EVENTS = ("begin", "step", "validation", "end")


@dataclass(frozen=True, kw_only=True, eq=False)
class Asks:
    """Requests that a callback can make of a run.

    Attributes:
        stop: (reason); ends the run after this step.
        save: saves the state after this step, if the run has a folder.
        log: (numbers by name); logged with those of the step; ignored at "begin" and "end".
        say: shows a line.
        note: (event, fields); records an event.
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
        step: number of steps done.
        steps: number of steps of the run.
        numbers: numbers of the step, or of the validation, by name; empty at "begin" and "end".
        program: the program being trained.
        state: the newest state, which the next step donates: copy what is needed later. At "step"
            it is one step ahead of `numbers` where steps run ahead, as they do on accelerators; at
            all other events it is that of `step`.
        asks: the requests.
    """

    event: str
    step: int
    steps: int
    numbers: Mapping[str, float]
    program: TrainingProgram
    state: Tree
    asks: Asks

    def stop(self, reason: str) -> None:
        """Ends the run after this step; it is saved, and `Fitted.stopped` contains the reason."""
        self.asks.stop(reason)

    def save(self) -> None:
        """Saves the state after this step, even if no save is due."""
        self.asks.save()

    def log(self, **numbers: float) -> None:
        """Adds numbers to the record of this step or validation."""
        self.asks.log(numbers)

    def say(self, text: str) -> None:
        """Shows a line on the display of the run."""
        self.asks.say(text)

    def note(self, event: str, **more: Json) -> None:
        """Records an event with all loggers."""
        self.asks.note(event, more)


class Callback(Protocol):
    """A function of a moment. If it raises an error, the run ends after its state is saved."""

    def __call__(self, moment: Moment, /) -> None:
        """Called at every event."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A callback with state, which checkpoints store: a resumed run continues with the callbacks of
    an uninterrupted one.
    """

    def memory(self) -> JsonMapping:
        """The state of the callback, as plain data."""
        ...

    def remember(self, memory: JsonMapping, /) -> None:
        """Restores the state saved in a checkpoint; called with an empty mapping at the beginning
        of a run.
        """
        ...


class LearningRate:
    """Logs the learning rate of every step as "learning_rate".

    Args:
        schedule: the schedule of the optimizer; by default the rate is read from the state, as
            stored by `optax.inject_hyperparams`.

    Raises:
        ModelError: at the first step, if there is neither.
    """

    def __init__(self, schedule: Callable[[int], float] | None = None) -> None:
        self._schedule = schedule

    def __call__(self, moment: Moment, /) -> None:
        """Adds the rate to the numbers of the step."""
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


class Samples:
    """Shows and records samples of the model's output.

    Args:
        make: (program, state) -> text; called in all processes.
        every: steps between two samples; by default one after every validation.

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
        """Makes a sample if one is due."""
        due = (
            moment.event == "validation"
            if self._every is None
            else moment.event == "step" and moment.step % self._every == 0
        )
        if due:
            text = self._make(moment.program, moment.state)
            moment.say(text)
            moment.note("sample", text=text)


#: Directions of improvement.
MODES = ("min", "max")


class Watched:
    """A metric and its best value.

    Attributes:
        mode: "min" if smaller is better, or "max".
        delta: minimum change that counts as an improvement.
        best: the best value so far; NaN before the first.
    """

    def __init__(self, metric: str, mode: str = "min", delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ModelError(f"mode is {mode!r}\nTry: one of {', '.join(MODES)}")
        if not delta >= 0:
            raise ModelError(f"delta is {delta!r}; it must not be negative")
        self.metric, self.mode, self.delta, self.best = metric, mode, delta, math.nan

    def seen(self, numbers: Mapping[str, float]) -> bool | None:
        """True if the metric has improved; None if it is not among the numbers."""
        if self.metric not in numbers:
            return None
        value = numbers[self.metric]
        gain = self.best - value if self.mode == "min" else value - self.best
        better = math.isfinite(value) and (math.isnan(self.best) or gain > self.delta)
        if better:
            self.best = value
        return better


class BestCheckpoint:
    """Saves the state whenever a metric of a validation improves, and keeps the best of these
    checkpoints in addition to those that `Settings.keep` keeps.

    Args:
        metric: name of a number of a validation.
        mode: "min" if smaller is better, or "max".
        count: number of best checkpoints to keep.

    Raises:
        ModelError: arguments out of range.
    """

    def __init__(
        self, metric: str = "validation/loss", *, mode: str = "min", count: int = 1
    ) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self._watched = Watched(metric, mode)

    def __call__(self, moment: Moment, /) -> None:
        """Requests a save if the metric has improved."""
        if moment.event == "validation" and self._watched.seen(moment.numbers):
            moment.save()

    def memory(self) -> JsonMapping:
        """The best value so far."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best}

    def remember(self, memory: JsonMapping, /) -> None:
        """Restores the best value."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)


class EarlyStop:
    """Stops a run when a metric has not improved for some time. Its state is part of checkpoints,
    and a run that it has ended stays ended, unless `patience` is increased.

    Args:
        metric: name of a number of a validation, "validation/loss", or of a step, "loss".
        patience: number of values without an improvement that are tolerated.
        mode: "min" if smaller is better, or "max".
        delta: minimum change that counts as an improvement.

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
        """Counts values without improvement, and ends the run after `patience` of them."""
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
        """The best value, and the number of values since."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best, "waited": self._waited}

    def remember(self, memory: JsonMapping, /) -> None:
        """Restores the best value and the count."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)
        self._waited = int(memory.get("waited", 0))
