"""Times are compared with a prediction where the machine was quiet."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardlib.training import measures
from shardlib.training.display import figures_table
from shardlib.training.measures import Busy
from shardlib.training.settings import Figures


def stat(path: Path, work: int, idle: int) -> None:
    path.write_text(f"cpu  {work} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")


def test_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = [0.0]
    monkeypatch.setattr(measures, "STAT", tmp_path / "stat")
    monkeypatch.setattr(measures, "EVERY", 0.0)
    monkeypatch.setattr(os, "times", lambda: os.times_result((own[0], 0.0, 0.0, 0.0, 0.0)))
    stat(tmp_path / "stat", 1000, 1000)
    found = Busy()
    stat(tmp_path / "stat", 1500, 1500)
    own[0] = 400 / os.sysconf("SC_CLK_TCK")
    assert found.share() == found.recent() == pytest.approx(0.1)
    stat(tmp_path / "stat", 2500, 1500)
    assert found.share() == pytest.approx(1100 / 2000) and found.recent() == pytest.approx(1.0)
    assert Busy(alone=False).share() is None
    (tmp_path / "stat").write_text("nothing of the kind")
    assert found.share() is None and Busy().share() is None


def test_the_machine_itself_says_it():
    found = Busy()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    share = found.share()
    assert share is None or 0 <= share <= 1


@pytest.mark.parametrize(
    ("share", "ratios"),
    [(0.02, ["2.00", "0.50", "3.00"]), (None, ["2.00", "0.50", "3.00"]), (0.6, ["-", "-", "3.00"])],
)
def test_times_beside_other_programs_are_not_compared(share: float | None, ratios: list[str]):
    shown = io.StringIO()
    Console(file=shown, width=120).print(
        figures_table(
            Figures(step_seconds=1.0, tokens_per_second=8.0, device_bytes=1 << 20),
            Figures(step_seconds=2.0, tokens_per_second=4.0, device_bytes=3 << 20),
            share,
        )
    )
    assert [
        line.split("│")[-2].strip().rpartition(" ")[2]
        for line in shown.getvalue().splitlines()
        if line.startswith("│")
    ] == ratios
