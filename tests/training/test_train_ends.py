"""`shardlib train` as a shell sees it: how it ends, and that another one keeps off its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlib.training.measures import read_lines
from shardlib.training.run import RunFolder
from tests.processes import ROOT

CARD = (
    "vocab_size = 256\nlayers = 1\nembed = 16\nheads = 2\nkv_heads = 2\nhead_dim = 8\nmlp ="
    " 16\nmax_seq = 32\ntied = true\ncompute_dtype = 'float32'\n"
)


def started(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    (tmp_path / "card.toml").write_text(CARD)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and looked at the rat\n" * 3000)
    words = [
        "train",
        "--data",
        str(tmp_path / "text.txt"),
        "--model",
        str(tmp_path / "card.toml"),
        "--steps",
        "1000000",
        "--batch",
        "4",
        "--seq",
        "16",
        "--sample-bytes",
        "0",
        "--topology",
        "cpu:1",
        "--quiet",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "shardlib", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def trains(folder: RunFolder, process: subprocess.Popen[str]) -> bool:
    end = time.monotonic() + 200
    while (
        not (folder.metrics.exists() and len(read_lines(folder.metrics).records) > 5)
        and process.poll() is None
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    return process.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_it_saves_and_says_so_and_shows_no_error(tmp_path: Path, number: signal.Signals):
    folder = RunFolder(tmp_path / "run")
    process = started(tmp_path, "--run", str(folder.path))
    assert trains(folder, process), process.communicate()
    if number == signal.SIGINT:
        before = {
            path: path.stat().st_ino
            for path in folder.checkpoints.iterdir()
            if path.name.isdigit()  # what is still being written gets its name later
        }
        other = started(tmp_path, "--run", str(folder.path))
        _, errors = other.communicate(timeout=200)
        assert (
            other.returncode == 2
            and f"{folder.path} is another process's to write: process {process.pid} on " in errors
        )
        assert (
            before.items()
            <= {path: path.stat().st_ino for path in folder.checkpoints.iterdir()}.items()
            and process.poll() is None
        )
    process.send_signal(number)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 75
    (last,) = errors.splitlines()[-1:]
    assert (
        last.startswith(f"{number.name} ended the run after step ")
        and last.endswith(f"it is saved in {folder.path}")
        and "error" not in errors
        and "Traceback" not in out + errors
    )
    records = read_lines(folder.metrics)
    assert records.unread == 0 and folder.saved()[-1] == max(
        record["step"] for record in records.records
    )


@pytest.mark.long
def test_without_a_folder_ctrl_c_leaves_no_error(tmp_path: Path):
    process = started(tmp_path)
    process.send_signal(signal.SIGCONT)
    end = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < end and not _threads(process.pid):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        out, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert (
        process.returncode == 130
        and "Traceback" not in errors
        and "error" not in errors
        and "Aborted" not in out + errors
    )


def _threads(pid: int) -> bool:
    """Whether JAX runs: its devices have threads."""
    return len(os.listdir(f"/proc/{pid}/task")) > 8
