"""The progress of a run in a notebook: one line of HTML that is updated where it stands, with no
widgets.
"""

from __future__ import annotations

import html
import importlib
import time
from collections.abc import Callable

#: Seconds between two updates.
EVERY = 0.25


class NotebookBar:
    """A bar with the step, the loss, tokens a second and the time that is left.

    Args:
        steps: in all.
        clock: gives seconds.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock, self._shown, self._handle = steps, clock, -EVERY, None
        self._began: tuple[int, float] | None = None

    def update(self, step: int, loss: float, rate: float) -> None:
        """Shows where the run is."""
        now = self._clock()
        if self._began is None:
            self._began = (step, now)
        if now - self._shown < EVERY and step < self._steps:
            return
        self._shown = now
        self._show(self._line(step, loss, rate, now))

    def _line(self, step: int, loss: float, rate: float, now: float) -> str:
        first, began = self._began or (step, now)
        left = (now - began) / (step - first) * (self._steps - step) if step > first else None
        words = [f"{step:,} of {self._steps:,} steps", f"loss {loss:.3f}"]
        words += [f"{rate:,.0f} tokens/s"] if rate else []
        words += [f"{_duration(left)} left"] if left is not None else []
        text = html.escape(" · ".join(words))
        return (
            f'<div role="status"><progress max="{max(self._steps, 1)}" value="{step}"'
            f' aria-label="training"></progress> {text}</div>'
        )

    def _show(self, text: str) -> None:
        shown = importlib.import_module("IPython.display")
        if self._handle is None:
            self._handle = shown.display(shown.HTML(text), display_id=True)
        else:
            self._handle.update(shown.HTML(text))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
