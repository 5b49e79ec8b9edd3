from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlib.errors import LaunchError
from shardlib.launch import local as watching
from shardlib.launch.local import Local, launch
from shardlib.processes.console import Lines, address_of
from shardlib.processes.place import HUNG
from shardlib.training.run import RunFolder
from shardlib.training.supervisor import STOPPED, Budget
from tests.processes import alive, child, until

ROOT = Path(__file__).parents[2]
#: One of several processes of a run without JAX: ten steps, each of which process 0 saves; one
#: process has a fault at one step, once or always.
RUN = """
import os, signal, sys, time
from pathlib import Path
from shardlib.processes.place import Watchdog
folder, fault, who, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
once = sys.argv[5] == "once"
names = ("PROCESS", "HOST_PROCESS", "PROCESSES")
rank, place, count = (os.environ["SHARDLIB_" + name] for name in names)
watchdog = Watchdog(Path(os.environ["SHARDLIB_HEARTBEATS"]) / f"rank-{rank}.json", rank=int(rank))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
saved = [path.name for path in (folder / "checkpoints").iterdir()]
begin = max([int(name) for name in saved if name.isdigit()], default=0)
print(f"place {place} of {count} begins at {begin}", flush=True)
(folder / f"began-{rank}").touch()
done = folder / "done"
again = once and done.exists() and done.read_text() != os.environ["SHARDLIB_START"]
for step in range(begin, 10):
    if place == who and step >= at and not again:
        (folder / "done").write_text(os.environ["SHARDLIB_START"])
        while not (folder / "began-0").exists():
            time.sleep(0.02)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "freeze":
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.isdigit():
            print("no such luck", file=sys.stderr, flush=True)
            os._exit(int(fault))
    # As in a collective that one does not come to.
    while step >= at and not again and int(who) < int(count) and not stop:
        time.sleep(0.05)
    if stop:
        raise SystemExit(75)
    if rank == "0":
        (folder / "checkpoints" / str(step + 1)).mkdir(exist_ok=True)
watchdog.close()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left have half a second."""
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.5)


def launched(
    tmp_path: Path,
    fault: str,
    who: int = 1,
    at: int = 4,
    once: bool = True,
    processes: int = 2,
    elastic: bool = False,
    **budget: float,
) -> tuple[int, str, str]:
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    out, err = io.StringIO(), io.StringIO()
    words = (str(folder.path), fault, str(who), str(at), "once" if once else "always")
    local = Local(
        command=(sys.executable, "-c", RUN, *words),
        processes=processes,
        run=str(folder.path),
        elastic=elastic,
        budget=Budget(**{"wait_seconds": 0.05, "silent_seconds": 3.0, "restarts": 2, **budget}),
    )  # pyright: ignore[reportArgumentType]
    return (
        launch(
            local,
            lines=Lines(processes, out=out, err=err),
            environ={**os.environ, "PYTHONPATH": str(ROOT)},
        ),
        out.getvalue(),
        err.getvalue(),
    )


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill", "was killed (SIGKILL: by somebody, or by the system for lack of memory)"),
        ("freeze", "gave no sign of life for "),
        ("9", "failed with exit code 9"),
    ],
)
def test_the_one_that_fails_is_named_and_all_go_on(tmp_path: Path, fault: str, why: str):
    code, out, err = launched(tmp_path, fault)
    assert code == 0 and RunFolder(tmp_path / "run").saved()[-1] == 10
    assert (
        f"process 1 of 2 {why}" in err
        and "; ending the 1 that is left\n" in err
        and "starting it again (1 of 2 without a new checkpoint)" in err
    )
    begun = sorted(out.splitlines())
    assert (
        begun[0] == "[0] place 0 of 2 begins at 0"
        and len(begun) == 4
        and all(line[:4] in ("[0] ", "[1] ") for line in begun)
    )


@pytest.mark.long
def test_the_code_of_the_first_that_fails_is_that_of_all(tmp_path: Path):
    code, _, err = launched(tmp_path, "9", once=False, at=0, restarts=0)
    assert code == 9 and "[1] no such luck\n" in err and "starting it again" not in err
    assert launched(tmp_path / "hangs", "freeze", once=False, at=0, restarts=0)[0] == HUNG


def test_a_mistake_is_not_repeated(tmp_path: Path):
    code, _, err = launched(tmp_path, "2", at=0, once=False)
    assert (
        code == 2
        and "process 1 of 2 failed with exit code 2: a mistake that another start would not mend"
        in err
        and "starting it again" not in err
    )


def test_an_elastic_run_goes_on_without_a_place_that_fails(tmp_path: Path):
    code, out, err = launched(tmp_path, "9", who=2, at=0, once=False, processes=4, elastic=True)
    assert (
        code == 0
        and "place 2 of this machine failed 2 times in a row: going on with 2 of 4 processes" in err
    )
    assert sorted(out.splitlines())[-2:] != [] and {
        line[4:15] for line in out.splitlines() if " of 2 begins" in line
    } == {"place 0 of ", "place 1 of "}


def started(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """A launcher in a process of its own, once all of its processes have begun."""
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "none"})
    words = words or (sys.executable, "-c", RUN, str(folder.path), "wait", "0", "0", "once")
    return child("-m", "shardlib", "launch", "--processes", "2", "--", *words)


def waited(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths))


def test_a_stop_is_passed_on(tmp_path: Path):
    process = started(tmp_path)
    waited(tmp_path / "run" / "began-0", tmp_path / "run" / "began-1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == STOPPED
    out, err = process.communicate()
    assert (
        sorted(out.splitlines()) == ["[0] place 0 of 2 begins at 0", "[1] place 1 of 2 begins at 0"]
        and err == ""
    )


@pytest.mark.long
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path):
    """Neither its processes nor what those have started."""
    begin = (
        f"sleep 1000 & echo $! > {tmp_path}/second-$SHARDLIB_PROCESS; echo $$ >"
        f" {tmp_path}/first-$SHARDLIB_PROCESS; wait"
    )
    process = started(tmp_path, "bash", "-c", begin)
    files = [tmp_path / f"{name}-{number}" for name in ("first", "second") for number in range(2)]
    waited(*files)
    time.sleep(0.2)
    pids = [int(path.read_text()) for path in files]
    assert all(map(alive, pids))
    process.kill()
    process.communicate()
    until(lambda: not any(map(alive, pids)))


def test_lines_are_whole_and_have_their_number():
    out = io.StringIO()
    lines = Lines(12, out=out, err=io.StringIO())
    script = (
        "import os, sys\nfor i in range(300):\n os.write(1, b'a' * 50); os.write(1, b'b' * 50 +"
        " b'\\n')\nos.write(1, b'10%\\r20%\\rdone')\nos.write(1, b'\\n[Gloo] Rank 0\\n')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(4)
    ]
    for thread in [
        lines.follow(number, process.stdout, error=False)
        for number, process in enumerate(processes)
        if process.stdout
    ]:
        thread.join()
    for process in processes:
        process.wait()
    found = out.getvalue().splitlines()
    assert len(found) == 4 * 301 and {line[:5] for line in found} == {
        f"[ {number}] " for number in range(4)
    }
    assert {line[5:] for line in found} == {"a" * 50 + "b" * 50, "done"}


def test_colours_are_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown, plain = Terminal(), Terminal()
    Lines(2, out=shown, environ={}).show(1, "[bold]text[/]", error=False)
    Lines(2, out=plain, environ={"NO_COLOR": "1"}).show(1, "[bold]text[/]", error=False)
    assert (
        shown.getvalue() == "\x1b[33m[1]\x1b[0m [bold]text[/]\n"
        and plain.getvalue() == "[1] [bold]text[/]\n"
    )


def test_what_cannot_be_launched():
    with pytest.raises(
        LaunchError, match=r"there is no command(.|\n)*processes is 0(.|\n)*port is 70000"
    ):
        Local(command=(), processes=0, port=70000)
    with pytest.raises(
        LaunchError,
        match=(
            r"192.0.2.77 is not an address of this machine(.|\n)*Try: 127.0.0.1, or the name of an"
            r" interface: .*lo"
        ),
    ):
        launch(Local(command=("true",), processes=1, address="192.0.2.77"))
    assert address_of("lo") == "127.0.0.1" and address_of("10.0.0.7") == "10.0.0.7"
