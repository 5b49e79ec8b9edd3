"""The time that no plan which fits can beat.

The fastest plans are often far too large. Recomputing a part of the layers lies between recomputing
none and all of them, in time and in memory; so a plan that fits takes at least the time at which
the straight line between two policies meets the capacity. What moves to host memory takes its time
beside compute, or in place of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardlib.axes import STORED_AXES
from shardlib.cost.tables.pricer import Pricer
from shardlib.planning.bounds.memory import Footprint
from shardlib.planning.bounds.mixtures import mixed
from shardlib.planning.bounds.step_time import breadth_first_seconds, passing, step_seconds
from shardlib.planning.bounds.tick import Tick
from shardlib.planning.bounds.traffic import Moved
from shardlib.planning.space import schedules
from shardlib.planning.space.space import Space
from shardlib.schedules.none import NONE
from shardlib.schedules.schedule import Pipelines

Array = np.ndarray
#: Plans that a bound speaks of: their ZeRO stage, whether their pipelines work breadth first, and
#: when stages gather weights that are stored sharded ("use" where they are not).
Kind = tuple[int, bool, str]
#: Relative rounding that a sum of bytes may have.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Lower bounds under a capacity.

    Attributes:
        space: the space.
        pricer: the machine.
        capacity: usable bytes of a device.
        offloads: what may be in host memory, () among it where nothing must.
    """

    space: Space
    pricer: Pricer
    capacity: float
    offloads: tuple[tuple[str, ...], ...]

    def seconds(
        self,
        ticks: Mapping[str, Tick],
        footprints: Mapping[str, Footprint],
        moved: Mapping[str, Moved],
        sizes: Mapping[str, Array],
    ) -> Array:
        """Seconds of a step that no plan beats that fits; infinite where none fits."""
        kinds = self.by_kind(ticks, footprints, moved, sizes)
        return np.minimum.reduce([np.full(len(sizes["micro"]), np.inf), *kinds.values()])

    def by_kind(
        self,
        ticks: Mapping[str, Tick],
        footprints: Mapping[str, Footprint],
        moved: Mapping[str, Moved],
        sizes: Mapping[str, Array],
    ) -> dict[Kind, Array]:
        """The same for every kind of plans; arguments as those of `seconds`."""
        constants = self.pricer.constants
        fixed = constants.step_s + constants.microbatch_s * (
            sizes["micro"] + schedules.groups(self.space) * (sizes["stage"] - 1)
        )
        kinds = dict[Kind, Array]()
        for zero, gather, legal in self._ways(sizes):
            by_policy = {
                policy: footprint.under(zero, gather) for policy, footprint in footprints.items()
            }
            state = next(iter(by_policy.values())).state
            hiding = {
                policy: traffic.seconds(zero, self.pricer, sizes, gather)
                for policy, traffic in moved.items()
            }
            for times, breadth_first in self._alternatives(ticks, sizes, hiding, gather):
                kind = zero, breadth_first, gather
                minimum = kinds.get(kind, np.full(len(sizes["micro"]), np.inf))
                for parts in self.offloads:
                    points = [
                        point
                        for policy, time in times.items()
                        for point in self._points(
                            time,
                            _breadth_first(footprints[policy])
                            if breadth_first
                            else by_policy[policy],
                            parts,
                        )
                    ]
                    within = mixed(points, self.capacity * (1 + ROUNDING))
                    if "optimizer" in parts:
                        within = within + 2 * state / self.pricer.topology.chip.host_bytes_per_s
                    minimum = np.minimum(minimum, np.where(legal, within, np.inf))
                kinds[kind] = minimum
        return {kind: minimum + fixed for kind, minimum in kinds.items()}

    def fastest(self, ticks: Mapping[str, Tick], sizes: Mapping[str, Array]) -> Array:
        """Seconds of a step that no plan beats, whether it fits or not."""
        return np.minimum.reduce(
            [
                time
                for times, _ in self._alternatives(ticks, sizes, {}, "once")
                for time in times.values()
            ]
        )

    def _ways(self, sizes: Mapping[str, Array]) -> list[tuple[int, str, Array]]:
        """ZeRO stages of the space with when weights are gathered, and candidates that they fit."""
        stored, alone = (
            np.prod([sizes[axis] for axis in STORED_AXES], axis=0) > 1,
            sizes["fsdp"] == 1,
        )
        zeros = [zero for zero in range(4) if self.space.pins.zero in (None, zero)]
        stages = [(zero, "use", stored if zero else alone) for zero in zeros]
        staged = stored & (sizes["stage"] > 1)
        once = 3 in zeros and "once" in self.space.gathers and bool(staged.any())
        return [*stages, (3, "once", staged)] if once else stages

    def _alternatives(
        self,
        ticks: Mapping[str, Tick],
        sizes: Mapping[str, Array],
        hiding: Mapping[str, Array],
        gather: str,
    ) -> list[tuple[dict[str, Array], bool]]:
        """Bounds of the step time by policy, each with whether it is that of breadth first:
        policies that a plan may mix, those of schedules with the backward pass in two, which none
        mixes, and those of breadth first, whose stages gather weights once.
        """
        stages, micro = sizes["stage"], sizes["micro"]
        space, groups, layers = self.space, schedules.groups(self.space), self.space.limits.layers
        behind = {policy: hiding.get(policy, 0.0) for policy in ticks}
        if not (stages > 1).any():
            return [
                (
                    {
                        policy: step_seconds(
                            tick,
                            stages,
                            micro,
                            self._rounds(policy, stages, micro),
                            layers,
                            hiding=behind[policy],
                        )
                        for policy, tick in ticks.items()
                    },
                    False,
                )
            ]
        passes = {policy: passing(tick, stages, self.pricer) for policy, tick in ticks.items()}
        mixing = {
            policy: step_seconds(
                tick,
                stages,
                micro,
                self._rounds(policy, stages, micro),
                layers,
                groups,
                passes[policy],
                behind[policy],
            )
            for policy, tick in ticks.items()
        }
        alone = [
            {
                policy: step_seconds(
                    tick, stages, micro, None, layers, groups, passes[policy], behind[policy]
                )
            }
            for policy, tick in ticks.items()
            if any(schedule.backward_in_two for schedule in schedules.of_policy(space, policy))
        ]
        usual = [(times, False) for times in [mixing, *alone]]
        chunks, pinned = schedules.most_rounds(space, sizes), space.pins.virtual_stages is not None
        if gather != "once" or not chunks.any():
            return usual
        return [
            *usual,
            (
                {
                    policy: breadth_first_seconds(
                        tick,
                        stages,
                        micro,
                        chunks,
                        layers,
                        groups,
                        passes[policy],
                        behind[policy],
                        pinned=pinned,
                    )
                    for policy, tick in ticks.items()
                },
                True,
            ),
        ]

    def _rounds(self, policy: str, stages: Array, micro: Array) -> Array:
        """Times that a stage waits as long as it is busy with a microbatch: in whole stages, or
        with as many chunks as a stage can have.
        """
        together = micro // schedules.groups(self.space)
        limit = schedules.most_chunks(self.space, policy, stages, micro)
        return np.minimum.reduce(
            [
                schedule.rounds(Pipelines(stages=stages, chunks=chunks, microbatches=together))
                for schedule in schedules.of_policy(self.space, policy) or (NONE,)
                for chunks in (np.ones_like(limit), limit)
            ]
        )

    def _points(
        self, seconds: Array, footprint: Footprint, parts: tuple[str, ...]
    ) -> list[tuple[Array, Array]]:
        """(seconds, bytes) between which all plans of a policy lie, with some parts in host memory.

        Activations move in `moving` seconds a byte, a share of them beside compute, which takes its
        time itself. So some can move for nothing, and to move all takes at least the time of moving
        what there would be too much of.
        """
        bare = footprint.least(parts)
        if "activations" not in parts:
            return [(seconds, bare)]
        moving = (
            2
            * footprint.turns
            / (self.pricer.topology.chip.host_bytes_per_s * max(1.0, self.pricer.constants.overlap))
        )
        full = bare + footprint.occupied - footprint.bare
        return [
            (seconds, np.maximum(bare, full - seconds / moving)),
            (np.maximum(seconds, (full - bare) * moving), bare),
        ]

    def leanest(self, footprints: Mapping[str, Footprint]) -> Array:
        """Bytes that no plan undercuts."""
        return np.minimum.reduce(
            [footprint.least(parts) for footprint in footprints.values() for parts in self.offloads]
        )


def _breadth_first(footprint: Footprint) -> Footprint:
    assert footprint.breadth_first is not None, "the space has pipelines that work breadth first"
    return footprint.breadth_first
