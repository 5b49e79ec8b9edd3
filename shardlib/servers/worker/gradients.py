"""Sums of gradients that are to be pushed: on the host, or still being computed, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from shardlib.exchanges.parts import Part
from shardlib.lowering.islands.staged import Sums
from shardlib.servers.worker.landing import Run


class Gradients(Protocol):
    """A sum of gradients."""

    @property
    def at_once(self) -> bool:
        """Whether all of it is there before any of it is sent."""
        ...

    def run(self, part: Part) -> np.ndarray:
        """Elements of it, float32, once they are there."""
        ...

    def finite(self) -> bool:
        """Whether all elements are finite; waits for all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """Gradients on the host.

    Attributes:
        arrays: by path.
        at_once: they are there.
    """

    arrays: Mapping[str, np.ndarray]
    at_once: bool = True

    def run(self, part: Part) -> np.ndarray:
        """See `Gradients`."""
        return self.arrays[part.path].reshape(-1)[part.start : part.stop]

    def finite(self) -> bool:
        """See `Gradients`."""
        return all(np.isfinite(array).all() for array in self.arrays.values())


@dataclass(frozen=True, kw_only=True)
class OfStages:
    """Gradients that stages make one after the other.

    Attributes:
        sums: of the stages, for each step since the last push.
        trained: the parameters, abstract, by path.
        runs: into how many equal runs each is divided.
        at_once: they are not there.
    """

    sums: tuple[Sums, ...]
    trained: Mapping[str, jax.ShapeDtypeStruct]
    runs: Mapping[str, int]
    at_once: bool = False
    _made: dict[Run, np.ndarray] = field(default_factory=dict[Run, np.ndarray])

    def run(self, part: Part) -> np.ndarray:
        """See `Gradients`."""
        each = self.trained[part.path].size // self.runs[part.path]
        parts, start = list[np.ndarray](), part.start
        while start < part.stop:
            number = start // each
            stop = min(part.stop, (number + 1) * each)
            mean = self._mean((part.path, number))
            parts.append(mean[start - number * each : stop - number * each])
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def finite(self) -> bool:
        """See `Gradients`."""
        runs = [(path, number) for path, count in self.runs.items() for number in range(count)]
        return all(np.isfinite(self._mean(run)).all() for run in runs)

    def _mean(self, run: Run) -> np.ndarray:
        """Of a run, over microbatches, summed over steps; made once, or by two threads alike."""
        if run not in self._made:
            dtype, total = self.trained[run[0]].dtype, None
            for step in self.sums:
                parts = [np.asarray(part) for part in step.parts[run]]
                mean = (sum(parts[1:], parts[0]) / np.float32(step.count)).astype(dtype)
                total = mean if total is None else total + mean
            assert total is not None, "a step"
            self._made[run] = total.astype(np.float32).reshape(-1)
        return self._made[run]
