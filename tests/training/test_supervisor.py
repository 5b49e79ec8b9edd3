from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlib.processes.place import HUNG
from shardlib.training.run import RunFolder
from shardlib.training.supervisor import STOPPED, Budget, _passed_on, supervise

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


def test_a_stop_is_passed_on(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    program = (
        "import sys; from pathlib import Path; from shardlib.training.supervisor import supervise;"
        " from shardlib.training.run import RunFolder;sys.exit(supervise(sys.argv[2:],"
        " RunFolder(Path(sys.argv[1]))))"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            str(folder.path),
            sys.executable,
            "-c",
            RUN,
            str(folder.path),
            "wait",
            "5",
            "once",
        ]
    )
    end = time.monotonic() + 60
    while not (folder.path / "done").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == STOPPED
    beat = folder.heartbeats()
    assert folder.saved()[-1] == 5 and all(_gone(one.pid) for one in beat)


def test_what_is_passed_on_is_what_came():
    assert [
        _passed_on(reason) for reason in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT", "a colleague")
    ] == [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
def test_nobody_trains_on_without_its_supervisor(tmp_path: Path, number: signal.Signals):
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    program = (
        "import sys; from pathlib import Path; from shardlib.training.supervisor import supervise;"
        " from shardlib.training.run import RunFolder;sys.exit(supervise(sys.argv[2:],"
        " RunFolder(Path(sys.argv[1]))))"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            str(folder.path),
            sys.executable,
            "-c",
            RUN,
            str(folder.path),
            "wait",
            "5",
            "once",
        ]
    )
    end = time.monotonic() + 60
    while not ((folder.path / "done").exists() and folder.heartbeats()) and time.monotonic() < end:
        time.sleep(0.05)
    (beat,) = folder.heartbeats()
    assert not _gone(beat.pid)
    process.send_signal(number)
    assert process.wait(timeout=60) == (-signal.SIGKILL if number == signal.SIGKILL else STOPPED)
    end = time.monotonic() + 10
    while not _gone(beat.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert _gone(beat.pid)


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


def _gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
