"""Values in one line, and as cards in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from shardlib.exchanges import EXACT, RANK_FOUR, DiLoCo
from shardlib.machines.topology import topology
from shardlib.report.elements import card
from shardlib.serve.search import plan_served
from tests.planner.fixture_plan import PLAN
from tests.serve.small_jobs import asked

VOID = frozenset({"br", "meta", "rect", "circle", "path", "polyline", "i"})


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order; nothing comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> str:
    found = Balance()
    found.feed(html)
    assert not found.open and len(html) < 60_000
    return " ".join(found.text)


@pytest.fixture(scope="module")
def serving():
    return plan_served(asked("llama3-8b", "v5e:4x4"))


def test_lines_are_short(serving):
    for value in (PLAN, serving):
        assert len(repr(value)) < 200 and "\n" not in repr(value)
    assert repr(PLAN).startswith(f"<Plan {PLAN.model} on {PLAN.topology}")


def test_a_plan_as_a_card_says_what_its_text_says():
    text = read(PLAN._repr_html_())
    for line in PLAN.explain().splitlines()[:2]:
        assert line in text
    assert "time of a step" in text and "memory of a device" in text


def test_a_serving_plan_shows_its_curve(serving):
    html = serving._repr_html_()
    text = read(html)
    assert html.count("<circle") == len(serving.pareto())
    assert "tokens/s a chip" in text and html.count('r="6"') == 1


def test_what_a_user_names_is_text_and_no_html():
    assert "<script>" not in card("<script>", ["<b>"], rows=[["<i>", "x"]], text="<u>")


@pytest.mark.parametrize(
    "value",
    [topology("2*h100:8"), topology("v5e:4x8"), DiLoCo(islands=2, every=100), EXACT, RANK_FOUR],
)
def test_machines_and_exchanges_are_tables(value):
    assert "\n" not in repr(value) and len(repr(value)) < 200
    if hasattr(value, "_repr_html_"):
        assert read(value._repr_html_())


def test_a_machine_says_its_links():
    text = read(topology("2*h100:8")._repr_html_())
    assert "16 devices" in text and "InfiniBand" in text and "450.0 GB/s" in text
