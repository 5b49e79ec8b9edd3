"""The page looks as it did when somebody last looked at it: light and dark, wide and narrow."""

from __future__ import annotations

import json

import pytest

from tests.report.screenshots import (
    CHROMIUM,
    SHOTS,
    STORED,
    difference,
    stored,
    taken,
)

pytestmark = pytest.mark.long
pytest.importorskip("playwright.sync_api", reason="no Playwright")
Image = pytest.importorskip("PIL.Image", reason="no Pillow")
if CHROMIUM is None:
    pytest.skip("no browser on this machine", allow_module_level=True)
#: Share of pixels that may differ.
SAME = 0.001
AGAIN = "look at the page; if it is right, `python -m tests.report.screenshots`"
#: Faults that people would see, and a picture that shows them.
FAULTS = {
    "a figure is gone": "#memory figure { visibility: hidden }",
    "colours have changed": "#memory polygon { fill-opacity: 0.5 }",
    "the page is not dark": "body { background: #fff }",
    "a section has moved": "#why { padding-bottom: 1.5rem }",
}


@pytest.mark.parametrize(("scheme", "width"), SHOTS)
def test_it_looks_as_it_did(scheme: str, width: int):
    found, text = taken(scheme, width)
    if text != pytest.approx(json.loads((STORED / "text.json").read_text()), rel=0.005):
        pytest.skip("other fonts than those of the stored pictures")
    share = difference(found, Image.open(stored(scheme, width)).convert("RGB"))
    assert share <= SAME, f"{share:.1%} of the pixels differ; {AGAIN}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str):
    before, _ = taken("dark", 1100)
    after, _ = taken("dark", 1100, FAULTS[fault])
    assert difference(before, before) == 0
    assert difference(before, after) > SAME
