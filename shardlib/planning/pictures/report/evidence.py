"""Predicted beside compiled beside measured, of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.collective import Collective
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text, percent_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What somebody says of a step.

    Attributes:
        source: who: "predicted", "compiled", "measured".
        step_seconds: of a step; None where it is not said.
        peak_bytes: per device; None where it is not said.
        collectives: of a step; () where they are not said.
    """

    source: str
    step_seconds: float | None = None
    peak_bytes: int | None = None
    collectives: tuple[Collective, ...] = ()


def said_of(plan: Plan, others: Sequence[Evidence] = ()) -> tuple[Evidence, ...]:
    """The prediction, what the compiler said when it was asked for the plan, and others."""
    predicted = Evidence(
        source="predicted",
        step_seconds=plan.estimate.step_seconds,
        peak_bytes=plan.estimate.device_bytes.peak,
        collectives=tuple(plan.estimate.collectives),
    )
    refined = plan.refined
    compiled = (
        [
            Evidence(
                source="compiled",
                step_seconds=refined.step_seconds or None,
                peak_bytes=refined.peak_bytes or None,
            )
        ]
        if refined is not None and not any(source.source == "compiled" for source in others)
        else []
    )
    return predicted, *compiled, *others


def evidence_rows(sources: Sequence[Evidence]) -> list[tuple[str, ...]]:
    """Rows of a table under `evidence_head`; the differences are from the prediction."""
    first = sources[0]
    rows = [
        ("seconds a step", *(_seconds(source, first) for source in sources)),
        (
            "peak bytes a device",
            *(_bytes(source.peak_bytes, first.peak_bytes) for source in sources),
        ),
    ]
    kinds = sorted({(c.kind, c.axes) for source in sources for c in source.collectives})
    for kind, axes in kinds:
        name = f"{kind} over {'·'.join(axes)}"
        totals = [
            sum(c.total_bytes for c in source.collectives if (c.kind, c.axes) == (kind, axes))
            if source.collectives
            else None
            for source in sources
        ]
        rows.append((name, *(_bytes(total, totals[0]) for total in totals)))
    return rows


def evidence_head(sources: Sequence[Evidence]) -> tuple[str, ...]:
    """The heads of its columns."""
    return ("", *(source.source for source in sources))


def _seconds(source: Evidence, first: Evidence) -> str:
    if source.step_seconds is None:
        return "-"
    return seconds_text(source.step_seconds) + _off(source.step_seconds, first.step_seconds)


def _bytes(size: int | None, predicted: int | None) -> str:
    return "-" if size is None else bytes_text(size) + _off(size, predicted)


def _off(value: float, predicted: float | None) -> str:
    if not predicted or value == predicted:
        return ""
    change = value / predicted - 1
    return f" ({'+' if change > 0 else '-'}{percent_text(abs(change))})"
