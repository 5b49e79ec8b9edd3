"""The script that starts the processes of a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shardlib.launch.job import Job
from shardlib.launch.submission import host_script, yaml_text
from tests.processes import until

#: Writes its place, then ends with the code that its file says, or waits for a signal and ends with
#: 75.
PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
names = ("PROCESS", "HOST_PROCESS", "HOST_PROCESSES")
process, local, of = (os.environ[f"SHARDLIB_{name}"] for name in names)
def stopped(number, frame):
    Path(f"stopped-{process}").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stopped)
Path(f"place-{process}").write_text(f"{local} of {of}")
code = Path(f"code-{process}")
if code.exists():
    sys.exit(int(code.read_text()))
time.sleep(200)
"""


def start(folder: Path, processes: int = 3) -> subprocess.Popen[bytes]:
    """The host with number 1, of two."""
    (folder / "program.py").write_text(PROGRAM)
    job = Job(
        name="a",
        command=(sys.executable, "program.py", "it's"),
        topology=f"2*cpu:{processes}",
        host_processes=processes,
    )
    return subprocess.Popen(
        ["bash", "-c", "\n".join(host_script(job, "$HOST")), "host", *job.words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOST": "1", "SHARDLIB_HOST_PROCESSES": str(processes)},
    )


def ended(host: subprocess.Popen[bytes]) -> int:
    """The code of a host; it is not left behind where it does not end."""
    try:
        return host.wait(timeout=150)
    finally:
        host.kill()
        host.wait()


@pytest.mark.parametrize(("codes", "code"), [((0, 0, 0), 0), ((0, 75, 75), 75), ((75, 75, 0), 75)])
def test_code_of_a_host_is_that_of_its_processes(codes: tuple[int, ...], code: int, tmp_path: Path):
    for i, one in enumerate(codes):
        (tmp_path / f"code-{3 + i}").write_text(str(one))
    assert ended(start(tmp_path)) == code
    assert [(tmp_path / f"place-{3 + i}").read_text() for i in range(3)] == [
        "0 of 3",
        "1 of 3",
        "2 of 3",
    ]


def test_a_failure_ends_the_others(tmp_path: Path):
    (tmp_path / "code-4").write_text("86")
    began = time.monotonic()
    assert ended(start(tmp_path)) == 86
    assert time.monotonic() - began < 100


def test_a_signal_reaches_all(tmp_path: Path):
    host = start(tmp_path)
    until(lambda: len(list(tmp_path.glob("place-*"))) == 3)
    host.send_signal(signal.SIGTERM)
    assert ended(host) == 75
    assert len(list(tmp_path.glob("stopped-*"))) == 3


def test_one_process_takes_the_place_of_the_script(tmp_path: Path):
    (tmp_path / "code-1").write_text("7")
    assert ended(start(tmp_path, processes=1)) == 7


def test_scripts_in_yaml_are_read_back_as_written():
    fields = {
        "run": "first\n  second: $((1))\n",
        "odd": "no",
        "text": "it's: a # sign",
        "blank ": "ends \n",
    }
    assert yaml.safe_load(yaml_text(fields)) == fields
