"""Which rows are worth pricing with layer groups that differ, and bounds that say so.

A row (a candidate under a choice of colours) is worth the trouble where rematerialising nothing
would be fast enough but does not fit, or where a group is quicker under another policy than under
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.device_memory import least_bytes
from shardlib.cost.pricing.step_time import least_seconds
from shardlib.cost.pricing.sums import Sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.mixed_remat import NONE, Corner, corners
from shardlib.cost.tables.pricer import Pricer
from shardlib.decisions.table import Decisions
from shardlib.planning.offers.incumbents import Seen
from shardlib.planning.space import schedules
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

Array = np.ndarray
#: Quantities of `Sums` that a step is the slower the more there is of them.
_SLOWER: Mapping[str, tuple[str, ...]] = {
    "kernels": ("compute", "host"),
    "collectives": ("block", "context", "reduce", "scatter", "gather"),
}


@dataclass(frozen=True, kw_only=True)
class GroupBounds:
    """Bounds of all mixtures of a row, from the quantities of the policies alone.

    Attributes:
        load, space: the model and the space.
        pricer: the machine.
        capacity: usable bytes of a device.
        offloads: what may be put in host memory, beside nothing; with a pinned offload, that alone.
    """

    load: Workload
    space: Space
    pricer: Pricer
    capacity: float
    offloads: Sequence[tuple[str, ...]]

    def wanted(
        self,
        sums: Mapping[str, Sums],
        c: Candidates,
        knobs: Sequence[Decisions],
        seen: Seen,
    ) -> dict[Decisions, Array]:
        """Rows of which a mixture may be the best plan, by ZeRO stage.

        Where every class is the quickest with nothing recomputed, no mixture is faster than that,
        so it must be below the limit and not fit; then the bounds of `_floor` decide.
        """
        plain = np.logical_and.reduce(
            [
                (getattr(getattr(s, part), name) >= getattr(getattr(sums[NONE], part), name)).all(0)
                for s in sums.values()
                for part, names in _SLOWER.items()
                for name in names
            ]
        )
        hopeful = ~plain | (
            least_seconds(sums[NONE], knobs[0], self.load.model, self.pricer, c) < seen.limit
        )
        alive: dict[Decisions, tuple[Array, Totals]] = {}
        for decisions in knobs:
            legal = np.flatnonzero(hopeful & schedules.legal_zero(self.space, decisions.zero, c))
            none = combine(
                sums[NONE].take(legal), decisions, self.load.model, self.pricer, c.take(legal)
            )
            left = np.flatnonzero(
                ~plain[legal]
                | ((none.step_seconds < seen.limit) & (none.peak_bytes > self.capacity))
            )
            alive[decisions] = legal[left], none.take(left)
        rows = np.unique(np.concatenate([positions for positions, _ in alive.values()]))
        if not len(rows):
            return {}
        sums, c, plain = (
            {policy: s.take(rows) for policy, s in sums.items()},
            c.take(rows),
            plain[rows],
        )
        busy = {
            corner: self._composed(corner, sums)
            for corner in corners(self.space.policies, len(self.load.counts))
        }
        minima = {
            corner: (
                least_seconds(s, knobs[0], self.load.model, self.pricer, c),
                s.kernels.compute.sum(0),
            )
            for corner, s in busy.items()
        }
        hopeful_rows: dict[Decisions, Array] = {}
        for decisions, (own_rows, none) in alive.items():
            legal = np.searchsorted(rows, own_rows)
            selected = {
                corner: (seconds[legal], compute[legal])
                for corner, (seconds, compute) in minima.items()
            }
            bound = self._floor(
                {policy: s.take(legal) for policy, s in sums.items()},
                selected,
                none,
                decisions,
                plain[legal],
                c.take(legal),
            )
            hopeful_rows[decisions] = own_rows[bound < seen.limit]
        return hopeful_rows

    def _composed(self, corner: Corner, sums: Mapping[str, Sums]) -> Sums:
        """The quantities of a corner, but for memory and the gradients of weights: what
        `least_seconds` reads.
        """
        counts = self.load.counts
        first = sums[corner[0]]

        def mixed(part: str, name: str) -> Array:
            arrays: list[Array] = [getattr(getattr(sums[policy], part), name) for policy in corner]
            array_sum = sum(
                (
                    array * (count / sum(counts))
                    for array, count in zip(arrays, counts, strict=True)
                ),
                np.zeros(arrays[0].shape),
            )
            array_sum[: len(counts)] = [array[k] for k, array in enumerate(arrays)]
            return array_sum

        kernels, collectives = (
            {name: mixed(part, name) for name in names} for part, names in _SLOWER.items()
        )
        return replace(
            first,
            kernels=replace(first.kernels, **kernels),
            collectives=replace(first.collectives, **collectives),
        )

    def _floor(
        self,
        sums: Mapping[str, Sums],
        minima: Mapping[Corner, tuple[Array, Array]],
        none: Totals,
        decisions: Decisions,
        plain: Array,
        c: Candidates,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Bounds as in `_bound`: a corner has at least what rests and what its layers save when the
        forward pass ends, and hides no more communication than it has more compute.

        Args:
            minima: seconds as `least_seconds` has them and seconds of kernels, by corner.
        """
        first, compute = minima[(NONE,) * len(self.load.counts)]
        # what `least_seconds` does not count: exposed communication, the optimizer, and what all
        # plans have
        beside = np.where(plain, none.step_seconds - first, 0.0)
        constant = none.seconds["optimizer"] + self.pricer.constants.step_s
        resting, state, _ = least_bytes(sums[NONE], decisions, self.load.model, self.pricer, c)
        saves = {
            policy: least_bytes(s, decisions, self.load.model, self.pricer, c)[2]
            for policy, s in sums.items()
        }
        seconds: list[Array] = []
        sizes: list[Array] = []
        hides: list[Array] = []
        for corner, (busy, compute_of_corner) in minima.items():
            more = np.maximum(0.0, compute_of_corner - compute) * c.micro / c.stage
            seconds.append(busy + np.maximum(constant, beside - more))
            sizes.append(
                sum((saves[policy][k] for k, policy in enumerate(corner)), np.zeros(len(c)))
            )
            hides.append(self.pricer.constants.overlap * compute_of_corner * c.micro / c.stage)
        return self._lagrange(
            np.stack(seconds), np.stack(sizes), np.stack(hides), resting, state, c, decisions
        )

    def _lagrange(
        self,
        seconds: Array,
        sizes: Array,
        hides: Array,
        resting: Array,
        state: Array,
        c: Candidates,
        decisions: Decisions,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Args:
            seconds, sizes, hides: bounds of seconds and of bytes of activations, and seconds of
                transfers that compute hides, by corner and row.
            resting, state: stored bytes, and those of the optimizer's state.
        """
        rate = self.pricer.topology.chip.host_bytes_per_s
        moves = {part for parts in self.offloads for part in parts} | set(
            self.space.pins.offload or ()
        )
        in_flight = named(decisions.schedule).in_flight(
            Pipelines(
                stages=c.stage,
                chunks=np.where(c.stage > 1, decisions.virtual_stages, 1),
                microbatches=c.micro,
                lockstep=self.pricer.profile.pipeline == "lockstep",
            )
        )
        slow = (
            2 * c.micro / in_flight / rate if "activations" in moves else np.full(len(c), np.inf)
        )  # seconds for a byte of activations in host memory
        free = np.where(
            np.isfinite(slow), np.minimum(sizes, hides / slow), 0.0
        )  # bytes that go there for nothing
        best = np.zeros(seconds.shape[1])
        for price in (
            *rates(seconds, sizes),
            np.where(np.isfinite(slow), slow, 0.0),
            np.full_like(best, 2 / rate if "optimizer" in moves else 0.0),
        ):
            saved = (seconds + np.minimum(price, slow) * (sizes - free)).min(0)
            hidden = (
                np.zeros_like(best)
                if "disk" in moves
                else state * (np.minimum(price, 2 / rate) if "optimizer" in moves else price)
            )
            best = np.maximum(best, saved + hidden + price * (resting - self.capacity))
        return best


def rates(seconds: Array, sizes: Array) -> Array:
    """Seconds for a byte that each corner asks for beside the quickest, array [corners, rows]; 0
    where it is not smaller.

    Args:
        seconds: of a layer, [corners, rows].
        sizes: bytes of a layer, [corners, rows].
    """
    quickest = np.argmin(seconds, axis=0)[None]
    slower, smaller = (
        seconds - np.take_along_axis(seconds, quickest, axis=0),
        np.take_along_axis(sizes, quickest, axis=0) - sizes,
    )
    return np.where(smaller > 0, slower / np.where(smaller > 0, smaller, 1.0), 0.0)
