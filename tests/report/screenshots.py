"""Screenshots of the page, to be compared with those that are stored.

    python -m tests.report.screenshots    stores them anew; look at them before a commit

They are a quarter as wide as the page: what is compared is where things stand and what colours they
have, and not how letters are drawn. Where text is of another width than it was when they were
stored, the browser has other fonts, and nothing can be compared.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.report.fixture_page import page

STORED = Path(__file__).with_name("stored")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: (colour scheme, width of the window).
SHOTS = (("light", 1100), ("dark", 1100), ("light", 400))
#: Times that a stored picture is smaller.
SMALLER = 4
#: Pixels of text in the font of the page, in upright and in fixed-width letters.
TEXT = """() => ["system-ui", "monospace"].map((font) => {
    const context = document.createElement("canvas").getContext("2d");
    context.font = `100px ${font}`;
    return context.measureText("Sharded over fsdp, 61.7 GiB").width;
})"""


def taken(scheme: str, width: int, css: str = "") -> tuple[Any, list[float]]:
    """A picture of the page, and how wide text is in its fonts.

    Args:
        scheme: "light" or "dark".
        width: of the window, pixels.
        css: more style, to see whether it is noticed.
    """
    from PIL import Image
    from playwright.sync_api import sync_playwright

    file = Path(tempfile.mkdtemp()) / "plan.html"
    file.write_text(page().replace("</style>", f"{css}</style>", 1), encoding="utf-8")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
        )
        opened = context.new_page()
        opened.goto(file.as_uri())
        shot, text = opened.screenshot(full_page=True), opened.evaluate(TEXT)
        browser.close()
    shutil.rmtree(file.parent)
    whole = Image.open(io.BytesIO(shot)).convert("RGB")
    size = (whole.width // SMALLER, whole.height // SMALLER)
    return whole.resize(size, Image.Resampling.BOX), text


def difference(one: Any, other: Any) -> float:
    """Share of the pixels that differ by more than a shade; 1 where the sizes differ.

    Args:
        one, other: pictures.
    """
    from PIL import ImageChops

    if abs(one.height - other.height) > 4 or one.width != other.width:
        return 1.0
    size = (one.width, min(one.height, other.height))
    box = (0, 0, *size)
    change = ImageChops.difference(one.crop(box), other.crop(box)).convert("L")
    return sum(change.histogram()[24:]) / (size[0] * size[1])


def stored(scheme: str, width: int) -> Path:
    """Where a picture is stored."""
    return STORED / f"report-{scheme}-{width}.png"


def main() -> None:
    """Stores them."""
    STORED.mkdir(exist_ok=True)
    text: list[float] = []
    for scheme, width in SHOTS:
        picture, text = taken(scheme, width)
        picture.save(stored(scheme, width), optimize=True)
    (STORED / "text.json").write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
