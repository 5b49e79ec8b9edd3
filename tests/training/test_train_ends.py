"""`shardlib train` as a shell sees it: how it ends, and that another one keeps off its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardlib.processes.place import HUNG, Heartbeat, Observer, Watchdog, read_heartbeat
from shardlib.training.measures import read_lines
from shardlib.training.run import RunFolder
from shardlib.training.supervisor import STOPPED, Budget, _passed_on, supervise
from tests.processes import alive, child, python, until

CARD = (
    "vocab_size = 256\nlayers = 1\nembed = 16\nheads = 2\nkv_heads = 2\nhead_dim = 8\nmlp ="
    " 16\nmax_seq = 32\ntied = true\ncompute_dtype = 'float32'\n"
)


def started(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    (tmp_path / "card.toml").write_text(CARD)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and looked at the rat\n" * 3000)
    words = [
        *(
            f"train --data {tmp_path / 'text.txt'} --model {tmp_path / 'card.toml'} --steps "
            "1000000 --batch 4 --seq 16 --sample-bytes 0 --topology cpu:1 --quiet"
        ).split(),
        *more,
    ]
    return child("-m", "shardlib", *words, start_new_session=True)


def trains(folder: RunFolder, process: subprocess.Popen[str]) -> bool:
    until(
        lambda: (
            (folder.metrics.exists() and len(read_lines(folder.metrics).records) > 5)
            or process.poll() is not None
        ),
        200,
    )
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
        assert other.returncode == 2
        assert f"{folder.path} is another process's to write: process {process.pid} on " in errors
        assert (
            before.items()
            <= {path: path.stat().st_ino for path in folder.checkpoints.iterdir()}.items()
        )
        assert process.poll() is None
    process.send_signal(number)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 75
    (last,) = errors.splitlines()[-1:]
    assert last.startswith(f"{number.name} ended the run after step ")
    assert last.endswith(f"it is saved in {folder.path}")
    assert "error" not in errors
    assert "Traceback" not in out + errors
    records = read_lines(folder.metrics)
    assert records.unread == 0 and folder.saved()[-1] == max(
        record["step"] for record in records.records
    )


@pytest.mark.long
def test_without_a_folder_ctrl_c_leaves_no_error(tmp_path: Path):
    process = started(tmp_path)
    process.send_signal(signal.SIGCONT)
    until(lambda: process.poll() is not None or _threads(process.pid), 200)
    process.send_signal(signal.SIGINT)
    try:
        out, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "error" not in errors
    assert "Aborted" not in out + errors


def _threads(pid: int) -> bool:
    """Whether JAX runs: its devices have threads."""
    return len(os.listdir(f"/proc/{pid}/task")) > 8


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
    done = python("-c", HANG, str(tmp_path / "rank-3.json"), check=False)
    assert done.returncode == HUNG
    assert "error: rank 3 (process " in done.stderr
    assert "has been in the phase 'step' of step 42 for " in done.stderr
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
        assert beat is not None
        assert beat.phase == "compile"
        assert beat.pid == os.getpid()
        assert 0 < beat.lasts < 5
        assert beat.number >= 2
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
    assert observer.silent(0, replace(beat, clock=-1e9)) == 5
    assert observer.silent(0, replace(beat, number=2)) == 0


#: A run without JAX: ten steps, each of which makes a checkpoint; what goes wrong at a step, once
#: or always, is said on the command line.
RUN = """
import os, signal, sys, time
from pathlib import Path
from shardlib.processes.place import Watchdog
folder, fault, at, once = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "once"
watchdog = Watchdog(folder / "heartbeat" / "rank-3.json", rank=3, seconds=1.0 if fault == "hang" else None)
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
begin = max([int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()], default=0)
print("begin at", begin, flush=True)
for step in range(begin, 10):
    if step == at and not (once and (folder / "done").exists()):
        (folder / "done").touch()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "freeze":
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "error":
            raise SystemExit("RESOURCE_EXHAUSTED: out of memory" if once else "no such luck")
        if fault == "wait":
            while not stop:
                time.sleep(0.05)
        with watchdog.phase("step", step):
            time.sleep(1000 if fault == "hang" else 0)
    if stop:
        raise SystemExit(75)
    (folder / "checkpoints" / str(step + 1)).mkdir()
"""


def supervised(
    tmp_path: Path, fault: str, at: int, once: bool = True, **budget: float
) -> tuple[int, list[str], RunFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    said: list[str] = []
    code = supervise(
        [sys.executable, "-c", RUN, str(folder.path), fault, str(at), "once" if once else "always"],
        folder,
        say=said.append,
        budget=Budget(**{"wait_seconds": 0.05, "silent_seconds": 4.0, "restarts": 2, **budget}),
    )  # pyright: ignore[reportArgumentType]
    return code, said, folder


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill", "was killed (SIGKILL: by somebody, or by the system for lack of memory)"),
        ("hang", "hung, and ended itself"),
        ("freeze", "gave no sign of life for 4 s and was killed"),
        ("error", "ran out of device memory (exit code 1)"),
    ],
)
def test_it_goes_on_after(tmp_path: Path, fault: str, why: str):
    code, said, folder = supervised(tmp_path, fault, at=4)
    assert code == 0 and folder.saved() == tuple(range(1, 11))
    assert said == [
        f"the training process {why}; the newest checkpoint is of step 4",
        "starting it again (1 of 2 without a new checkpoint)",
    ]


def test_a_run_that_cannot_go_on_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code, said, folder = supervised(tmp_path, "error", at=3, once=False)
    assert code == 1 and folder.saved() == (1, 2, 3)
    assert said[-1].splitlines() == [
        (
            "it failed 3 times without a new checkpoint, so the run ends; the last lines of the"
            " process:"
        ),
        "no such luck",
    ]
    assert capfd.readouterr().out.split() == [
        "begin",
        "at",
        "0",
        "begin",
        "at",
        "3",
        "begin",
        "at",
        "3",
    ]
    assert "wait" not in said[0] and len(said) == 6


def test_hangs_for_ever_have_the_code_of_a_hang(tmp_path: Path):
    assert supervised(tmp_path, "hang", at=0, once=False, restarts=0)[0] == HUNG


def _supervisor(tmp_path: Path) -> tuple[RunFolder, subprocess.Popen[str]]:
    """A supervisor in a process of its own, whose run waits after its fifth step."""
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    program = (
        "import sys; from pathlib import Path; from shardlib.training.supervisor import supervise;"
        " from shardlib.training.run import RunFolder;sys.exit(supervise(sys.argv[2:],"
        " RunFolder(Path(sys.argv[1]))))"
    )
    words = (sys.executable, "-c", RUN, folder.path, "wait", "5", "once")
    return folder, child("-c", program, folder.path, *words, stdout=None, stderr=None)


def test_a_stop_is_passed_on(tmp_path: Path):
    folder, process = _supervisor(tmp_path)
    until((folder.path / "done").exists)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == STOPPED
    beat = folder.heartbeats()
    assert folder.saved()[-1] == 5 and not any(alive(one.pid) for one in beat)


def test_what_is_passed_on_is_what_came():
    assert [
        _passed_on(reason) for reason in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT", "a colleague")
    ] == [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
def test_nobody_trains_on_without_its_supervisor(tmp_path: Path, number: signal.Signals):
    folder, process = _supervisor(tmp_path)
    until(lambda: (folder.path / "done").exists() and folder.heartbeats())
    (beat,) = folder.heartbeats()
    assert alive(beat.pid)
    process.send_signal(number)
    assert process.wait(timeout=60) == (-signal.SIGKILL if number == signal.SIGKILL else STOPPED)
    until(lambda: not alive(beat.pid))


@pytest.mark.long
def test_clocks_that_are_set_kill_nobody_and_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The wall clock runs an hour ahead, then an hour behind, from one look to the next."""
    real, jumps = time.time, iter([*([3600.0, -3600.0, 7200.0] * 10_000)])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    code, said, folder = supervised(tmp_path, "none", at=99)
    assert code == 0 and said == [] and folder.saved() == tuple(range(1, 11))
    code, said, folder = supervised(tmp_path / "other", "freeze", at=4)
    assert code == 0 and said[0].startswith(
        "the training process gave no sign of life for 4 s and was killed"
    )
