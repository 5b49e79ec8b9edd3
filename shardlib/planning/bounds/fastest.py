"""Seconds of a step that no plan beats, whether it fits or not, for entries: meshes with
microbatches.

Entries whose kernels and stages are the same are alike in this, however data and fsdp share the
batch, so the bound is made once for all of them. It is made in steps, each for what the step
before leaves: with what depends on no colour, with some components of the colours, and with all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardlib.cost.terms.local_sizes import distinct_rows
from shardlib.planning.bounds.step_time import Bounds
from shardlib.planning.bounds.step_time_that_fits import Fitting

Array = np.ndarray
#: Components of the colours that are added up before all of them (None) are, for what is left:
#: none, and all but the last, which can be cut in the most ways.
COMPONENTS: tuple[int | None, ...] = (0, -1, None)
#: Of so many entries all components are added up at once.
FEW = 512


class Fastest:
    """Bounds of some entries, which are kept.

    Args:
        bounds: of a microbatch, by shape.
        fitting: bounds of a step.
        policies: remat policies of the space.
        sizes: of every mesh axis and "micro", by entry.
        shape: number of the shape of each entry.
    """

    def __init__(
        self,
        bounds: Bounds,
        fitting: Fitting,
        policies: Sequence[str],
        sizes: Mapping[str, Array],
        shape: Array,
    ) -> None:
        self._bounds, self._fitting, self._policies = bounds, fitting, policies
        self._first, self._which = distinct_rows(
            [bounds.work_of(shape), sizes["stage"], sizes["micro"], sizes["fsdp"] > 1]
        )
        self._shape = shape[self._first]
        self._sizes = {axis: size[self._first] for axis, size in sizes.items()}
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        self._last = np.inf, -np.inf, nothing  # bounds between which the answer is the same
        self._known = {first: np.full(len(self._first), np.nan) for first in (*COMPONENTS, None)}

    def __len__(self) -> int:
        return len(self._which)

    def of_all(self) -> Array:
        """The bound of every entry; infinite where no choice fits."""
        return self._of(np.arange(len(self._first)), None)[self._which]

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries whose bound is below a limit, the least first, and these bounds."""
        low, high, result = self._last
        if low < limit <= high:
            return result
        rows, high = np.arange(len(self._first)), np.inf
        for first in COMPONENTS if np.isfinite(limit) and len(self) > FEW else (None,):
            bounds = self._of(rows, first)
            fits = bounds < limit
            high = min(high, float(bounds[~fits].min(initial=np.inf)))
            rows = rows[fits]
        selected = np.zeros(len(self._first), dtype=bool)
        selected[rows] = True
        entries = np.flatnonzero(selected[self._which])
        seconds = self._known[None][self._which[entries]]
        order = np.argsort(seconds, kind="stable")
        result = entries[order], seconds[order]
        self._last = float(result[1].max(initial=0.0)), high, result
        return result

    def _of(self, rows: Array, first: int | None) -> Array:
        """The bound of distinct entries with so many components."""
        cached = self._known[first]
        new = rows[np.isnan(cached[rows])]
        if len(new):
            cached[new] = self._fitting.fastest(
                {
                    policy: self._bounds.least(policy, self._shape[new], first)
                    for policy in self._policies
                },
                {axis: size[new] for axis, size in self._sizes.items()},
            )
        return cached[rows]
