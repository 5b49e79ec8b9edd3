"""The HTML report: well formed, self-contained, honest about sizes, safe against odd names."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields, replace
from html import unescape

import numpy as np
import pytest

from shardlib.layout import MeshShape
from shardlib.machines.topology import device_order, topology
from shardlib.planner import search as planner
from shardlib.planner.questions import answers
from shardlib.report.elements import seconds_text
from shardlib.report.pages import (
    Evidence,
    causes,
    html_report,
    machine_picture,
    memory_picture,
    step_picture,
)
from shardlib.report.text import LABELS, lanes, parameter_rows
from tests.planner import worlds
from tests.planner.fixture_plan import PLAN
from tests.report.fixture_page import page, text_of


def test_tags_balance():
    text_of(html_report(PLAN))
    assert "input of layers.mlp.up" in text_of(page())


def test_data_and_names_cannot_leave_their_element():
    page = html_report(replace(PLAN, parameters=(replace(PLAN.parameters[0], path="</script>x"),)))
    assert page.count("</script>") == 2
    page = html_report(replace(PLAN, model="<b>&evil"))
    assert "<title>&lt;b&gt;&amp;evil on 2*h100:8</title>" in page
    assert "<b>&evil" not in page


def test_the_grid_of_a_notebook_has_the_layouts_of_every_array():
    html = PLAN.grid()._repr_html_()
    page = unescape(re.search(r'srcdoc="([^"]*)"', html).group(1))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    stored = {p.path: [list(axes) for axes in p.rest] for p in PLAN.parameters}
    shown = {one["name"]: one["forms"] for one in data["arrays"] if one["group"] == "parameters"}
    assert shown and all(forms[0]["dims"] in stored.values() for forms in shown.values())
    held = [one for one in data["arrays"] if one["group"] == "activations"]
    assert [one["name"] for one in held] == [one.name for one in PLAN.activations]
    assert repr(PLAN.grid()) == "Frame(height=460)"


def test_nothing_is_fetched():
    page = html_report(PLAN).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|@import|url\(|<script[^>]* src|fetch\(|XMLHttp", page)
    assert re.findall(r'(?:href|src)="(?!#)([^"]*)"', page) == ["data:,"]


def rects(picture: str) -> list[tuple[float, float, str]]:
    """(x, width, what it says) of the rectangles of a picture."""
    return [
        (float(x), float(width), text)
        for x, width, text in re.findall(
            r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*><title>([^<]*)</title>', picture
        )
    ]


def test_the_bar_of_a_step_is_proportional_and_covers_it():
    seconds, found = PLAN.estimate.seconds, rects(step_picture(PLAN).shapes)
    parts = [
        next(one for one in found if one[2].startswith(f"{LABELS.get(field.name, field.name)}: "))
        for field in fields(seconds)
        if getattr(seconds, field.name) > 0.001 * seconds.total
    ]
    scale = parts[0][1] / seconds.compute
    for (x, width, _), (after, _, _) in itertools.pairwise(parts):
        assert x + width == pytest.approx(after, abs=0.3)
    assert sum(width for _, width, _ in parts) == pytest.approx(seconds.total * scale, rel=0.01)


def test_exposed_and_hidden_add_up_to_what_the_estimate_says():
    found = lanes(PLAN)
    everything = sum(c.seconds for c in PLAN.estimate.collectives)
    assert sum(lane.row.seconds for lane in found) == pytest.approx(everything)
    exposed = min(PLAN.estimate.seconds.exposed, everything)
    assert sum(lane.exposed for lane in found) == pytest.approx(exposed)
    assert all(0 <= lane.exposed <= lane.row.seconds * (1 + 1e-9) for lane in found)


@pytest.mark.parametrize(
    ("where", "mesh"),
    [("2*h100:8", {"fsdp": 4, "tensor": 4}), ("v5e:4x4", {"fsdp": 4, "tensor": 4})],
)
def test_devices_are_drawn_where_jax_puts_them(where, mesh):
    machine, shape = topology(where), MeshShape(mesh)
    order = device_order(shape, machine)
    assert order is not None
    drawn, rows = machine_picture(shape, machine)
    assert drawn is not None
    said = dict(re.findall(r"<title>device (\d+): ([^<]*)</title>", drawn.shapes))
    assert len(said) == 16 and rows
    for at, number in np.ndenumerate(order.reshape(tuple(shape[axis] for axis in shape))):
        text = ", ".join(f"{axis} {i}" for axis, i in zip(shape, at, strict=True))
        assert said[str(int(number))] == text


def test_collectives_and_parameters_name_each_other():
    rows = parameter_rows(PLAN.parameters)
    page = html_report(PLAN)
    for number, (_, parameters) in enumerate(causes(PLAN, rows)):
        for parameter in parameters:
            assert f'href="#parameter-{parameter}"' in page
            assert f'href="#collective-{number}"' in page
    ids = set(re.findall(r' id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= ids
    gathers = [
        p for row, p in causes(PLAN, rows) if row.kind == "all-gather" and "fsdp" in row.axes
    ]
    assert gathers and all(gathers)


def test_compiled_figures_stand_beside_the_predicted_ones():
    peak = PLAN.estimate.device_bytes.peak
    compiled = Evidence(source="compiled", peak_bytes=round(peak * 1.1))
    page = html_report(PLAN, evidence=[compiled])
    assert "Predicted, compiled, measured" in page and "(+10.0%)" in page


def test_every_decision_and_parameter_is_there():
    page = html_report(PLAN)
    for text in (
        "fsdp=4 x tensor=4",
        "layers.*.mlp.up.kernel",
        "[embed_fsdp, mlp_tensor]",
        seconds_text(PLAN.estimate.step_seconds),
        "data=16",
        PLAN.digest,
    ):
        assert text in page


@pytest.mark.long
def test_answers_are_sections_of_their_own():
    load = worlds.prepared(worlds.mlp, batch=4096, embed=1024, hidden=4096)
    plan = planner.search(load.problem, topology("2*h100:4"), {"mesh.tensor": 1}, workload=load)
    page = html_report(
        plan, answers=answers(plan, alternatives=True, sensitivity=True, kernels=True)
    )
    text_of(page)
    for text in (
        ">Alternatives</h2>",
        ">What holds the plan back</h2>",
        ">Value of more memory and faster links</h2>",
        ">Kernels</h2>",
        "The pin on mesh.tensor costs",
        "NVLink bandwidth -10.0%",
        plan.alternatives(1)[0].summary,
    ):
        assert text in page
    assert ">Alternatives</h2>" not in html_report(plan)


@pytest.mark.parametrize(
    ("usable", "words"), [(64, "a plan may fill 64.0 GiB<"), (2048, "2.00 TiB, far")]
)
def test_memory_fills_its_picture_however_much_a_device_has(usable, words):
    parts = PLAN.estimate.device_bytes
    drawn = memory_picture(parts, usable * 2**30).shapes
    assert words in drawn
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", drawn)]
    assert max(heights) - min(heights) > 230 / 5  # of the height of the picture
