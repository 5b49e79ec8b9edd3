"""Timetables of pipelines in lockstep: which stage works on what at which tick.

Microbatches go through the stages in groups of S, the number of stages: a stage does chunk 0 for a
whole group, then chunk 1 for the same group, and so on, which is the order of interleaved 1F1B
(arXiv:2104.04473, section 2.2) and, with one chunk, that of PipeDream-Flush. Stage s does its unit
u forward at tick u + s, where unit u = (group v + chunk) S + (microbatch in the group); what leaves
the last stage at one tick enters stage 0 at the next, one chunk further. Backward is the mirror
image: the last stage begins with the last chunk, in the tick in which it has done it forward
(1F1B), or when all forward work is done (GPipe, arXiv:1811.06965).

With M microbatches, a multiple of S if v > 1, forward and backward work each take M v + S - 1
ticks, and 1F1B takes the time of (M v + S - 1) chunks forward and backward: that of the ideal
schedule.

GPipe with several chunks works through all microbatches with one chunk before it goes on to the
next (breadth first, arXiv:2211.05953): with at least as many microbatches as stages, what leaves
the last stage waits M - S ticks before the first stage.

Zero-bubble is 1F1B with the backward pass in two parts (arXiv:2401.10241): what the stage before
waits for is done at once, gradients of weights are done by all stages in the tick in which the
first stage goes back with the microbatch. The S - 1 ticks that only fill the pipeline are free of
them: a step takes M (F + B + W) + (S - 1)(F + B). In lockstep that is the least, since there are M
+ S - 1 ticks with F and with B, and M with W.

>>> table = Timetable(schedule="1f1b", stages=2, microbatches=3)
>>> [table.forward(tick, 1) for tick in range(3)]
[(0, 0, False), (0, 0, True), (1, 0, True)]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from shardlib.schedules.table import named

#: A whole number, or an array of them: of NumPy, or JAX's own inside of a program.
Number = Any


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """A schedule in lockstep.

    Attributes:
        schedule: its name, see `shardlib.schedules.table`.
        stages: number of stages, S.
        microbatches: number of microbatches, M.
        virtual: chunks of layers on each stage, v.
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int = 1

    @property
    def forward_first(self) -> bool:
        """Whether all forward work is done before any backward work."""
        return named(self.schedule).forward_first

    @property
    def units(self) -> int:
        """Chunks that a stage does in each direction, those of microbatches that fill up the last
        group included.
        """
        return -(-self.microbatches // self.group) * self.group * self.virtual

    @property
    def group(self) -> int:
        """Microbatches that a chunk works on before the next chunk does."""
        return self.microbatches if self.virtual == 1 or self.forward_first else self.stages

    @property
    def lag(self) -> int:
        """Ticks that what leaves the last stage, for the next chunk, waits before the first stage;
        the same the other way.
        """
        return max(0, self.group - self.stages) if self.virtual > 1 else 0

    @property
    def rounds(self) -> int:
        """Rounds of M ticks in which each stage begins one chunk; 0 where chunks take turns for
        groups of S microbatches.
        """
        return self.virtual if self.forward_first and self.virtual > 1 else 0

    @property
    def forward_ticks(self) -> int:
        """Ticks [0, n) have forward work."""
        return self.units + self.stages - 1

    @property
    def turn(self) -> int:
        """The first tick with backward work."""
        return self.forward_ticks if self.forward_first else self.virtual * self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return self.turn + self.forward_ticks

    @property
    def split(self) -> bool:
        """Whether gradients of weights are made later than those of activations."""
        return named(self.schedule).backward_in_two

    @property
    def weights_turn(self) -> int:
        """The first tick with gradients of weights."""
        return self.turn + (self.stages - 1) * self.split

    @property
    def phases(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """(first tick, tick after the last, kinds of work: "forward", "backward", "weights") of
        every run of equal ticks.
        """
        spans = {"forward": (0, self.forward_ticks), "backward": (self.turn, self.ticks)} | (
            {"weights": (self.weights_turn, self.ticks)} if self.split else {}
        )
        bounds = sorted({tick for span in spans.values() for tick in span})
        return tuple(
            (
                start,
                stop,
                tuple(
                    kind for kind, (first, last) in spans.items() if first <= start and stop <= last
                ),
            )
            for start, stop in itertools.pairwise(bounds)
        )

    @property
    def slots(self) -> int:
        """Units whose forward work a stage remembers: from the tick that did it to the tick that
        goes back, on the first stage in the first chunk.
        """
        return (
            self.forward_ticks
            if self.forward_first
            else min(2 * self.virtual * self.stages - 1, self.forward_ticks)
        )

    @property
    def last_chunk(self) -> int:
        """Number of the last chunk of a stage."""
        return self.virtual - 1

    def forward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """(microbatch, chunk, whether there is work) of a stage at a tick; numbers or arrays of
        them. Without work the first two are within bounds and mean nothing.
        """
        return self._of(tick - stage)

    def backward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """The same for backward work."""
        micro, mirrored, works = self._of(tick - self.turn - (self.stages - 1 - stage))
        return micro, self.last_chunk - mirrored, works

    def weights(self, tick: Number) -> tuple[Number, Number, Number]:
        """The same for gradients of weights, which all stages do for the same unit."""
        micro, mirrored, works = self._of(tick - self.weights_turn)
        return micro, self.last_chunk - mirrored, works

    def forward_slot(self, tick: Number, stage: Number) -> Number:
        """Place of the activation stash for the forward work of a tick; without work, a place that
        nothing is waiting in.
        """
        return (tick - stage) % self.slots

    def backward_slot(self, tick: Number, stage: Number) -> Number:
        """Place of the activation stash with the forward work that goes back in a tick."""
        return self._unit(*self.backward(tick, stage)[:2]) % self.slots

    def weights_slot(self, tick: Number) -> Number:
        """Where the forward work is whose gradients of weights are made in a tick."""
        return self._unit(*self.weights(tick)[:2]) % self.slots

    def passing_slot(self, tick: Number, stage: Number) -> Number:
        """Which of S places keeps what the backward work of a tick passes on to the making of
        gradients of weights.
        """
        return (tick - self.turn - (self.stages - 1 - stage)) % self.stages

    def passed_slot(self, tick: Number) -> Number:
        """The place that the making of gradients of weights reads in a tick."""
        return (tick - self.weights_turn) % self.stages

    def _unit(self, micro: Number, chunk: Number) -> Number:
        return (micro // self.group * self.virtual + chunk) * self.group + micro % self.group

    def _of(self, unit: Number) -> tuple[Number, Number, Number]:
        inside = (unit >= 0) & (unit < self.units)
        unit = unit * inside
        rounds, place = unit // self.group, unit % self.group
        micro = rounds // self.virtual * self.group + place
        works = inside & (micro < self.microbatches)
        return micro * works, rounds % self.virtual, works
