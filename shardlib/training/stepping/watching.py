"""What looks at a run while it goes on: callbacks and validations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ShardlibError, TrainingError
from shardlib.training.callbacks.moment import Asks, Moment, Remembers
from shardlib.training.display import Display
from shardlib.training.measures.metrics import VALIDATION
from shardlib.training.stepping.records import Records
from shardlib.training.stepping.task import Task
from shardlib.training.validation.validator import validator
from shardlib.untrusted.json_types import JsonMapping, JsonObject


class Watching:
    """The callbacks and the validation of a run.

    Args:
        task: what the run is to do.
        records: where numbers and events go.
        display: where the run is shown.

    Raises:
        ModelError: the validation has no loss.

    Attributes:
        reason: why a callback wants the run to end; empty where none does.
        wants_save: whether one wants the state to be saved.
        failed: whether a callback or a validation has raised.
    """

    def __init__(self, task: Task, records: Records, display: Display) -> None:
        self.task, self.records, self.display = task, records, display
        self.reason, self.wants_save, self.failed = "", False, False
        asked = task.settings.validation
        self._validators = (
            {}
            if asked is None
            else {before: validator(asked, program) for before, program in task.programs}
        )

    def begin(self, step: int, state: Tree) -> None:
        """Before the first step of a process."""
        self._call("begin", step, {}, state)

    def step(self, step: int, numbers: Mapping[str, float], state: Tree) -> dict[str, float]:
        """After a step; gives what callbacks add to its numbers."""
        return self._call("step", step, numbers, state)

    def due(self, step: int) -> bool:
        """Whether a validation is due after a step."""
        asked = self.task.settings.validation
        return asked is not None and (step % asked.every == 0 or step == self.task.steps)

    def validate(self, step: int, state: Tree) -> None:
        """Validates a state and writes the numbers down."""
        begin = time.perf_counter()
        before = max(start for start in self._validators if start <= max(step - 1, 0))
        with self._failing():
            numbers = self._validators[before].validate(state)
        seconds = time.perf_counter() - begin
        self.records.validations[step] = numbers
        added = self._call("validation", step, numbers, state)
        self.records.event(VALIDATION, step, **numbers, **added, seconds=seconds)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.display.say(f"step {step}: {shown}")

    def end(self, step: int, state: Tree) -> None:
        """After the last step of a process."""
        self._call("end", step, {}, state)

    def ended(self, step: int) -> None:
        """Says why callbacks have ended the run."""
        self.records.event("ended", step, reason=self.reason)
        self.display.say(f"the run ends after step {step} of {self.task.steps}: {self.reason}")

    def memory(self) -> JsonObject:
        """What callbacks know, as plain data."""
        return {name: dict(one.memory()) for name, one in self._remembering().items()}

    def remember(self, memory: JsonMapping) -> None:
        """Gives callbacks back what they knew."""
        self.reason, self.wants_save = "", False
        for name, one in self._remembering().items():
            known = memory.get(name)
            one.remember(known if isinstance(known, Mapping) else {})

    def _remembering(self) -> dict[str, Remembers]:
        found: dict[str, Remembers] = {}
        for one in self.task.settings.callbacks:
            if isinstance(one, Remembers):
                kind = type(one).__name__
                count = sum(name.startswith(f"{kind} ") for name in found)
                found[f"{kind} {count + 1}"] = one
        return found

    def _call(
        self, event: str, step: int, numbers: Mapping[str, float], state: Tree
    ) -> dict[str, float]:
        added: dict[str, float] = {}
        if not self.task.settings.callbacks or self.failed:
            return added
        moment = Moment(
            event=event,
            step=step,
            steps=self.task.steps,
            numbers=numbers,
            program=self.task.at(step - 1),
            state=state,
            asks=Asks(
                stop=self._stop,
                save=self._save,
                log=added.update,
                say=self.display.say,
                note=lambda name, more: self.records.event(name, step, **more),
            ),
        )
        for callback in self.task.settings.callbacks:
            with self._failing(f"the callback {_name(callback)}", step):
                callback(moment)
        return {name: float(value) for name, value in added.items()}

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason or "a callback"

    def _save(self) -> None:
        self.wants_save = True

    @contextlib.contextmanager
    def _failing(self, what: str = "", step: int = 0) -> Iterator[None]:
        """Notes that what is done inside has failed, and says what it was."""
        try:
            yield
        except ShardlibError:
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            if not what:
                raise
            raise TrainingError(
                f"{what} failed after step {step}: {type(error).__name__}: {error}\nTry: without"
                " it; the same run goes on where it was saved"
            ) from error


def _name(callback: object) -> str:
    return getattr(callback, "__name__", type(callback).__name__)
