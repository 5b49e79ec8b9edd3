"""No label of a picture stands on another, or leaves the picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from shardlib.report.pages import curve_svg
from shardlib.report.timelines import Timeline, lockstep, timeline_svg
from shardlib.schedules import Durations, Timetable
from tests.report.fixture_page import page
from tests.report.labels import Label, collisions, labels, outside
from tests.report.test_curves import CURVE

ROOT = Path(__file__).parents[2]
SHEET = (resources.files("shardlib") / "report/templates/report.css").read_text(encoding="utf-8")


def pipeline() -> Timeline:
    """Many chunks of layers, so that slices are short."""
    table = Timetable(schedule="gpipe", stages=4, microbatches=4, virtual=16)
    slices, seconds = lockstep(table, Durations(forward=0.5, backward=1.1, weights=0.0))
    return Timeline(name="predicted", title="a model", stages=4, slices=slices, seconds=seconds)


def pictures() -> Iterator[tuple[str, str]]:
    """Name and SVG of the pictures that are stored, and of those that a page has."""
    for file in sorted((ROOT / "docs" / "pictures").glob("*.svg")):
        yield file.stem, file.read_text()
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text())["cells"]
        outputs = [out.get("data", {}) for cell in cells for out in cell.get("outputs", ())]
        for number, data in enumerate(out for out in outputs if "image/svg+xml" in out):
            yield f"{file.stem} {number}", "".join(data["image/svg+xml"])
    for number, svg in enumerate(re.findall(r"<svg.*?</svg>", page(), re.DOTALL)):
        yield f"page {number}", svg
    yield "curve", curve_svg(CURVE)
    yield "timeline", timeline_svg(pipeline())


@pytest.mark.parametrize("svg", [pytest.param(svg, id=name) for name, svg in pictures()])
def test_labels_have_room(svg: str) -> None:
    assert len(labels(svg, SHEET)) > 2
    assert collisions(labels(svg, SHEET)) == []
    assert outside(svg, SHEET) == []


def test_a_label_on_another_is_noticed() -> None:
    svg = str(curve_svg(CURVE))
    label = max(labels(svg), key=lambda label: label.top)
    x, y = (label.left + label.right) / 2, label.bottom
    worse = svg.replace("</svg>", f'<text x="{x}" y="{y}">in its place</text></svg>')
    assert len(collisions(labels(worse))) >= 1
    far = svg.replace("</svg>", '<text x="0" y="99999">far away</text></svg>')
    assert [label.text for label in outside(far)] == ["far away"]


def test_a_label_in_a_picture_within_is_where_the_picture_is() -> None:
    inner = (
        '<svg x="100" y="50"><text x="1" y="20" text-anchor="end" font-size="10">ab</text></svg>'
    )
    (label,) = labels(f'<svg viewBox="0 0 200 100">{inner}</svg>')
    assert label == Label("ab", pytest.approx(88.4), 62.5, 101.0, 72.0)
