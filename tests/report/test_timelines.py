"""Pictures and traces of timelines: well formed, complete, and everything where and as long as it
is.
"""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from shardlib.report.timelines import (
    IDLE,
    LEFT,
    RIGHT,
    ROW,
    WIDTH,
    Slice,
    Timeline,
    free,
    lockstep,
    name_of,
    perfetto,
    timeline_svg,
)
from shardlib.schedules import Durations, Timetable

SVG = "{http://www.w3.org/2000/svg}"
TABLE = Timetable(schedule="zero-bubble", stages=3, microbatches=4)
DURATIONS = Durations(forward=0.01, backward=0.012, weights=0.008)


def made(name: str, parts: tuple[tuple[Slice, ...], float]) -> Timeline:
    return Timeline(
        name=name,
        title="<a & b>",
        stages=3,
        slices=parts[0],
        seconds=parts[1],
        beside=(("optimizer update", 0.02),),
    )


PREDICTED = made("predicted", free(TABLE, DURATIONS))
MEASURED = made("measured", lockstep(TABLE, DURATIONS))


def test_it_is_well_formed_and_fetches_nothing() -> None:
    text = timeline_svg(PREDICTED, MEASURED)
    ElementTree.fromstring(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\(", text)
    ElementTree.fromstring(timeline_svg())


def test_slices_are_drawn_to_scale_on_the_row_of_their_stage() -> None:
    root = ElementTree.fromstring(timeline_svg(PREDICTED, MEASURED))
    works = [r for r in root.iter(f"{SVG}rect") if r.attrib.get("class") == "work"]
    assert len(works) == len(PREDICTED.slices) + len(MEASURED.slices) + 2
    scale = (WIDTH - LEFT - RIGHT) / max(PREDICTED.step_seconds, MEASURED.step_seconds)
    first = [r for r in works if "optimizer" not in (r[0].text or "")][: len(PREDICTED.slices)]
    top = min(float(r.attrib["y"]) for r in first)
    for rect, piece in zip(first, PREDICTED.slices, strict=True):
        assert float(rect.attrib["x"]) == pytest.approx(LEFT + piece.start * scale, abs=0.01)
        assert float(rect.attrib["width"]) == pytest.approx(piece.seconds * scale, abs=0.01)
        assert float(rect.attrib["y"]) == pytest.approx(top + piece.stage * ROW, abs=0.1)
        assert (rect[0].text or "").startswith(f"stage {piece.stage}: {name_of(piece)}, ")
    assert len({r.attrib["style"] for r in first}) == 3  # a colour for each kind of work


def test_a_trace_has_a_process_for_each_timeline_and_a_thread_for_each_stage() -> None:
    events = json.loads(perfetto(PREDICTED, MEASURED))["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and "name" in e["args"]
    }
    assert names == {
        (pid, tid): name
        for pid, process in ((1, "predicted"), (2, "measured"))
        for tid, name in (
            (None, process),
            (1, "stage 0"),
            (2, "stage 1"),
            (3, "stage 2"),
            (4, "beside the ticks"),
        )
    }
    for pid, line in ((1, PREDICTED), (2, MEASURED)):
        found = sorted(
            (e["tid"] - 1, e["ts"], e["dur"], e["name"])
            for e in events
            if e["ph"] == "X" and e["pid"] == pid and e["cat"] != "beside"
        )
        wanted = sorted(
            (one.stage, one.start * 1e6, one.seconds * 1e6, name_of(one)) for one in line.slices
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == (*(pytest.approx(n, abs=0.01) for n in theirs[:3]), theirs[3])
        (beside,) = [e for e in events if e["pid"] == pid and e.get("cat") == "beside"]
        assert (beside["ts"], beside["dur"], beside["name"]) == (
            pytest.approx(line.seconds * 1e6, abs=0.01),
            pytest.approx(2e4, abs=0.01),
            "optimizer update",
        )
    assert {e["ph"] for e in events} == {"M", "X"} and all(
        e["dur"] >= 0 for e in events if e["ph"] == "X"
    )


def test_time_that_is_waited_in_lockstep_has_no_microbatch() -> None:
    piece = Slice(stage=0, kind=IDLE, label="", start=0.0, seconds=1.0)
    assert name_of(piece) == "waits in lockstep"
    assert "waits in lockstep" in timeline_svg(
        Timeline(name="measured", title="", stages=1, slices=(piece,), seconds=1.0)
    )


def test_slices_too_short_for_a_name_are_drawn_closer() -> None:
    assert PREDICTED.closer == ()
    table = Timetable(schedule="gpipe", stages=4, microbatches=4, virtual=16)
    whole = made("predicted", lockstep(table, DURATIONS))
    forward, backward = whole.closer
    assert (forward.name, backward.name) == ("forward a0", "backward a0")
    for part, first in ((forward, 0), (backward, 3)):
        assert part.seconds < whole.seconds / 10
        assert part.slices and all(
            part.since <= one.start and one.end <= part.since + part.seconds * 1.000001
            for one in part.slices
        )
        assert {one.label for one in part.of(first)} >= {"a0"} and part.closer == ()
        assert [one.start for one in part.slices if one.label == "a0"] == [
            one.start
            for one in whole.slices
            if (one.kind, one.label) == (part.slices[0].kind, "a0")
        ]
    text, drawn = str(whole), timeline_svg(whole)
    for words in (forward.told, backward.told):
        assert words in text and words in drawn
    root = ElementTree.fromstring(drawn)
    named = [one.text for one in root.iter(f"{SVG}text") if one.attrib.get("class") == "in"]
    assert named.count("a0") == 8
