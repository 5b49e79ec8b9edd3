"""Size of the page of a plan, time until it is open, and faults that axe finds.

    python -m benchmarks report_in_browser --out benchmarks/results/report_in_browser.json

The plan is that of Llama 3 405B on 2048*h100:8, data 4 x fsdp 256 x tensor 16, and the best one.
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

import shardlib
from benchmarks.environment import command_line
from shardlib.cli.inputs import inputs_of

PINS = {
    "data=4 x fsdp=256 x tensor=16": {"mesh": {"data": 4, "fsdp": 256, "tensor": 16}},
    "best": {},
}
SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def looked_at(file: Path, times: int) -> dict[str, Any]:
    """Milliseconds to the load event, what the console says, whether the page is wider than its
    window, and what axe finds.
    """
    opened: list[float] = []
    said: list[str] = []
    faults: set[str] = set()
    sideways = False
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for number in range(times):
            for scheme in ("light", "dark"):
                width = 390 if number % 2 else 1100
                context = browser.new_context(
                    color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
                )
                page = context.new_page()
                page.on("console", lambda message: said.append(message.text))
                page.on("pageerror", lambda error: said.append(str(error)))
                page.goto(file.as_uri())
                opened.append(page.evaluate(LOADED))
                sideways |= page.evaluate(SIDEWAYS)
                faults |= {one["id"] for one in Axe().run(page).response["violations"]}
                context.close()
        browser.close()
    return {
        "kilobytes": round(file.stat().st_size / 1000),
        "load_ms": {"median": round(statistics.median(opened)), "most": round(max(opened))},
        "console": said,
        "scrolls_sideways": sideways,
        "axe": sorted(faults),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="store the figures")
    parser.add_argument("--times", type=int, default=4, help="how often each page is opened")
    options = parser.parse_args()
    inputs = inputs_of("llama3-405b", 2048, 8192)
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name, pin in PINS.items():
        plan = shardlib.plan(**inputs, topology="2048*h100:8", pin=pin)
        file = plan.show(Path(tempfile.mkdtemp()) / "plan.html", browser=False)
        found[name] = looked_at(file, options.times)
        print(name, found[name])
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
