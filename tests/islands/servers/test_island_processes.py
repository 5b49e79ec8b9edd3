"""Whole runs: islands that are processes, some of which are paused, killed, or come late."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardlib
from shardlib.islands.servers import processes
from shardlib.islands.servers.joining import OuterServer
from shardlib.islands.servers.rounds import Rounds
from tests.islands.servers.test_island import replicas
from tests.processes import python, until

ROOT = Path(__file__).parents[3]
SCRIPT = [sys.executable, str(ROOT / "tests" / "islands" / "servers" / "script.py")]


def variables(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TEST_FOLDER": str(folder), **more}


@contextlib.contextmanager
def launched(folder: Path, *options: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "shardlib", "launch", "--devices-per-process", "2"]
    process = subprocess.Popen(
        [*words, "--run", str(folder / "server"), *options, "--", *SCRIPT],
        env=variables(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "server" / name
    return [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []


def require_outer(folder: Path, delay: int) -> None:
    """Both islands have ended with the outer parameters of a loop over replicas."""
    outer, *_ = replicas(2, 1, delay, 0.5)
    for number in range(2):
        with np.load(folder / f"island-{number}.npz") as found:
            for path, array in found.items():
                np.testing.assert_allclose(array, outer[path], rtol=5e-6, atol=5e-6)


@pytest.mark.long
def test_islands_that_are_processes_are_a_loop_over_replicas(tmp_path: Path) -> None:
    with launched(tmp_path, "--islands", "2", "--emulate-link", "500mbit-1ms") as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    require_outer(tmp_path, delay=0)
    assert [one["islands"] for one in lines(tmp_path, "rounds.jsonl")] == [[0, 1]] * 4
    with pytest.raises(FileNotFoundError):
        (tmp_path / "server" / "events.jsonl").read_text()


@pytest.mark.long
def test_islands_may_have_several_processes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shardlib", "launch", "-n", "2", "--devices-per-process", "1"]
    exchange = "diloco:2:2:rate=0.5:momentum=0.8:delay=1"
    with OuterServer(islands=2, run=tmp_path / "server", say=lambda text: None) as server:
        islands = [
            subprocess.Popen(
                [*words, "--", *SCRIPT],
                env=variables(
                    tmp_path, TEST_EXCHANGE=exchange, **server.place(number).environment()
                ),
            )
            for number in range(2)
        ]
        assert [one.wait(120) for one in islands] == [0, 0]
        assert server.report()["round"] == 5 and not server.report()["events"]
        with pytest.raises(shardlib.LaunchError, match="cannot listen at"):
            OuterServer(islands=2, port=server.port).__enter__()
    require_outer(tmp_path, delay=1)


@pytest.mark.long
def test_islands_come_late_stall_and_die_and_the_others_go_on(tmp_path: Path) -> None:
    token = tmp_path / "token"
    options = ["--islands", "3", "--islands-here", "2", "--gather-seconds", "1"]
    options += ["--restarts", "1"]
    more = ["--round-seconds", "0.5", "--away-seconds", "0.2", "--token-file", str(token)]
    wanted = {"TEST_EXCHANGE": "diloco:3:2", "TEST_STEPS": "100000", "TEST_SLEEP": "0.01"}

    def pid(name: str) -> int:
        return int((tmp_path / f"{name}.pid").read_text())

    def server() -> int:
        return json.loads((tmp_path / "server" / "outer.address").read_text())["pid"]

    def met(*islands: int) -> None:
        """Waits until a new round has just these islands."""
        before = len(lines(tmp_path, "rounds.jsonl"))

        def there() -> bool:
            rounds = lines(tmp_path, "rounds.jsonl")[before + 1 :]
            return any(one["islands"] == list(islands) for one in rounds)

        until(there)

    with launched(tmp_path, *options, *more, **wanted) as process:
        until(token.exists)
        met(0, 1)
        where = json.loads((tmp_path / "server" / "outer.address").read_text())
        third = {
            "SHARDLIB_MEETING": f"127.0.0.1:{where['port']}",
            "SHARDLIB_MEETING_TOKEN_FILE": str(token),
            "SHARDLIB_ISLAND": "2",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
        }
        by_hand = subprocess.Popen(SCRIPT, env=variables(tmp_path, **wanted, **third))
        met(0, 1, 2)
        os.kill(pid("island-1"), signal.SIGSTOP)
        met(0, 2)
        os.kill(pid("island-1"), signal.SIGCONT)
        met(0, 1, 2)
        by_hand.kill()
        by_hand.wait()
        met(0, 1)
        killed = server()
        os.kill(killed, signal.SIGKILL)
        until(lambda: server() != killed)
        met(0, 1)
        os.kill(pid("island-1"), signal.SIGKILL)
        met(0)
        met(0, 1)
        (tmp_path / "stop").touch()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    events = [one["event"] for one in lines(tmp_path, "events.jsonl")]
    for says in (
        r"island 1 has sent nothing 0\.5 s after the first; the others go on without it",
        r"island 2 is gone in round \d+; the others go on",
        r"it goes on at its checkpoint, before round \d+",
    ):
        assert any(re.fullmatch(says, one) for one in events), events
    assert "island 1 was killed by SIGKILL; it is started again" in said
    assert "the outer server was killed by SIGKILL; it is started again" in said
    assert re.search(r"round \d+ was closed without island 1", said)
    numbers = [one["round"] for one in lines(tmp_path, "rounds.jsonl")]
    assert numbers == list(range(1, len(numbers) + 1)), "no round was lost or done twice"
    assert token.read_text().strip() not in said
    assert token.stat().st_mode & 0o077 == 0
    found = [np.load(tmp_path / f"island-{number}.npz") for number in range(2)]
    assert all(np.isfinite(one[path]).all() for one in found for path in one.files)


def test_servers_load_no_jax() -> None:
    code = (
        "import sys, shardlib.islands.servers.processes;"
        " print(sorted({'jax', 'flax', 'optax'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--islands 2 -- x", "2 islands of this machine would share its devices"),
        ("--islands 2 -n 2 -- x", "an island is one process"),
        ("--islands 2 -- train", "train is not an island of its own"),
        ("--quorum 2 -- x", "nothing says how many islands there are"),
        ("--islands 2 --slurm -- x", "slurm is for an engine"),
        (
            "--islands 2 --devices-per-process 1 --quorum 3 -- x",
            "quorum is 3, and there are 2 islands",
        ),
        ("--islands 2 --devices-per-process 1 --round-seconds 0 -- x", "timeout_s is 0"),
    ],
)
def test_what_cannot_be_launched(shell: Any, words: str, says: str) -> None:
    code, _, err = shell("launch", *words.split())
    assert code == 2 and says in err


def test_a_server_that_cannot_be() -> None:
    with pytest.raises(shardlib.ArgumentError, match=r"islands is 1"):
        OuterServer(islands=1)
    with pytest.raises(shardlib.ArgumentError, match=r"port is 70000"):
        OuterServer(islands=2, port=70000, rounds=Rounds())


def test_a_round_is_told_once_where_its_checkpoint_was_not_written(tmp_path: Path) -> None:
    """A server that is killed between the two closes the round again."""
    told = tmp_path / processes.ROUNDS
    assert processes._last_round(told) == 0
    told.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert processes._last_round(told) == 2
    assert told.read_text() == '{"round": 1}\n{"round": 2}\n'
