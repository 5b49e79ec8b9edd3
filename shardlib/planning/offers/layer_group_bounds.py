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
        load, room: the model and the space.
        pricer: the machine.
        capacity: usable bytes of a device.
        offloads: what may be put in host memory, beside nothing; with a pinned offload, that alone.
    """

    load: Workload
    room: Space
    pricer: Pricer
    capacity: float
    offloads: Sequence[tuple[str, ...]]

    def wanted(
        self,
        known: Mapping[str, Sums],
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
                (getattr(getattr(s, part), name) >= getattr(getattr(known[NONE], part), name)).all(
                    0
                )
                for s in known.values()
                for part, names in _SLOWER.items()
                for name in names
            ]
        )
        hopeful = ~plain | (
            least_seconds(known[NONE], knobs[0], self.load.model, self.pricer, c) < seen.limit
        )
        alive: dict[Decisions, tuple[Array, Totals]] = {}
        for how in knobs:
            at = np.flatnonzero(hopeful & schedules.legal_zero(self.room, how.zero, c))
            none = combine(known[NONE].take(at), how, self.load.model, self.pricer, c.take(at))
            left = np.flatnonzero(
                ~plain[at] | ((none.step_seconds < seen.limit) & (none.peak_bytes > self.capacity))
            )
            alive[how] = at[left], none.take(left)
        rows = np.unique(np.concatenate([at for at, _ in alive.values()]))
        if not len(rows):
            return {}
        known, c, plain = (
            {policy: s.take(rows) for policy, s in known.items()},
            c.take(rows),
            plain[rows],
        )
        busy = {
            corner: self._composed(corner, known)
            for corner in corners(self.room.policies, len(self.load.counts))
        }
        least = {
            corner: (
                least_seconds(s, knobs[0], self.load.model, self.pricer, c),
                s.kernels.compute.sum(0),
            )
            for corner, s in busy.items()
        }
        wanted: dict[Decisions, Array] = {}
        for how, (mine, none) in alive.items():
            at = np.searchsorted(rows, mine)
            some = {
                corner: (seconds[at], compute[at]) for corner, (seconds, compute) in least.items()
            }
            bound = self._floor(
                {policy: s.take(at) for policy, s in known.items()},
                some,
                none,
                how,
                plain[at],
                c.take(at),
            )
            wanted[how] = mine[bound < seen.limit]
        return wanted

    def _composed(self, corner: Corner, known: Mapping[str, Sums]) -> Sums:
        """The quantities of a corner, but for memory and the gradients of weights: what
        `least_seconds` reads.
        """
        counts = self.load.counts
        first = known[corner[0]]

        def mixed(part: str, name: str) -> Array:
            arrays: list[Array] = [getattr(getattr(known[policy], part), name) for policy in corner]
            found = sum(
                (
                    array * (count / sum(counts))
                    for array, count in zip(arrays, counts, strict=True)
                ),
                np.zeros(arrays[0].shape),
            )
            found[: len(counts)] = [array[k] for k, array in enumerate(arrays)]
            return found

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
        known: Mapping[str, Sums],
        least: Mapping[Corner, tuple[Array, Array]],
        none: Totals,
        how: Decisions,
        plain: Array,
        c: Candidates,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Bounds as in `_bound`: a corner has at least what rests and what its layers save when the
        forward pass ends, and hides no more communication than it has more compute.

        Args:
            known: quantities by policy.
            least: seconds as `least_seconds` has them and seconds of kernels, by corner.
            none: the price with nothing recomputed.
            how: the ZeRO stage and the schedule.
            plain: whether that is the quickest of every class.
            c: the candidates.
        """
        first, compute = least[(NONE,) * len(self.load.counts)]
        # what `least_seconds` does not count: exposed communication, the optimizer, and what all
        # plans have
        beside = np.where(plain, none.step_seconds - first, 0.0)
        constant = none.seconds["optimizer"] + self.pricer.constants.step_s
        resting, state, _ = least_bytes(known[NONE], how, self.load.model, self.pricer, c)
        saves = {
            policy: least_bytes(s, how, self.load.model, self.pricer, c)[2]
            for policy, s in known.items()
        }
        seconds: list[Array] = []
        sizes: list[Array] = []
        hides: list[Array] = []
        for corner, (busy, mine) in least.items():
            more = np.maximum(0.0, mine - compute) * c.micro / c.stage
            seconds.append(busy + np.maximum(constant, beside - more))
            sizes.append(
                sum((saves[policy][k] for k, policy in enumerate(corner)), np.zeros(len(c)))
            )
            hides.append(self.pricer.constants.overlap * mine * c.micro / c.stage)
        return self._lagrange(
            np.stack(seconds), np.stack(sizes), np.stack(hides), resting, state, c, how
        )

    def _lagrange(
        self,
        seconds: Array,
        sizes: Array,
        hides: Array,
        resting: Array,
        state: Array,
        c: Candidates,
        how: Decisions,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Args:
            seconds, sizes, hides: bounds of seconds and of bytes of activations, and seconds of
                transfers that compute hides, by corner and row.
            resting, state: stored bytes, and those of the optimizer's state.
        """
        rate = self.pricer.topology.chip.host_bytes_per_s
        moves = {part for parts in self.offloads for part in parts} | set(
            self.room.pins.offload or ()
        )
        held = named(how.schedule).in_flight(
            Pipelines(
                stages=c.stage,
                chunks=np.where(c.stage > 1, how.virtual_stages, 1),
                microbatches=c.micro,
                lockstep=self.pricer.profile.pipeline == "lockstep",
            )
        )
        slow = (
            2 * c.micro / held / rate if "activations" in moves else np.full(len(c), np.inf)
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
            kept = (
                np.zeros_like(best)
                if "disk" in moves
                else state * (np.minimum(price, 2 / rate) if "optimizer" in moves else price)
            )
            best = np.maximum(best, saved + kept + price * (resting - self.capacity))
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
