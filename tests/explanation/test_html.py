"""The HTML report: well formed, self-contained, honest about sizes, safe against odd names."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from shardlib.explanation.html import html_report
from shardlib.hardware.topology import topology
from shardlib.planning import planner
from shardlib.planning.questions.questions import answers
from shardlib.planning.units.quantity import seconds_text
from tests.planning import worlds
from tests.planning.fixture_plan import PLAN

VOID = {"meta", "br", "img", "link", "input"}


class Balance(HTMLParser):
    """Fails on a closing tag that does not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def test_tags_balance():
    parser = Balance()
    parser.feed(html_report(PLAN))
    parser.close()
    assert parser.open == []


def test_nothing_is_fetched():
    assert not re.search(r"https?://|<script|<link|@import|url\(", html_report(PLAN))


def test_bars_cover_the_whole_and_are_proportional():
    bars = re.findall(r"<svg.*?</svg>", html_report(PLAN), re.DOTALL)
    widths = [
        [float(width) for width in re.findall(r' width="([\d.]+)" height', svg)] for svg in bars
    ]
    assert [sum(bar) for bar in widths] == pytest.approx([1000, 1000], abs=0.1)
    seconds = PLAN.estimate.seconds
    assert widths[0][0] == pytest.approx(1000 * seconds.compute / seconds.total, abs=0.01)


def test_names_are_escaped():
    page = html_report(replace(PLAN, model="<b>&evil"))
    assert "<title>&lt;b&gt;&amp;evil on 2*h100:8</title>" in page and "<b>&evil" not in page


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
    plan = planner.search(load.problem, topology("2*h100:4"), {"mesh.tensor": 4}, load=load)
    page = html_report(plan, answers=answers(plan, alternatives=True, sensitivity=True))
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    for text in (
        "<h2>Alternatives</h2>",
        "<h2>What holds the plan back</h2>",
        "<h2>What more would buy</h2>",
        "The pin on mesh.tensor costs",
        "NVLink bandwidth -10.0%",
        plan.alternatives(1)[0].summary,
    ):
        assert text in page
    assert "<h2>Alternatives</h2>" not in html_report(plan)
