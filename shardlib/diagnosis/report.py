"""A diagnosis, and its forms: text, JSON, a page, a notebook card, annotations of GitHub."""

from __future__ import annotations

import json
import linecache
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.diagnosis.cures import Cure
from shardlib.diagnosis.graph import sharding_graph
from shardlib.diagnosis.peak import LiveValue
from shardlib.diagnosis.rows import Row, spec_text
from shardlib.diagnosis.source import Frame, shown, text_of
from shardlib.report.elements import bytes_text, seconds_text, short
from shardlib.report.markup import Picture, card, render
from shardlib.untrusted.data import JsonObject

#: Lines around a row's on a page.
_CONTEXT = 2


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The collectives of a function, compiled for a topology.

    Attributes:
        rows: the most bytes first.
        wire_bytes: that a device sends in one call.
        kernel_seconds: of all kernels: the TPU compiler's estimate, or at the rates of a GPU; 0
            where neither is known.
        memory: bytes per device: "arguments", "temporaries", "peak", ...
        live: values that live at the peak, the largest first; of `live_bytes` together.
        problems: what could not be read.
        note: where cures were not looked for to the end, or another mesh has the names of axes.
        text: of the compiled program.
    """

    rows: tuple[Row, ...]
    wire_bytes: float
    kernel_seconds: float
    memory: Mapping[str, int]
    live: tuple[LiveValue, ...]
    live_bytes: int
    compile_seconds: float
    problems: tuple[str, ...]
    text: str
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """Bytes per device at the peak, without the program's code, which that of TPUs has, too."""
        memory = self.memory
        parts = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
        return min(memory["peak"], parts)

    @property
    def seconds(self) -> float:
        """Of all collectives, one after the other."""
        return sum(row.seconds for row in self.rows)

    @property
    def step_seconds(self) -> float:
        """Kernels, and what of the communication nothing hides; what cures are compared by."""
        exposed = sum(row.seconds if row.exposed is None else row.exposed for row in self.rows)
        return self.kernel_seconds + exposed


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why there is communication in a function.

    Attributes:
        function: its name.
        topology: its spelling.
        mesh: (axis, size).
        communication: of the function as it is.
        cures: edits that help, in the order in which they were tried, each on top of those before.
        cured: row -> the number of the cure that removes it, counted from 0.
        tried: how many programs were compiled to find cures.
        searched: whether cures were looked for.
        after: the communication with all cures; None without.
        versions: package -> version of the compiler.
    """

    function: str
    topology: str
    mesh: tuple[tuple[str, int], ...]
    communication: Communication
    cures: tuple[Cure, ...]
    cured: Mapping[int, int]
    tried: int
    versions: Mapping[str, str]
    searched: bool = False
    after: Communication | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per collective, the most bytes first."""
        return self.communication.rows

    def to_json(self) -> str:
        """The diagnosis as JSON text, see `docs/why.md`."""
        return to_json(self)

    def __str__(self) -> str:
        return report_text(self)

    def __repr__(self) -> str:
        return short("Diagnosis", headline(self), f"{len(self.cures)} cures")

    def _repr_html_(self) -> str:
        return notebook_card(self)

    def show(self, file: str | Path) -> Path:
        """Writes the diagnosis as a page of HTML."""
        path = Path(file)
        path.write_text(page(self), encoding="utf-8")
        return path

    @property
    def unexplained(self) -> tuple[Row, ...]:
        """Rows that are not inherent: those with a cure, and those for which none was found."""
        return tuple(row for row in self.rows if row.inherent is not True)


#: What the line of a cure needs to run.
CONTEXT = (
    "jax.P(...) is for calls in `with jax.set_mesh(mesh)`; elsewhere write"
    " jax.NamedSharding(mesh, jax.P(...))."
)


def headline(diagnosis: Diagnosis) -> str:
    """One sentence with the sums."""
    c = diagnosis.communication
    count = sum(row.count for row in c.rows)
    mesh = " x ".join(f"{axis} {size}" for axis, size in diagnosis.mesh)
    machine = f" on {diagnosis.topology}" if diagnosis.topology else ""
    seconds = f", {seconds_text(c.seconds)} on the links" if c.seconds else ""
    peak = f"; peak memory {bytes_text(c.peak_bytes)}" if c.memory else ""
    return (
        f"{diagnosis.function}{machine} ({mesh}): {bytes_text(c.wire_bytes)} sent per device and"
        f" call in {count} collective{'s' * (count != 1)}{seconds}{peak}"
    )


def verdict(diagnosis: Diagnosis, number: int) -> str:
    """What a row is: inherent, avoidable by a cure, or neither as far as is known."""
    row = diagnosis.rows[number]
    if row.inherent:
        return "inherent"
    if number in diagnosis.cured:
        return f"avoidable: cure {diagnosis.cured[number] + 1}"
    if not diagnosis.versions:
        return "cures need the function: shardlib why module:function"
    return "no cure found" if diagnosis.searched else "no cure was looked for"


def report_text(diagnosis: Diagnosis, limit: int = 40) -> str:
    """The diagnosis as text. Rows that say the same, as those of layers that are written one after
    the other, are listed once, summed.

    Args:
        limit: rows that are listed; the others are summed.
    """
    lines = [headline(diagnosis), ""]
    if diagnosis.cures:
        lines.append("Cures, compiled and measured, each on top of those before:")
        for number, cure in enumerate(diagnosis.cures):
            lines += _cure_lines(number, cure)
        if any("with_sharding_constraint(" in cure.text for cure in diagnosis.cures):
            lines.append("  " + CONTEXT)
        lines.append("")
    groups: dict[tuple[str, ...], list[Row]] = {}
    for number, row in enumerate(diagnosis.rows):
        groups.setdefault(_row_lines(diagnosis, number), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: -sum(row.bytes for row in group[1]))
    for (what, *below), rows in ordered[:limit]:
        seconds, exposed = sum(row.seconds for row in rows), [row.exposed for row in rows]
        hidden = "" if None in exposed else f", {seconds_text(sum(filter(None, exposed)))} exposed"
        lines.append(
            f"{bytes_text(sum(row.bytes for row in rows)):>10}"
            f"  {sum(row.count for row in rows)} x {what}"
            + (f"  {seconds_text(seconds)}{hidden}" if seconds else "")
        )
        lines += [f"{'':12}{line}" for line in below]
    others = [row for _, rows in ordered[limit:] for row in rows]
    if others:
        lines.append(f"{bytes_text(sum(r.bytes for r in others)):>10}  in {len(others)} more rows")
    problems = diagnosis.communication.problems
    if not diagnosis.rows and not problems:
        lines.append("There is no collective in the compiled program.")
    lines += _memory_lines(diagnosis)
    unread = [f"incomplete: {problem}" for problem in problems]
    notes = [*unread, *filter(None, [diagnosis.communication.note])]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def _row_lines(diagnosis: Diagnosis, number: int) -> tuple[str, ...]:
    """What a row says besides its sums."""
    row = diagnosis.rows[number]
    text, place = row.source.user and text_of(row.source.user), shown(row.source)
    return (
        f"{row.kind} over {', '.join(row.axes) or '?'}",
        (place or "no source line") + (f": {text}" if text else ""),
        row.reason,
        *(f"the compiler: {warning}" for warning in row.warnings),
        f"{verdict(diagnosis, number)}; {row.overlap}",
    )


def _cure_lines(number: int, cure: Cure) -> list[str]:
    lines = list[str]()
    for place, change in enumerate(cure.changes):
        lines += [
            f"  {f'{number + 1}.' if not place else '  '} {change.place}",
            *([f"     - {change.before}"] if change.before else []),
            f"     + {change.text}",
        ]
    return [*lines, *(f"     {line}" for line in (cure_effect(cure), cure.types) if line)]


def cure_effect(cure: Cure) -> str:
    """What a cure changed, as the compiler's program has it."""
    (bytes_before, bytes_after), (seconds_before, seconds_after) = cure.bytes, cure.seconds
    memory_before, memory_after = cure.memory
    return (
        f"{bytes_text(bytes_before)} -> {bytes_text(bytes_after)} sent,"
        f" {seconds_text(seconds_before)} -> {seconds_text(seconds_after)} of kernels and exposed"
        f" communication, {bytes_text(memory_before)} -> {bytes_text(memory_after)} at the peak"
    )


def _memory_lines(diagnosis: Diagnosis, limit: int = 6) -> list[str]:
    c = diagnosis.communication
    if not c.live:
        return []
    total = bytes_text(c.peak_bytes if c.memory else c.live_bytes)
    lines = ["", f"At the peak of memory ({total} per device) live:"]
    if arguments := c.memory.get("arguments"):
        lines.append(f"{bytes_text(arguments):>10}  the arguments")
    for value in c.live[:limit]:
        spec = f" {spec_text(value.spec)}" if value.spec is not None else ""
        times = f", {value.count} values," if value.count > 1 else ""
        saving = max(value.replicated, key=lambda entry: entry[1], default=None)
        advice = (
            f"; not sharded over {saving[0]}, which would save {bytes_text(saving[1])}"
            if saving
            else ""
        )
        lines.append(
            f"{bytes_text(value.bytes):>10}  {value.name or 'a value'}{spec}{times}"
            f" {shown(value.source)}{advice}"
        )
    return lines


# --------------------------------------------------------------------------------------------------
# JSON.


def to_data(diagnosis: Diagnosis) -> JsonObject:
    """The diagnosis as plain data: "function", "topology", "mesh", the sums, "collectives",
    "cures", "memory", "problems".
    """
    c = diagnosis.communication
    return {
        "format": 1,
        "function": diagnosis.function,
        "topology": diagnosis.topology,
        "mesh": dict(diagnosis.mesh),
        "bytes": c.wire_bytes,
        "seconds": c.seconds,
        "kernel_seconds": c.kernel_seconds,
        "compile_seconds": c.compile_seconds,
        "collectives": [
            _row_data(diagnosis, number, row) for number, row in enumerate(diagnosis.rows)
        ],
        "cures": [_cure_data(cure) for cure in diagnosis.cures],
        "tried": diagnosis.tried,
        "memory": {
            **c.memory,
            "live": [
                {
                    "name": value.name,
                    "source": value.source.user.place if value.source.user else "",
                    "bytes": value.bytes,
                    "count": value.count,
                    "sharding": None if value.spec is None else [list(a) for a in value.spec],
                    "savings": dict(value.replicated),
                }
                for value in c.live[:20]
            ],
        },
        "problems": [*c.problems, *filter(None, [c.note])],
        "versions": dict(diagnosis.versions),
    }


def _row_data(diagnosis: Diagnosis, number: int, row: Row) -> JsonObject:
    meeting, frame = row.meeting, row.source.user
    shardings: JsonObject | None = None
    if meeting is not None:
        shardings = {
            "value": meeting.value.name,
            "shape": list(meeting.value.shape),
            "made": [list(axes) for axes in meeting.produced],
            "made_at": meeting.value.source.user.place if meeting.value.source.user else "",
            "needed": [list(axes) for axes in meeting.needed],
            "needed_at": next((s.user.place for s in meeting.users if s.user), ""),
            "reduced": list(meeting.reduced),
        }
    cure = diagnosis.cured.get(number)
    return {
        "kind": row.kind,
        "axes": list(row.axes),
        "bytes": row.bytes,
        "count": row.count,
        "seconds": row.seconds,
        "exposed": row.exposed,
        "overlap": row.overlap,
        "source": frame.place if frame else "",
        "backward": row.source.operation.backward,
        "recomputed": row.source.operation.recomputed,
        "operation": row.source.operation.primitive,
        "shardings": shardings,
        "cause": row.cause,
        "reason": row.reason,
        "inherent": row.inherent,
        "cure": None if cure is None else _cure_data(diagnosis.cures[cure]),
        "warnings": list(row.warnings),
    }


def _cure_data(cure: Cure) -> JsonObject:
    return {
        "source": cure.place,
        "text": cure.text,
        "changes": [
            {"source": change.place, "before": change.before, "text": change.text}
            for change in cure.changes
        ],
        "bytes": list(cure.bytes),
        "seconds": list(cure.seconds),
        "memory": list(cure.memory),
        "types": cure.types,
    }


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as JSON text."""
    return json.dumps(to_data(diagnosis), indent=1)


# --------------------------------------------------------------------------------------------------
# Annotations, cards, pages.


def github_annotations(diagnosis: Diagnosis) -> Iterator[str]:
    """Lines that GitHub's workflows show beside the source: a warning for a row that is not
    inherent, a notice for the others.
    """
    for number, row in enumerate(diagnosis.rows):
        frame = row.source.user
        if frame is None:
            continue
        level = "notice" if row.inherent else "warning"
        cure = diagnosis.cured.get(number)
        advice = f" Cure: {diagnosis.cures[cure].text}" if cure is not None else ""
        message = (
            f"{bytes_text(row.bytes)} of {row.kind} over {', '.join(row.axes)}: {row.reason}."
            + advice
        )
        escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        place = frame.place.rpartition(":")[0]
        yield f"::{level} file={place},line={frame.line},title={row.kind}::{escaped}"


def notebook_card(diagnosis: Diagnosis) -> str:
    """The diagnosis as HTML for a notebook."""
    rows = [
        (
            bytes_text(row.bytes),
            f"{row.count} x {row.kind}",
            ", ".join(row.axes),
            shown(row.source),
            verdict(diagnosis, number),
        )
        for number, row in enumerate(diagnosis.rows[:12])
    ]
    cures = [f"{cure.place}: {cure.text} ({cure_effect(cure)})" for cure in diagnosis.cures]
    return card(
        headline(diagnosis),
        cures,
        rows=rows,
        head=("bytes", "collective", "axes", "line", "verdict"),
        text=report_text(diagnosis),
    )


def page(diagnosis: Diagnosis) -> str:
    """The diagnosis as a page of HTML: the rows, the cures, and the source with its rows."""
    by_file: dict[str, dict[int, list[tuple[int, Row]]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(diagnosis.rows):
        if row.source.user:
            by_file[row.source.user.file][row.source.user.line].append((number, row))
    c = diagnosis.communication
    return render(
        "diagnosis/templates/why.html",
        title=f"Why is there communication in {diagnosis.function}?",
        headline=headline(diagnosis),
        rows=[
            {
                "bytes": bytes_text(row.bytes),
                "share": row.bytes / c.wire_bytes if c.wire_bytes else 0.0,
                "what": f"{row.count} x {row.kind} over {', '.join(row.axes) or '?'}",
                "seconds": seconds_text(row.seconds) if row.seconds else "",
                "exposed": "" if row.exposed is None else seconds_text(row.exposed),
                "place": shown(row.source) or "no source line",
                "reason": row.reason,
                "verdict": verdict(diagnosis, number),
                "overlap": row.overlap,
            }
            for number, row in enumerate(diagnosis.rows)
        ],
        cures=[
            {
                "changes": cure.changes,
                "effect": "; ".join(filter(None, (cure_effect(cure), cure.types))),
            }
            for cure in diagnosis.cures
        ],
        files=[
            {"name": Frame(file, 1).place.rpartition(":")[0], "lines": list(_listing(file, lines))}
            for file, lines in by_file.items()
        ],
        memory=_memory_lines(diagnosis, 12)[1:],
        graphs=_graphs(diagnosis),
    )


def _graphs(diagnosis: Diagnosis) -> list[Picture]:
    """The graph of shardings, with cures that before and after them."""
    pictures = [
        sharding_graph(
            diagnosis.rows, diagnosis.cured, "Before cures" if diagnosis.cures else "As it is"
        )
    ]
    if diagnosis.after is not None:
        pictures.append(sharding_graph(diagnosis.after.rows, {}, "After them"))
    return [picture for picture in pictures if picture is not None]


def _listing(file: str, rows: dict[int, list[tuple[int, Row]]]) -> Iterator[dict[str, Any]]:
    """The lines of a file around those with rows, each with its rows."""
    numbers = sorted(
        {n for line in rows for n in range(line - _CONTEXT, line + _CONTEXT + 1) if n > 0}
    )
    last = 0
    for number in numbers:
        text = linecache.getline(file, number).rstrip("\n")
        if not text and number not in rows:
            continue
        notes: Sequence[str] = [
            f"{bytes_text(row.bytes)} {row.kind} over {', '.join(row.axes)}"
            for _, row in rows.get(number, ())
        ]
        yield {"number": number, "text": text, "notes": notes, "gap": last and number > last + 1}
        last = number
