"""The report in a real browser: opens fast without network and without a word on the console, by
mouse and by keyboard, light and dark, wide and narrow, and axe finds nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.questions import answers
from shardlib.report.pages import html_report
from tests.planner import worlds

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no browser on this machine", allow_module_level=True)

PIN = {"mesh.tensor": 2, "sequence_parallel": True}
#: Milliseconds in which a page opens, of a machine that does nothing else; tests run beside others.
SOON = 5000


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.search(worlds.layers(), topology("2*h100:4"), PIN)


@pytest.fixture(scope="module")
def page_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("report") / "plan.html"
    where.write_text(html_report(plan, answers=answers(plan, kernels=True)), encoding="utf-8")
    return where


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, file: Path, scheme: str = "light", width: int = 1100) -> tuple[Any, Any]:
    """The page and what it said on the console."""
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
    )
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    return page, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_it_opens_without_a_fault(browser, page_file, scheme, width):
    page, said = opened(browser, page_file, scheme, width)
    assert said == []
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < SOON
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe")
    found = axe.Axe().run(page).response["violations"]
    assert found == [], [(one["id"], one["nodes"][0]["html"]) for one in found]
    page.context.close()


def test_the_landscape_by_mouse_and_by_keyboard(browser, page_file, plan):
    page, said = opened(browser, page_file)
    points = page.locator("#landscape-picture .point")
    assert points.count() == len(plan.search.landscape)
    panel = page.locator("#landscape-panel")
    points.nth(1).hover(force=True)
    assert "per step" in panel.text_content() and "mesh" in panel.text_content()
    points.nth(1).click(force=True)
    assert page.locator("#landscape-compared th", has_text="chosen").count() == 1
    page.locator("#landscape-picture svg").focus()
    page.keyboard.press("Home")
    first = panel.text_content()
    best = min((p for p in plan.search.landscape), key=lambda p: p.step_seconds)
    assert str(best.mesh) in first
    page.keyboard.press("ArrowRight")
    assert panel.text_content() != first
    page.keyboard.press("Enter")
    assert page.locator("[aria-selected=true]").count() == 1
    choices = page.locator("#landscape-colour option").all_text_contents()
    page.select_option("#landscape-colour", index=len(choices) - 1)
    assert page.locator("#landscape-legend span").count() > 1
    assert said == []
    page.context.close()


def test_an_array_shows_the_shard_of_each_device(browser, page_file, plan):
    page, said = opened(browser, page_file)
    panel = page.locator("#array-panel")
    number, sharded = next(
        (i, p)
        for i, p in enumerate(plan.parameters)
        if "tensor" in p.compute.axes and all(size > 1 for size in p.shape)
    )
    button = page.locator(f"button[data-array='{number}']")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="in compute, after its gathers").click()
    dim = next(i for i, axes in enumerate(sharded.compute) if "tensor" in axes)
    half = sharded.shape[dim] // 2
    assert f"0 to {half - 1:,} of {sharded.shape[dim]:,}" in panel.text_content()
    page.locator("#device-tensor").focus()
    page.keyboard.press("ArrowRight")
    assert f"{half:,} to {sharded.shape[dim] - 1:,} of" in panel.text_content()
    assert said == []
    page.context.close()


def test_an_activation_before_and_after_its_gather(browser, page_file, plan):
    page, said = opened(browser, page_file)
    number, one = next(
        (i, one)
        for i, one in enumerate(plan.activations)
        for move in one.moves
        if move.kind == "all-gather"
    )
    page.select_option("#array-choose", label=one.name)
    panel, dim = page.locator("#array-panel"), one.held.index(("tensor",))
    size, half = one.shape[dim], one.shape[dim] // 2
    assert f"0 to {half - 1:,} of {size:,}" in panel.text_content()
    page.get_by_role("button", name="after its all-gather over tensor").click()
    assert f"all {size:,} of {one.colours[dim]}" in panel.text_content()
    assert "along tensor hold the same" in panel.text_content()
    row = page.locator(f"#activation-{number}")
    row.locator("a", has_text="all-gather over tensor").click()  # to the collective and back
    back = page.locator(f"tr:target a[href='#activation-{number}']")
    assert back.text_content() == one.name
    back.click()
    assert page.locator("tr:target").get_attribute("id") == f"activation-{number}"
    assert said == []
    page.context.close()


def test_partial_sums_are_said_to_be_different(browser, page_file, plan):
    page, said = opened(browser, page_file)
    name, move = next(
        (one.name, move)
        for one in plan.activations
        for move in one.moves
        if move.before and move.kind in ("reduce-scatter", "all-reduce")
    )
    page.select_option("#array-choose", label=name)
    page.get_by_role("button", name=f"before its {move.kind} over tensor").first.click()
    told = page.locator("#array-panel").text_content()
    assert "along tensor have different partial sums" in told
    assert "along tensor hold the same" not in told
    assert said == []
    page.context.close()
