"""What one plan decides and costs differently from another, as text for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from shardlib.errors import ArgumentError
from shardlib.planning.plan import Plan
from shardlib.planning.text.decision_lines import decision_lines, untold
from shardlib.planning.text.figures import LABELS
from shardlib.planning.text.parameters import MOST_PARAMETERS, notation, parameter_rows
from shardlib.planning.units.quantity import bytes_text, clip, ratio_text, seconds_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted import printable

#: Ratios beyond it, and below its inverse, say no more than the two figures: they are left out.
TELLING = 100.0


def diff(a: Plan, b: Plan) -> str:
    """What changes from plan `a` to plan `b`: decisions, seconds, bytes, layouts of parameters."""
    if not isinstance(b, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"a plan is compared with a plan, and other is {type(b).__name__}\nTry:"
            " plan.diff(shardlib.plan(...)), or plan.diff(shardlib.Plan.from_json(text))"
        )
    head = (
        f"{a.model} on {a.topology}"
        if (a.model, a.topology) == (b.model, b.topology)
        else f"{a.model} on {a.topology} -> {b.model} on {b.topology}"
    )
    sections = [head, _changed_decisions(a, b), _changed_figures(a, b), _changed_layouts(a, b)]
    return printable("\n\n".join(section for section in sections if section) + "\n")


def _changed_decisions(a: Plan, b: Plan) -> str:
    old, new = dict(decision_lines(a)), dict(decision_lines(b))
    labels = [label for label in dict.fromkeys([*old, *new]) if old.get(label) != new.get(label)]
    if not labels:
        return "Decisions: the same"
    lines = ["Decisions"]
    for label in labels:
        lines += [
            *wrapped(f"  - {label}: ", old.get(label) or untold(label, a)),
            *wrapped(f"  + {label}: ", new.get(label) or untold(label, b)),
        ]
    return "\n".join(lines)


def _changed_figures(a: Plan, b: Plan) -> str:
    rows = [
        ("", "before", "after", "change"),
        _change("seconds a step", a.estimate.step_seconds, b.estimate.step_seconds, seconds_text),
    ]
    rows += [
        _change(
            f"  {LABELS.get(f.name, f.name)}",
            getattr(a.estimate.seconds, f.name),
            getattr(b.estimate.seconds, f.name),
            seconds_text,
        )
        for f in fields(a.estimate.seconds)
    ]
    rows.append(
        _change(
            "bytes a device", a.estimate.device_bytes.peak, b.estimate.device_bytes.peak, bytes_text
        )
    )
    rows += [
        _change(
            f"  {f.name}",
            getattr(a.estimate.device_bytes, f.name),
            getattr(b.estimate.device_bytes, f.name),
            bytes_text,
        )
        for f in fields(a.estimate.device_bytes)
    ]
    return "\n".join(
        aligned(
            [row for row in rows if row[1:3] not in (("0 s", "0 s"), ("0 B", "0 B"))],
            right={1, 2, 3},
        )
    )


def _change(
    label: str, old: float, new: float, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    difference, ratio = text(abs(new - old)), new / old if old else 0.0
    if not any(digit in difference for digit in "123456789"):
        return label, text(old), text(new), "="
    told = f" ({ratio_text(ratio)})" if 1 / TELLING <= ratio <= TELLING else ""
    return label, text(old), text(new), f"{'+' if new > old else '-'}{difference}{told}"


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
        for where, before, after in (
            ("stored", was.rest, now.rest),
            ("in compute", was.compute, now.compute),
        ):
            if before != after:
                table.append((name, where, f"- {notation(was.colours, was.shape, before)}"))
                table.append(("", "", f"+ {notation(now.colours, now.shape, after)}"))
                name = ""
    return "\n".join(
        [f"Layouts: {len(changed)} of {len(b.parameters)} parameters change", *aligned(table)]
    )
