"""Processes of tests: Python with some words, and several processes of JAX, which a child forks
before JAX has started anything, so that imports are done once.

What those have found goes to files of the test. Standard output is not a place for it: collectives of
CPU devices report connections there, in pieces, from every process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def child(
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Starts Python, which finds the package and the tests, with `variables` beside those of this
    process.
    """
    usual = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=usual if env is None else dict(env),
        **{**pipes, **options},
    )


def python(*words: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python as `child` starts it; where `check` is true it has to end with 0."""
    with child(*words, **options) as process:
        try:
            out, errors = process.communicate(timeout=600)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0 or not check, out[-3000:] + errors[-3000:]
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What a condition is once it holds, which it has to within so many seconds."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forked(work: Callable[[int, int, str, str], None]) -> int:
    """Runs (number, count, port, folder) in children of two devices each, as the arguments of this
    process say; whether one failed.
    """
    count, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    jax.config.update("jax_num_cpu_devices", 2)
    children = []
    for number in range(count):
        children.append(os.fork())
        if children[-1] == 0:
            work(number, count, port, folder)
            os._exit(0)
    return int(any(os.waitpid(child, 0)[1] for child in children))
