from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardlib.processes.place import HUNG, Heartbeat, Observer, Watchdog, read_heartbeat

HANG = """
import sys, threading, time
from pathlib import Path
from shardlib.processes.place import Watchdog

def stuck_in_a_collective():
    threading.Event().wait()

with Watchdog(Path(sys.argv[1]), rank=3, seconds=0.5).phase("step", 41):
    stuck_in_a_collective()
"""


def test_a_hang_ends_the_process_and_says_where(tmp_path: Path):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path / "rank-3.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == HUNG and time.monotonic() - begin < 30
    assert (
        "error: rank 3 (process " in done.stderr
        and "has been in the phase 'step' of step 42 for " in done.stderr
    )
    assert "stuck_in_a_collective" in done.stderr
    beat = read_heartbeat(tmp_path / "rank-3.json")
    assert beat is not None and (beat.rank, beat.step, beat.phase) == (3, 41, "step")


@pytest.mark.long
def test_phases_and_patience(tmp_path: Path):
    told: list[str] = []
    watchdog = Watchdog(tmp_path / "rank-0.json", seconds=2.0, on_hang=told.append)
    with watchdog.phase("compile", patience=10):
        time.sleep(2.6)
        beat = read_heartbeat(tmp_path / "rank-0.json")
        assert (
            beat is not None
            and beat.phase == "compile"
            and beat.pid == os.getpid()
            and 0 < beat.lasts < 5
            and beat.number >= 2
        )
    for step in range(4):
        with watchdog.phase("step", step):
            time.sleep(0.6)
    assert told == []
    with watchdog.phase("step", 4):
        time.sleep(4.0)
    watchdog.close()
    ended = read_heartbeat(tmp_path / "rank-0.json")
    assert ended is not None and ended.phase == "ended"
    assert len(told) == 1 and "longer than the 2 s that it may take" in told[0]


def test_files_that_are_no_heartbeat(tmp_path: Path):
    for text in ("", "{", "[]", '{"rank": 0}'):
        (tmp_path / "beat.json").write_text(text)
        assert read_heartbeat(tmp_path / "beat.json") is None
    assert read_heartbeat(tmp_path / "none.json") is None


@pytest.mark.long
def test_a_clock_that_is_set_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor does one that is set back hide a hang."""
    told: list[str] = []
    watchdog = Watchdog(tmp_path / "rank-0.json", seconds=3.0, on_hang=told.append)
    real = time.time
    with watchdog.phase("step", 1):
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        time.sleep(1.5)
    assert told == []
    with watchdog.phase("step", 2):
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        time.sleep(5.5)
    watchdog.close()
    assert len(told) == 1 and "of step 3 for " in told[0]


def test_whoever_watches_goes_by_its_own_clock():
    now = [100.0]
    observer = Observer(lambda: now[0])
    beat = Heartbeat(
        rank=0,
        host="h",
        pid=1,
        step=0,
        phase="step",
        lasts=0.0,
        number=1,
        boot="another",
        clock=1e9,
    )
    assert observer.silent(0, None) == 0 and beat.age() is None
    now[0] += 7
    assert observer.silent(0, None) == 7 and observer.silent(0, beat) == 0
    now[0] += 5
    assert (
        observer.silent(0, replace(beat, clock=-1e9)) == 5
        and observer.silent(0, replace(beat, number=2)) == 0
    )
