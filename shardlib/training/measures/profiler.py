"""Traces of the profiler, on demand: what the devices did in some steps.

Before a run: `Settings(profile=(first step, number of steps))`. While it runs: make the file
`profile` in its folder, `touch RUN/profiles/profile`, and the next steps are recorded. Traces are
opened with xprof (TensorBoard's profile plugin) or with Perfetto. Of several processes each writes
into a folder of its own, since JAX takes the files of two in one folder for one broken trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

#: Steps that are recorded when somebody asks while the run goes on.
STEPS = 3


class Profiler:
    """Records traces of a few steps at a time."""

    def __init__(
        self,
        folder: Path | None,
        wanted: tuple[int, int] | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Args: folder: of the traces; None where nothing is kept, and then nothing is recorded.
        wanted: first step and number of steps. say: shows why a trace was not written.
        """
        self._folder, self._say = folder, say
        self._first, self._last = (wanted[0], wanted[0] + wanted[1] - 1) if wanted else (0, 0)
        self._running = False

    def before(self, step: int) -> None:
        """Begins to record where this step is wanted."""
        if self._folder is None or self._running:
            return
        asked = self._folder / "profile"
        if asked.exists():
            asked.unlink(missing_ok=True)
            self._first, self._last = step, step + STEPS - 1
        if self._first <= step <= self._last:
            place = self._folder / f"step-{step}"
            if jax.process_count() > 1:
                place /= f"process-{jax.process_index()}"
            jax.profiler.start_trace(place, create_perfetto_trace=True)
            self._running = True

    def after(self, step: int) -> None:
        """Ends the trace after its last step."""
        if self._running and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes what has been recorded."""
        if self._running:
            self._running = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # whatever the profiler and its files raise
                self._say(f"the trace of the profiler was not written: {error}; training goes on")
