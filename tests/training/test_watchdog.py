from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from shardlib.training.watchdog import HUNG, Watchdog, read_heartbeat

HANG = """
import sys, threading, time
from pathlib import Path
from shardlib.training.watchdog import Watchdog

def stuck_in_a_collective():
    threading.Event().wait()

with Watchdog(Path(sys.argv[1]), rank=3, seconds=0.5).phase("step", 41):
    stuck_in_a_collective()
"""


def test_a_hang_ends_the_process_and_says_where(tmp_path: Path):
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANG, str(tmp_path / "rank-3.json")], capture_output=True, text=True, timeout=60)
    assert done.returncode == HUNG and time.monotonic() - begin < 30
    assert "error: rank 3 (process " in done.stderr and "has been in the phase 'step' of step 42 for " in done.stderr
    assert "stuck_in_a_collective" in done.stderr
    beat = read_heartbeat(tmp_path / "rank-3.json")
    assert beat is not None and (beat.rank, beat.step, beat.phase) == (3, 41, "step")


def test_phases_and_patience(tmp_path: Path):
    told: list[str] = []
    watchdog = Watchdog(tmp_path / "rank-0.json", seconds=2.0, on_hang=told.append)
    with watchdog.phase("compile", patience=10):
        time.sleep(2.6)
        beat = read_heartbeat(tmp_path / "rank-0.json")
        assert beat is not None and beat.phase == "compile" and beat.pid == os.getpid() and 0 < beat.written - beat.since < 5
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
