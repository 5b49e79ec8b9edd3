"""A moment of a run, as callbacks see it, and what they may ask for.

    def shout(moment):
        if moment.event == "validation" and moment.numbers["validation/loss"] < 0.1:
            moment.stop("good enough")

    Settings(callbacks=(shout,), validation=...)

Callbacks are called in all processes of a run, with the same numbers; what they ask for must be the
same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardlib.annotation.trees.paths import Tree
from shardlib.training.states.programs import AnyProgram
from shardlib.untrusted.json_types import Json, JsonMapping

#: When callbacks are called: before the first step of a process, after every step, after every
#: validation, after the last step.
EVENTS = ("begin", "step", "validation", "end")


@dataclass(frozen=True, kw_only=True, eq=False)
class Asks:
    """What a callback may ask of a run.

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
    program: AnyProgram
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
        """What it knows, as plain data."""
        ...

    def remember(self, memory: JsonMapping, /) -> None:
        """Takes over what it knew when a checkpoint was saved; an empty mapping at the beginning
        of a run.
        """
        ...
