"""The picture of a scaling curve: well formed, complete, and points where they belong."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from shardlib.errors import InfeasibleError
from shardlib.planner.scaling import ScalingCurve
from shardlib.report.pages import CURVE_BOX, curve_svg
from tests.planner.test_scaling import made_up

SVG = "{http://www.w3.org/2000/svg}"
CURVE = made_up(
    {1: InfeasibleError("<too & large>", short_bytes=2**30), 2: 8.0, 4: 4.0, 8: 3.9, 16: 3.8}
)


def circles(curve: ScalingCurve) -> list[tuple[float, float, str]]:
    root = ElementTree.fromstring(curve_svg(curve))
    return [
        (float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["style"])
        for c in root.iter(f"{SVG}circle")
    ]


def test_it_is_well_formed_and_fetches_nothing():
    text = curve_svg(CURVE)
    ElementTree.fromstring(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\(", text)


def test_points_lie_where_their_figures_say():
    points = circles(CURVE)
    assert len(points) == 4
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    assert max(steps) - min(steps) < 0.2 and steps[0] > 0  # doublings are equally far apart
    rates = [1000 / 8, 1000 / 4, 1000 / 3.9, 1000 / 3.8]
    doubling = points[0][1] - points[1][1]
    for (_, y, _), rate in zip(points, rates, strict=True):
        assert points[0][1] - y == pytest.approx(doubling * math.log2(rate / rates[0]), abs=0.2)


def test_points_that_do_not_pay_look_different_and_machines_that_lack_memory_are_crosses():
    points = circles(CURVE)
    assert points[0][2] == points[1][2] != points[2][2] == points[3][2]
    (cross,) = [
        g
        for g in ElementTree.fromstring(curve_svg(CURVE)).iter(f"{SVG}g")
        if g.attrib.get("class") == "lacks"
    ]
    assert f" {CURVE_BOX.bottom - 5} " in cross[0].attrib["d"]
    assert cross[1].text == "1 devices: lacks 1.00 GiB per device"


@pytest.mark.parametrize("times", [{1: 1.0}, {1: InfeasibleError("<a&b>")}, {8: 1.0, 16: 1.0}])
def test_short_curves(times: dict[int, float | Exception]):
    ElementTree.fromstring(curve_svg(made_up(times)))
