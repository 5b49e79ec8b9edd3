"""A timeline: when each stage of a pipeline does what, in seconds; `str` draws it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from shardlib.compact import compact
from shardlib.planning.transfers.picture import Transfers
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS
from shardlib.schedules.timetable import Timetable
from shardlib.untrusted.json_types import JsonObject

#: Kinds of slices: three kinds of work, forward and backward work in one, and ticks of a program in
#: lockstep in which a stage computes what nobody asks for.
BOTH, IDLE = "both", "idle"
KINDS = (FORWARD, BACKWARD, WEIGHTS, BOTH, IDLE)
#: What fills a slice in text, by kind.
_FILL = {FORWARD: ">", BACKWARD: "<", WEIGHTS: "=", BOTH: "x", IDLE: " "}
_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    BOTH: "forward and backward",
}
#: Columns of time in text.
_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one stage does for a while.

    Attributes:
        stage: its number.
        kind: one of `KINDS`.
        label: microbatches, after a letter for the chunk of layers where a stage has several: "3",
            "b3".
        start, seconds: when, from the start of the ticks, and how long.
    """

    stage: int
    kind: str
    label: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step of a pipeline in time.

    Attributes:
        name: "predicted" or "measured".
        title: what runs where.
        stages: number of stages.
        slices: what they do, in order of time for every stage.
        seconds: of the ticks, from the first to the last.
        beside: (what, seconds) of the step beside the ticks.
        exchange: what islands exchange, in the order of use; None where steps do not wait for it.
    """

    name: str
    title: str
    stages: int
    slices: tuple[Slice, ...]
    seconds: float
    beside: tuple[tuple[str, float], ...] = ()
    exchange: Transfers | None = None

    __repr__ = compact

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return self.seconds + sum(seconds for _, seconds in self.beside)

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage does nothing that is asked for, on the average."""
        busy = sum(one.seconds for one in self.slices if one.kind != IDLE)
        return 1 - busy / (self.stages * self.seconds) if self.seconds and self.stages else 0.0

    def of(self, stage: int) -> tuple[Slice, ...]:
        """The slices of one stage."""
        return tuple(one for one in self.slices if one.stage == stage)

    def svg(self) -> str:
        """The timeline as an SVG document that fetches nothing."""
        from shardlib.planning.pictures.timelines import timeline_svg

        return timeline_svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    def to_json(self) -> JsonObject:
        """The timeline as plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "stages": self.stages,
            "seconds": self.seconds,
            "bubble": self.bubble,
            "step_seconds": self.step_seconds,
            "beside": dict(self.beside),
            "slices": [asdict(one) for one in self.slices],
            **({} if self.exchange is None else {"exchange": self.exchange.to_json()}),
        }

    def __str__(self) -> str:
        exchange = "" if self.exchange is None else str(self.exchange)
        if not self.stages:
            return exchange
        return "\n".join([self._stages_text(), *([exchange] if exchange else [])])

    def _stages_text(self) -> str:
        rows = [
            f"stage {stage:<{len(str(self.stages - 1))}}  {self._row(stage)}"
            for stage in range(self.stages)
        ]
        legend = ", ".join(
            f"{_FILL[kind]} {_WORDS[kind]}"
            for kind in KINDS
            if kind in _WORDS and any(one.kind == kind for one in self.slices)
        )
        beside = "".join(
            f" + {what} {seconds_text(seconds)}" for what, seconds in self.beside if seconds > 0
        )
        return (
            "\n".join(
                [
                    self.title,
                    *(row.rstrip() for row in rows),
                    "",
                    (
                        f"{legend}; numbers are microbatches, a column is"
                        f" {seconds_text(self.seconds / _COLUMNS)}"
                    ),
                    (
                        f"{self.name}: ticks {seconds_text(self.seconds)}, of which stages wait"
                        f" {percent_text(self.bubble)}{beside} = a step of"
                        f" {seconds_text(self.step_seconds)}"
                    ),
                ]
            )
            + "\n"
        )

    def _row(self, stage: int) -> str:
        """A stage in `_COLUMNS` columns; labels stand where they fit."""
        cells, scale = [" "] * _COLUMNS, _COLUMNS / self.seconds if self.seconds else 0.0
        for one in self.of(stage):
            first, last = round(one.start * scale), round(one.end * scale)
            label = one.label if one.kind != IDLE and len(one.label) < last - first else ""
            cells[first:last] = f"{label:{_FILL[one.kind]}<{last - first}}" if last > first else ""
        return "".join(cells)


def label(table: Timetable, micro: int, chunk: int, before: int = 0) -> str:
    """A microbatch as slices name it, counted on from those of the groups before its own."""
    return str(before + micro) if table.virtual == 1 else f"{chr(ord('a') + chunk)}{before + micro}"


def work(
    table: Timetable, tick: int, stage: int, kinds: tuple[str, ...], before: int = 0
) -> Iterator[tuple[str, str]]:
    """(kind, label) of what a stage is asked for in a tick of some kinds of work."""
    for kind in kinds:
        micro, chunk, works = (
            table.weights(tick)
            if kind == WEIGHTS
            else (table.forward if kind == FORWARD else table.backward)(tick, stage)
        )
        if works:
            yield kind, label(table, micro, chunk, before)
