"""A folder has one owner, and one that is dead is found out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardlib.checkpointing import folder as owners
from shardlib.checkpointing.folder import KEPT, Claim, claim, described, refuse_where_owned
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import CheckpointError, OwnedError, RunError
from shardlib.processes import kin
from shardlib.processes.kin import Who, this_process
from tests.processes import child, python, until

#: Claims a folder, says so, and waits to be told to end.
HOLD = (
    "import sys; from pathlib import Path; from shardlib.checkpointing.folder import claim; held ="
    " claim(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)
#: Many processes that claim a folder at the same moment, round after round; prints how many got it
#: in each.
RACE = """
import os, sys
from pathlib import Path
from shardlib.checkpointing.folder import claim
from shardlib.errors import OwnedError
root, rounds, racers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(rounds):
    folder, (ready, go), (told, tell), (hold, let) = root / str(number % 2), os.pipe(), os.pipe(), os.pipe()
    children = []
    for racer in range(racers):
        child = os.fork()
        if child == 0:
            os.close(go), os.close(let)
            os.read(ready, 1)
            try:
                held = claim(folder)
                os.write(tell, b"1")
            except OwnedError:
                os.write(tell, b"0")
            os.read(hold, 1)
            os._exit(0)  # gives nothing back
        children.append(child)
    os.close(go)
    answers = b"".join(os.read(told, 1) for _ in range(racers))
    os.close(let)
    for child in children:
        os.waitpid(child, 0)
    for end in (ready, told, tell, hold):
        os.close(end)
    print(answers.count(b"1"), flush=True)
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    process = child("-c", HOLD, folder, stdin=subprocess.PIPE, stderr=None)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def left_by(folder: Path, one: Who, number: int = 1) -> None:
    """What a process has left that had the folder."""
    (folder / "owner").mkdir(parents=True, exist_ok=True)
    (folder / "owner" / f"{number:06d}.json").write_text(
        json.dumps(asdict(Claim(token="another", since="2026-01-02T03:04:05+00:00", who=one)))
    )
    (folder / "owner" / f"{number:06d}.beat").write_text("00000000000000000007\n")


def test_another_process_is_named_and_its_death_is_known_at_once(tmp_path: Path):
    process = holding(tmp_path)
    with pytest.raises(OwnedError, match="which lives"):
        refuse_where_owned(tmp_path, "the run")
    with pytest.raises(OwnedError) as caught:
        claim(tmp_path)
    me = this_process()
    assert (caught.value.pid, caught.value.host) == (process.pid, me.host) and isinstance(
        caught.value, RunError
    )
    assert f"process {process.pid} on {me.host}, since {caught.value.since}, which lives" in str(
        caught.value
    )
    held = described(tmp_path)
    assert held is not None and held.who.pid == process.pid
    process.send_signal(signal.SIGSTOP)  # it may go on
    with pytest.raises(OwnedError):
        claim(tmp_path)
    process.kill()
    process.communicate()
    begin = time.monotonic()
    claim(tmp_path).release()
    assert time.monotonic() - begin < 60 and described(tmp_path) is None
    refuse_where_owned(tmp_path, "the run")


def test_of_many_at_once_one_gets_it(tmp_path: Path):
    done = python("-c", RACE, str(tmp_path), "40", "4")
    assert done.stdout.split() == ["1"] * 40


def test_without_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*arguments: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", none)
    held = claim(tmp_path)
    with pytest.raises(OwnedError, match="which is this very process"):
        claim(tmp_path)
    held.release()
    claim(tmp_path).release()


def test_a_number_that_came_again_is_not_the_owner(tmp_path: Path):
    me = this_process()
    left_by(
        tmp_path, replace(me, pid=1, started="1")
    )  # there is such a process, and it began at another time
    claim(tmp_path).release()


@pytest.mark.parametrize(
    "changed",
    [{"boot": "another boot"}, {"host": "another-host"}, {"namespace": "pid:[1]"}],
    ids=str,
)
def test_one_that_cannot_be_looked_at_is_watched(tmp_path: Path, changed: dict[str, str]):
    left_by(tmp_path, replace(this_process(), pid=4, **changed))
    said: list[str] = []
    begin = time.monotonic()
    held = claim(tmp_path, silent_seconds=1.0, say=said.append)
    assert time.monotonic() - begin >= 1.0
    assert len(said) == 1
    assert "cannot be looked at from here: waiting up to 1 s for a sign of life" in said[0]
    held.release()


def test_whoever_was_taken_for_dead_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = claim(tmp_path)
    held.require()
    left_by(tmp_path, replace(this_process(), pid=4, host="another-host"), number=2)
    monkeypatch.setattr(owners, "SURE", 0.0)
    with pytest.raises(
        OwnedError,
        match=(
            r"process 4 on another-host, since .*, which took it over when this one gave no sign of"
            r" life"
        ),
    ):
        held.require()
    held.release()
    assert (tmp_path / "owner" / "000002.beat").read_text() == "00000000000000000007\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"token": 1}',
        "[" * 100_000,
        '{"who": {"host": 1, "pid": "x"}, "token": "t", "since": "s"}',
    ],
    ids=range(6),
)
def test_files_that_say_nothing(tmp_path: Path, text: str):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "000003.json").write_text(text)
    (tmp_path / "owner" / "notes \N{SUPERSCRIPT TWO}.json").write_text("")
    claim(tmp_path, silent_seconds=0.3).release()
    assert (tmp_path / "owner" / "000004.json").exists()


def test_old_numbers_are_cleared_away(tmp_path: Path):
    for _ in range(30):
        claim(tmp_path).release()
    assert len([*(tmp_path / "owner").iterdir()]) <= 2 * (KEPT + 1)


def test_a_fork_gives_nothing_back(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from shardlib.checkpointing.folder import claim,"
        " described; held = claim(Path(sys.argv[1]))\nchild = os.fork()\nif child == 0:"
        " held.release(); sys.exit(0)\nos.waitpid(child, 0); sys.exit(described(Path(sys.argv[1]))"
        " is None)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], check=False, cwd=Path(__file__).parents[2]
        ).returncode
        == 0
    )


def test_a_second_writer_of_checkpoints_touches_nothing(tmp_path: Path):
    with Checkpoints(tmp_path) as first:
        (tmp_path / "5.orbax-checkpoint-tmp").mkdir()  # what the first one is writing
        with pytest.raises(OwnedError):
            Checkpoints(tmp_path)
        assert (tmp_path / "5.orbax-checkpoint-tmp").is_dir()
        Checkpoints(tmp_path, read_only=True).close()
    with pytest.raises(CheckpointError, match="are closed\nTry: open them again"):
        first.save(1, None, plan=None)  # pyright: ignore[reportArgumentType]
    Checkpoints(tmp_path).close()
    assert not (tmp_path / "5.orbax-checkpoint-tmp").exists()


def test_a_process_is_known_by_more_than_its_number():
    me = this_process()
    assert kin.lives(me) is True
    assert kin.lives(replace(me, started="1")) is False
    assert kin.lives(replace(me, boot="another")) is None
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    one = replace(me, pid=child.pid, started=kin._started(child.pid) or "0")
    until(lambda: not kin.lives(one))
    assert (
        child.returncode is None and kin.lives(one) is False
    )  # it has ended, and nobody has asked how
    child.wait()
    assert kin.lives(one) is False


def test_a_sign_of_life_from_elsewhere_counts_whatever_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left_by(tmp_path, replace(this_process(), pid=4, host="another-host"))
    for path in (tmp_path / "owner").iterdir():
        os.utime(path, (0, 0))
    beat = tmp_path / "owner" / "000001.beat"
    threading.Timer(0.5, lambda: beat.write_text("00000000000000000008\n")).start()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    said = r"process 4 on another-host, since 2026-01-02T03:04:05\+00:00, which gives signs of life"
    with pytest.raises(OwnedError, match=said):
        claim(tmp_path, silent_seconds=20)
