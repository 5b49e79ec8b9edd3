"""Samples of what was learned, every so many steps."""

from __future__ import annotations

from collections.abc import Callable

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ModelError
from shardlib.training.callbacks.moment import Moment
from shardlib.training.states.programs import AnyProgram


class Samples:
    """Shows what a model makes, and writes it down.

    Args:
        make: (program, state) -> text, after every validation; called in all processes.
        every: where it is given, steps between two samples, in place of after validations.

    Raises:
        ModelError: `every` is out of range.
    """

    def __init__(
        self, make: Callable[[AnyProgram, Tree], str], *, every: int | None = None
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
