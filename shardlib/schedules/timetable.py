"""Which stage works on what at which tick?

Microbatches go through the stages in groups of S, the number of stages: a stage does chunk 0 for a whole group, then chunk 1 for the same group, and so on, which is the
order of interleaved 1F1B (arXiv:2104.04473, section 2.2) and, with one chunk, that of PipeDream-Flush. Stage s does its unit u forward at tick u + s, where unit
u = (group v + chunk) S + (microbatch in the group); what leaves the last stage at one tick enters stage 0 at the next, one chunk further. Backward is the mirror image: the
last stage begins with the last chunk, in the tick in which it has done it forward (1F1B), or when all forward work is done (GPipe, arXiv:1811.06965).

With M microbatches, a multiple of S if v > 1, forward and backward work each take M v + S - 1 ticks, and 1F1B takes the time of (M v + S - 1) chunks forward and backward:
that of the ideal schedule.

>>> table = Timetable(schedule="1f1b", stages=2, microbatches=3)
>>> [table.forward(tick, 1) for tick in range(3)]
[(0, 0, False), (0, 0, True), (1, 0, True)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """A schedule.

    Attributes:
        schedule: "gpipe", "1f1b" or "interleaved".
        stages: number of stages, S.
        microbatches: number of microbatches, M.
        virtual: chunks of layers on each stage, v.
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int = 1

    @property
    def units(self) -> int:
        """Chunks that a stage does in each direction, those of microbatches that fill up the last group included."""
        return self.microbatches if self.virtual == 1 else -(-self.microbatches // self.stages) * self.stages * self.virtual

    @property
    def forward_ticks(self) -> int:
        """Ticks [0, n) have forward work."""
        return self.units + self.stages - 1

    @property
    def turn(self) -> int:
        """The first tick with backward work."""
        return self.forward_ticks if self.schedule == "gpipe" else self.virtual * self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return self.turn + self.forward_ticks

    @property
    def slots(self) -> int:
        """Units whose forward work a stage remembers: from the tick that did it to the tick that goes back, on the first stage in the first chunk."""
        return self.forward_ticks if self.schedule == "gpipe" else 2 * self.virtual * self.stages - 1

    @property
    def last_chunk(self) -> int:
        """Number of the last chunk of a stage."""
        return self.virtual - 1

    def forward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """(microbatch, chunk, whether there is work) of a stage at a tick; numbers or arrays of them. Without work the first two are within bounds and mean nothing."""
        return self._of(tick - stage)

    def backward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """The same for backward work."""
        micro, mirrored, works = self._of(tick - self.turn - (self.stages - 1 - stage))
        return micro, self.last_chunk - mirrored, works

    def forward_slot(self, tick: Any, stage: Any) -> Any:
        """Where the forward work of a tick is remembered; without work, a place that nothing is waiting in."""
        return (tick - stage) % self.slots

    def backward_slot(self, tick: Any, stage: Any) -> Any:
        """Where the forward work is that goes back in a tick."""
        return self._unit(*self.backward(tick, stage)[:2]) % self.slots

    def _unit(self, micro: Any, chunk: Any) -> Any:
        return (micro // self.stages * self.virtual + chunk) * self.stages + micro % self.stages

    def _of(self, unit: Any) -> tuple[Any, Any, Any]:
        inside = (unit >= 0) & (unit < self.units)
        unit = unit * inside
        rounds, place = unit // self.stages, unit % self.stages
        micro = rounds // self.virtual * self.stages + place
        works = inside & (micro < self.microbatches)
        return micro * works, rounds % self.virtual, works
