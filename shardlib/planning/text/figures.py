"""Seconds, bytes and collectives of a plan, as bars and tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from shardlib.collective import Collective
from shardlib.cost.estimate import Estimate
from shardlib.exchanges.diloco import DiLoCo
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bar, bytes_text, clip, percent_text, seconds_text
from shardlib.planning.units.tables import aligned, and_more

_BAR = 40
_MOST_COLLECTIVES = 12
#: What people call the parts of a step whose field names are too short.
LABELS = {
    "exposed": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "overhead": "launch overhead",
}


def _bars(rows: Iterable[tuple[str, float, str]], whole: float) -> list[str]:
    kept = [(label, value, text) for label, value, text in rows if value > 0]
    if not kept:
        return []
    width, figure = max(len(label) for label, _, _ in kept), max(len(text) for _, _, text in kept)
    return [
        f"  {label:{width}}  {bar(value / whole, _BAR)} {text:>{figure}} "
        f" {percent_text(value / whole):>6}"
        for label, value, text in kept
    ]


def time_section(plan: Plan) -> str:
    """What a step's seconds are."""
    seconds = plan.estimate.seconds
    rows = (
        (
            LABELS.get(f.name, f.name),
            getattr(seconds, f.name),
            seconds_text(getattr(seconds, f.name)),
        )
        for f in fields(seconds)
    )
    return "\n".join(
        [f"Time: {seconds_text(seconds.total)} a step", *_bars(rows, seconds.total or 1.0)]
    )


def memory_section(plan: Plan, hbm_bytes: float | None) -> str:
    """What the bytes of the fullest device are.

    Args:
        hbm_bytes: what a device has; None where that is not known.
    """
    parts = plan.estimate.device_bytes
    rows = [
        (f.name, float(getattr(parts, f.name)), bytes_text(getattr(parts, f.name)))
        for f in fields(parts)
    ]
    whole = hbm_bytes or parts.peak or 1.0
    if hbm_bytes and hbm_bytes > parts.peak:
        rows += spare_rows(plan.estimate, hbm_bytes)
    of = f" of {limit_text(plan.estimate, hbm_bytes)}" if hbm_bytes else ""
    return "\n".join(
        [
            f"Memory: {bytes_text(parts.peak)}{of} on the fullest device",
            *_bars(rows, max(whole, parts.peak)),
        ]
    )


def limit_bytes(estimate: Estimate, hbm_bytes: float) -> float:
    """Bytes of a device that a plan may fill, as a program may need more than predicted.

    Args:
        hbm_bytes: what a device has.
    """
    return hbm_bytes / estimate.margin


def limit_text(estimate: Estimate, hbm_bytes: float) -> str:
    """The limit that plans keep to: "14.7 GiB usable of 15.8 GiB"; the whole where nothing is held
    back.

    Args:
        hbm_bytes: what a device has.
    """
    limit = limit_bytes(estimate, hbm_bytes)
    whole = bytes_text(hbm_bytes)
    return whole if limit == hbm_bytes else f"{bytes_text(limit)} usable of {whole}"


def spare_rows(estimate: Estimate, hbm_bytes: float) -> list[tuple[str, float, str]]:
    """What a plan leaves of a device: (label, bytes, text).

    Args:
        hbm_bytes: what a device has.
    """
    limit, peak = limit_bytes(estimate, hbm_bytes), estimate.device_bytes.peak
    rows = (("margin", hbm_bytes - max(limit, peak)), ("spare", limit - peak))
    return [(label, size, bytes_text(size)) for label, size in rows if size > 0]


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """All collectives of one kind over the same mesh axes.

    Attributes:
        kind: what XLA calls it.
        axes: the mesh axes it spans.
        count: executions in one step.
        bytes: bytes of all executions in one step on a device.
        seconds: time of all executions, hidden or not.
        cause: what most of the time is for.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    cause: str


def collective_rows(collectives: Iterable[Collective]) -> list[CollectiveRow]:
    """Collectives added up by mesh axes and kind, the largest time first."""
    groups: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.axes, collective.kind), []).append(collective)
    rows = [
        CollectiveRow(
            kind=kind,
            axes=axes,
            count=sum(c.count for c in group),
            bytes=sum(c.total_bytes for c in group),
            seconds=sum(c.seconds for c in group),
            cause=_cause(max(group, key=lambda c: (c.seconds, c.total_bytes)).cause),
        )
        for (axes, kind), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, -row.bytes, row.axes, row.kind))


def _cause(scope: str) -> str:
    """A name scope without the words that automatic differentiation adds: transpose(jvp(loss)) is
    "loss, backward".
    """
    for front, which in (("transpose(jvp(", "backward"), ("jvp(", "forward")):
        if scope.startswith(front):
            inner = scope.removeprefix(front).replace(")", "").strip("/")
            return f"{inner}, {which}" if inner else f"activations, {which}"
    return scope


def collectives_section(plan: Plan) -> str:
    """What devices send each other in a step; empty where that is nothing."""
    rows = collective_rows(in_every_step(plan.estimate.collectives))
    if not rows:
        return meetings_section(plan)
    everything = sum(row.seconds for row in rows)
    exposed = min(plan.estimate.seconds.exposed, everything)
    head = (
        f"Collectives: {seconds_text(everything)} a step, {seconds_text(exposed)} exposed,"
        f" {seconds_text(everything - exposed)} hidden behind compute"
        if everything
        else "Collectives"
    )
    table = [
        ("over", "kind", "count", "bytes", "time", "mostly for"),
        *(
            (
                "·".join(row.axes),
                row.kind,
                f"{row.count:,}",
                bytes_text(row.bytes),
                seconds_text(row.seconds),
                clip(row.cause, 40),
            )
            for row in rows[:_MOST_COLLECTIVES]
        ),
    ]
    return "\n".join(
        [
            head,
            *aligned(table, right={2, 3, 4}),
            *and_more(len(rows) - _MOST_COLLECTIVES, "kinds of collective"),
            *([meetings] if (meetings := meetings_section(plan)) else []),
        ]
    )


def in_every_step(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives of a step, without those of meetings of islands."""
    return [one for one in collectives if not one.every]


def meetings_section(plan: Plan) -> str:
    """What a meeting of islands moves; empty where there is none."""
    met = [one for one in plan.estimate.collectives if one.every]
    told = "; ".join(
        f"{one.kind} over {'·'.join(one.axes)}, {bytes_text(one.total_bytes)} in"
        f" {seconds_text(one.seconds)}"
        for one in met
    )
    if not met:
        return ""
    exchange, every = plan.exchange, met[0].every
    waits = "all of it exposed"
    if isinstance(exchange, DiLoCo) and exchange.delay:
        some = seconds_text(plan.estimate.seconds.exchange * every)
        waits = f"of which steps wait for {some}, as {exchange.delay} hide what crosses"
    return f"Every {every} steps a meeting, {waits}: {told}"
