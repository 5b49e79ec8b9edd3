"""Differences between two plans in decisions and costs, as text for people and as numbers with
limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from shardlib.cost.pricing import DeviceBytes, Seconds
from shardlib.errors import ArgumentError
from shardlib.planner.plan import Plan
from shardlib.report.elements import (
    aligned,
    bytes_text,
    clip,
    percent_text,
    ratio_text,
    seconds_text,
    wrapped,
)
from shardlib.report.text import (
    LABELS,
    MOST_PARAMETERS,
    collective_rows,
    decision_lines,
    in_every_step,
    notation,
    parameter_rows,
    subject,
    untold,
)
from shardlib.untrusted.data import JsonObject, printable

#: Ratios beyond it, and below its inverse, say no more than the two figures: they are left out.
TELLING = 100.0


def diff(a: Plan, b: Plan) -> str:
    """Describes the changes from plan `a` to plan `b`: decisions, seconds, bytes, layouts of
    parameters.
    """
    if not isinstance(b, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"a plan is compared with a plan, and other is {type(b).__name__}\nTry:"
            " plan.diff(shardlib.plan(...)), or plan.diff(shardlib.Plan.from_json(text))"
        )
    sections = [
        _title(a, b),
        _changed_decisions(a, b),
        _changed_figures(a, b),
        _changed_layouts(a, b),
    ]
    return printable("\n\n".join(section for section in sections if section) + "\n")


def _title(a: Plan, b: Plan) -> str:
    """What two plans are plans of: once, or one after the other where they differ."""
    return " -> ".join(dict.fromkeys(subject(plan) for plan in (a, b)))


def _decisions(a: Plan, b: Plan) -> tuple[tuple[str, str, str], ...]:
    """(label, before, after) of the decisions that differ."""
    old, new = dict(decision_lines(a)), dict(decision_lines(b))
    return tuple(
        (label, old.get(label) or untold(label, a), new.get(label) or untold(label, b))
        for label in dict.fromkeys([*old, *new])
        if old.get(label) != new.get(label)
    )


def _changed_decisions(a: Plan, b: Plan) -> str:
    lines = [
        line
        for label, old, new in _decisions(a, b)
        for line in (*wrapped(f"  - {label}: ", old), *wrapped(f"  + {label}: ", new))
    ]
    return "\n".join(["Decisions", *lines]) if lines else "Decisions: the same"


def _changed_figures(a: Plan, b: Plan) -> str:
    rows = [("", "before", "after", "change")]
    for label, before, after, text in (
        ("seconds per step", a.estimate.step_seconds, b.estimate.step_seconds, seconds_text),
        *_parts(a.estimate.seconds, b.estimate.seconds, LABELS, seconds_text),
        (
            "bytes per device",
            a.estimate.device_bytes.peak,
            b.estimate.device_bytes.peak,
            bytes_text,
        ),
        *_parts(a.estimate.device_bytes, b.estimate.device_bytes, {}, bytes_text),
    ):
        if text(before) != text(0) or text(after) != text(0):
            rows.append(_change(label, before, after, text))
    return "\n".join(aligned(rows, right={1, 2, 3}))


def _parts(
    a: Seconds | DeviceBytes,
    b: Seconds | DeviceBytes,
    labels: Mapping[str, str],
    text: Callable[[float], str],
) -> list[tuple[str, float, float, Callable[[float], str]]]:
    return [
        (f"  {labels.get(f.name, f.name)}", getattr(a, f.name), getattr(b, f.name), text)
        for f in fields(a)
    ]


def _change(
    label: str, old: float, new: float, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    difference, ratio = text(abs(new - old)), new / old if old else 0.0
    if not any(digit in difference for digit in "123456789"):
        return label, text(old), text(new), "="
    ratio_words = f" ({ratio_text(ratio)})" if 1 / TELLING <= ratio <= TELLING else ""
    return label, text(old), text(new), f"{'+' if new > old else '-'}{difference}{ratio_words}"


def _changed_layouts(a: Plan, b: Plan) -> str:
    old = {p.path: p for p in a.parameters}
    changed = [
        p
        for p in b.parameters
        if p.path in old and (p.rest, p.compute) != (old[p.path].rest, old[p.path].compute)
    ]
    if not changed:
        return ""
    table = [("parameter", "", "before (-) and after (+)")]
    for row in parameter_rows(changed)[:MOST_PARAMETERS]:
        was, now = old[row.example.path], row.example
        name = clip(row.pattern, 34) + (f" x{row.count}" if row.count > 1 else "")
        for state, before, after in (
            ("stored", was.rest, now.rest),
            ("in compute", was.compute, now.compute),
        ):
            if before != after:
                table.append((name, state, f"- {notation(was.colours, was.shape, before)}"))
                table.append(("", "", f"+ {notation(now.colours, now.shape, after)}"))
                name = ""
    return "\n".join(
        [f"Layouts: {len(changed)} of {len(b.parameters)} parameters change", *aligned(table)]
    )


# --------------------------------------------------------------------------------------------------
# Changes in the cost of a step, as numbers that can be held to limits.

#: Parts that are added beyond which the ratio is told.
_TELLING = 9.0
#: Figures that a limit can be set for: word -> what it is.
FIGURES = {
    "seconds": "seconds per step",
    "memory": "peak bytes per device",
    "traffic": "bytes of collectives per step",
    "collectives": "collectives per step",
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
        """The increase as a part of the first value; infinite where that was zero."""
        if self.after == self.before:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")


@dataclass(frozen=True, kw_only=True)
class Change:
    """The changes from one plan to another.

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
        """Lists the figures beyond their limits, a sentence for each."""
        return tuple(
            f"{FIGURES[figure.word]}: {_text(figure, figure.before)} ->"
            f" {_text(figure, figure.after)} ({_added(figure)}), and"
            f" {percent_text(limits[figure.word])} may be added"
            for figure in self.figures
            if figure.word in limits and figure.added > limits[figure.word] + 1e-12
        )

    def to_json(self) -> JsonObject:
        """The change as plain data."""
        return {
            "title": self.title,
            "decisions": [list(entry) for entry in self.decisions],
            "figures": {entry.word: [entry.before, entry.after] for entry in self.figures},
            "collectives": {entry.word: [entry.before, entry.after] for entry in self.collectives},
        }

    def markdown(self, beyond: Sequence[str] = ()) -> str:
        """The change as Markdown, for a pull request."""
        verdict = [f"- :x: {sentence}" for sentence in beyond]
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
            (figure.word, _text(figure, figure.before), _text(figure, figure.after), _added(figure))
            for figure in self.collectives
        ]
        table = aligned([("collectives", "before", "after", "change"), *rows], right={1, 2, 3})
        return "\n".join(["Bytes of collectives per step", *table]) + "\n"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, before, after, change) of all figures."""
        return [
            (
                FIGURES.get(figure.word, figure.word),
                _text(figure, figure.before),
                _text(figure, figure.after),
                _added(figure),
            )
            for figure in (*self.figures, *self.collectives)
        ]


def change(a: Plan, b: Plan) -> Change:
    """Returns the changes from plan `a` to plan `b`."""
    before, after = _traffic(a), _traffic(b)
    return Change(
        title=_title(a, b),
        decisions=_decisions(a, b),
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
    collectives = in_every_step(plan.estimate.collectives)
    return (
        plan.estimate.step_seconds,
        plan.estimate.device_bytes.peak,
        sum(collective.total_bytes for collective in collectives),
        sum(collective.count for collective in collectives),
    )


def _traffic(plan: Plan) -> dict[str, int]:
    return {
        f"{row.kind} over {'·'.join(row.axes)}": row.bytes
        for row in collective_rows(in_every_step(plan.estimate.collectives))
    }


def _text(figure: Figure, value: float) -> str:
    if figure.word == "seconds":
        return seconds_text(value)
    return f"{value:,.0f}" if figure.word == "collectives" else bytes_text(value)


def _added(figure: Figure) -> str:
    if figure.after == figure.before:
        return "="
    if not figure.before:
        return "new"
    if figure.added > _TELLING:
        return ratio_text(figure.after / figure.before)
    return f"{'+' if figure.added > 0 else '-'}{percent_text(abs(figure.added))}"


def _cell(text: str) -> str:
    """Text that ends no cell and is not markup."""
    for mark in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
