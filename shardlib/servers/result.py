"""What came of training over parameter servers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardlib.untrusted.json_types import JsonObject

if TYPE_CHECKING:
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState

#: Losses at the end of a run whose mean is shown.
LAST = 8


@dataclass(frozen=True, kw_only=True)
class WorkerStep:
    """A step of a worker.

    Attributes:
        step: number, by the worker's own count.
        loss: of its rows; None where it was not finite.
        at_s: when it was done, seconds since 1970.
        waited_s: that the worker waited before it: for a bound, or a warm start.
        staleness: of the last gradient that the worker had pushed, at the first server.
    """

    step: int
    loss: float | None
    at_s: float
    waited_s: float
    staleness: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """Parameters, and how they came about.

    Attributes:
        params: trained parameters, float32, by dotted path.
        steps: of each worker what it did, in order.
        staleness: of each server, how many gradients were how stale.
        pushes: of each server, how many gradients it has applied.
        events: what happened on the way: who died, what was refused, what was started again.
        seconds: from the first start to the end.
    """

    params: Mapping[str, np.ndarray]
    steps: tuple[tuple[WorkerStep, ...], ...]
    staleness: tuple[Mapping[int, int], ...]
    pushes: tuple[int, ...]
    events: tuple[str, ...]
    seconds: float

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """Of each worker the losses of its steps; NaN where one was not finite."""
        return tuple(
            tuple(float("nan") if step.loss is None else step.loss for step in steps)
            for steps in self.steps
        )

    def state(self, program: Program, seed: int = 0) -> TrainState:
        """A state with these parameters, to be evaluated or exported."""
        from dataclasses import replace

        from shardlib.lowering.islands.halves import with_trained

        first = program.init(seed)
        return replace(first, params=with_trained(program, first.params, self.params))

    def metrics(self) -> JsonObject:
        """All but the parameters, as plain data."""
        return {
            "seconds": self.seconds,
            "losses": [[step.loss for step in steps] for steps in self.steps],
            "waited_s": [sum(step.waited_s for step in steps) for steps in self.steps],
            "staleness": [dict(sorted(counts.items())) for counts in self.staleness],
            "pushes": list(self.pushes),
            "events": list(self.events),
        }

    def summary(self) -> str:
        """The figures as text."""
        lines = [
            f"worker {number}: {len(losses)} steps, loss {_first_and_last(losses)}"
            for number, losses in enumerate(self.losses)
        ]
        for number, counts in enumerate(self.staleness):
            total = sum(counts.values())
            mean = sum(s * count for s, count in counts.items()) / total if total else 0.0
            lines.append(
                f"server {number}: {self.pushes[number]} pushes, staleness {mean:.2f} in the mean,"
                f" {max(counts, default=0)} at most"
            )
        return "\n".join([*lines, *self.events])


def _first_and_last(losses: tuple[float, ...]) -> str:
    if not losses:
        return "none"
    finite = [loss for loss in losses[-LAST:] if math.isfinite(loss)]
    left_out = len(losses[-LAST:]) - len(finite)
    last = f"{float(np.mean(finite)):.4f}" if finite else "nan"
    note = f" ({left_out} of the last {LAST} not finite)" if left_out else ""
    return f"{losses[0]:.4f} at first, {last} at last{note}"


def read_steps(log: Path, skip: int = 0) -> tuple[WorkerStep, ...]:
    """The steps that a worker has written down; of a worker that was killed, whole lines alone.

    Args:
        skip: bytes before them, of earlier runs.
    """
    if not log.exists():
        return ()
    lines = log.read_bytes()[skip:].decode().split("\n")[:-1]
    return tuple(WorkerStep(**json.loads(line)) for line in lines)


def counted(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """A histogram of what a server reports."""
    return Counter(dict(pairs))
