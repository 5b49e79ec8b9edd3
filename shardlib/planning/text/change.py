"""What a step costs under one plan beside another, as numbers that can be held to limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.planning.plan import Plan
from shardlib.planning.text.decision_lines import decision_lines, untold
from shardlib.planning.text.figures import collective_rows, in_every_step
from shardlib.planning.units.quantity import bytes_text, percent_text, ratio_text, seconds_text
from shardlib.planning.units.tables import aligned
from shardlib.untrusted.json_types import JsonObject

#: Parts that are added beyond which the ratio is told.
_TELLING = 9.0
#: Figures that a limit can be set for: word -> what it is.
FIGURES = {
    "seconds": "seconds a step",
    "memory": "peak bytes a device",
    "traffic": "bytes of collectives a step",
    "collectives": "collectives a step",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure before and after.

    Attributes:
        word: of `FIGURES`, or a kind of collective with its mesh axes.
        before, after: the figure.
    """

    word: str
    before: float
    after: float

    @property
    def added(self) -> float:
        """What is more of it, as a part of what there was; infinite where there was nothing."""
        if self.after == self.before:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What changes from one plan to another.

    Attributes:
        title: what is compared.
        decisions: (label, before, after) of decisions that differ.
        figures: those of `FIGURES`, in their order.
        collectives: bytes of a step by kind and mesh axes, where they differ.
    """

    title: str
    decisions: tuple[tuple[str, str, str], ...]
    figures: tuple[Figure, ...]
    collectives: tuple[Figure, ...]

    def beyond(self, limits: dict[str, float]) -> tuple[str, ...]:
        """What is beyond a limit, a sentence for each."""
        return tuple(
            f"{FIGURES[one.word]}: {_text(one, one.before)} -> {_text(one, one.after)}"
            f" ({_added(one)}), and {percent_text(limits[one.word])} may be added"
            for one in self.figures
            if one.word in limits and one.added > limits[one.word] + 1e-12
        )

    def to_json(self) -> JsonObject:
        """The change as plain data."""
        return {
            "title": self.title,
            "decisions": [list(one) for one in self.decisions],
            "figures": {one.word: [one.before, one.after] for one in self.figures},
            "collectives": {one.word: [one.before, one.after] for one in self.collectives},
        }

    def markdown(self, beyond: Sequence[str] = ()) -> str:
        """The change as Markdown, for a pull request."""
        verdict = [f"- :x: {one}" for one in beyond]
        head = ["| | before | after | change |", "| --- | ---: | ---: | ---: |"]
        rows = [f"| {' | '.join(map(_cell, row))} |" for row in self.rows()]
        changed = [
            f"| {_cell(label)} | {_cell(old)} | {_cell(new)} |"
            for label, old, new in self.decisions
        ]
        decided = (
            ["", "| decision | before | after |", "| --- | --- | --- |", *changed]
            if changed
            else ["", "All decisions are the same."]
        )
        title = ["### " + _cell(self.title), ""]
        return "\n".join([*title, *verdict, *([""] * bool(verdict)), *head, *rows, *decided, ""])

    def collectives_text(self) -> str:
        """The collectives that differ as text; empty where all are the same."""
        if not self.collectives:
            return ""
        rows = [
            (one.word, _text(one, one.before), _text(one, one.after), _added(one))
            for one in self.collectives
        ]
        table = aligned([("collectives", "before", "after", "change"), *rows], right={1, 2, 3})
        return "\n".join(["Bytes of collectives a step", *table]) + "\n"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, before, after, change) of all figures."""
        return [
            (
                FIGURES.get(one.word, one.word),
                _text(one, one.before),
                _text(one, one.after),
                _added(one),
            )
            for one in (*self.figures, *self.collectives)
        ]


def change(a: Plan, b: Plan) -> Change:
    """What changes from plan `a` to plan `b`."""
    old, new = dict(decision_lines(a)), dict(decision_lines(b))
    names = [f"{plan.model} on {plan.topology}" for plan in (a, b)]
    before, after = _traffic(a), _traffic(b)
    return Change(
        title=" -> ".join(dict.fromkeys(names)),
        decisions=tuple(
            (label, old.get(label) or untold(label, a), new.get(label) or untold(label, b))
            for label in dict.fromkeys([*old, *new])
            if old.get(label) != new.get(label)
        ),
        figures=tuple(
            Figure(word=word, before=first, after=second)
            for word, first, second in zip(FIGURES, _figures(a), _figures(b), strict=True)
        ),
        collectives=tuple(
            Figure(word=key, before=before.get(key, 0), after=after.get(key, 0))
            for key in sorted({*before, *after})
            if before.get(key, 0) != after.get(key, 0)
        ),
    )


def _figures(plan: Plan) -> tuple[float, float, float, float]:
    every = in_every_step(plan.estimate.collectives)
    return (
        plan.estimate.step_seconds,
        plan.estimate.device_bytes.peak,
        sum(one.total_bytes for one in every),
        sum(one.count for one in every),
    )


def _traffic(plan: Plan) -> dict[str, int]:
    return {
        f"{row.kind} over {'·'.join(row.axes)}": row.bytes
        for row in collective_rows(in_every_step(plan.estimate.collectives))
    }


def _text(one: Figure, value: float) -> str:
    if one.word == "seconds":
        return seconds_text(value)
    return f"{value:,.0f}" if one.word == "collectives" else bytes_text(value)


def _added(one: Figure) -> str:
    if one.after == one.before:
        return "="
    if not one.before:
        return "new"
    if one.added > _TELLING:
        return ratio_text(one.after / one.before)
    return f"{'+' if one.added > 0 else '-'}{percent_text(abs(one.added))}"


def _cell(text: str) -> str:
    """Text that ends no cell and is no markup."""
    for mark in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
