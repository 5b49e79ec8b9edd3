"""Compilation in a process of its own, which a failing compiler ends instead of this one.

In a child process with limits of time and memory. What goes wrong there (an abort, too little
memory, no end) comes back as a `Failure`, a value like any other. Several may run side by side. A
child ends with this process, whatever ends that, and so does what the compiler has started in its
turn.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.processes.lifetime.kin import Guard, finish
from shardlib.processes.lifetime.kin import start as begin
from shardlib.verification.exported import ExportedStep
from shardlib.verification.targets import Target, environment, require_compiler

POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a compilation may take.

    Attributes:
        seconds: wall time.
        memory_bytes: resident memory of the child; read from `/proc`, so not enforced where there
            is none.
    """

    seconds: float = 1800.0
    memory_bytes: int = 48 * 2**30


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made.

    Attributes:
        text: the optimised program.
        memory: bytes per device: "arguments", "outputs", "aliased", "temporaries", "peak".
        seconds: wall time of compiling.
        device_kind: what the compiler calls the device.
        versions: package -> version.
        log: what the compiler wrote to its streams.
    """

    text: str
    memory: dict[str, int]
    seconds: float
    device_kind: str
    versions: dict[str, str]
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no compiled program.

    Attributes:
        kind: "out-of-memory" (of the device), "compile-error", "compiler-abort", "compile-timeout"
            or "compiler-memory" (of this machine).
        message: what the compiler said, as far as it said anything.
        seconds: wall time until then.
    """

    kind: str
    message: str
    seconds: float


def compile_apart(
    step: ExportedStep,
    target: Target,
    limits: Limits | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Compiled | Failure:
    """Compiles a step for a target in a process of its own."""
    require_compiler(target.platform)
    with (
        Guard() as guard,
        tempfile.TemporaryDirectory(prefix="shardlib-verify-") as name,
    ):  # the guard deletes the folder where this process is killed
        folder = Path(name)
        guard.clear(folder)
        (folder / "program.bin").write_bytes(step.program)
        (folder / "job.json").write_text(
            json.dumps(
                {"target": target.to_json(), "options": dict(options or {}), **step.to_json()}
            ),
            encoding="utf-8",
        )
        return run_child(
            [sys.executable, "-m", "shardlib.verification.child", name],
            folder,
            target,
            limits or Limits(),
            guard,
        )


def run_child(
    command: list[str], folder: Path, target: Target, limits: Limits, guard: Guard | None = None
) -> Compiled | Failure:
    """Runs the process that compiles the job of a folder, and says what came of it; under a guard
    of its own where none is given.

    Args:
        limits: seconds of wall time and bytes of the child's memory.
    """
    if guard is None:
        with Guard() as guard:
            return run_child(command, folder, target, limits, guard)
    start = time.monotonic()
    search = os.pathsep.join(path for path in (str(Path(__file__).parents[2]), *sys.path) if path)
    env = {
        **os.environ,
        **environment(target.platform, len(target.order)),
        "PYTHONPATH": search,
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / "log").open("wb") as log:
        child = begin(command, guard, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            broken = _watch(child, start, limits)
        finally:
            finish(child, guard)
    seconds = time.monotonic() - start
    log_text = (folder / "log").read_text(encoding="utf-8", errors="replace")
    if broken:
        what = {
            "compile-timeout": f"the compiler was stopped after {limits.seconds:.0f} s",
            "compiler-memory": (
                f"the compiler was stopped: it took more than {limits.memory_bytes} bytes of this"
                " machine's memory"
            ),
        }[broken]
        return Failure(kind=broken, message=what, seconds=seconds)
    if not (folder / "result.json").is_file():
        return Failure(
            kind="compiler-abort",
            message=f"the compiler ended with {_ending(child.returncode)}: {last_words(log_text)}",
            seconds=seconds,
        )
    return _outcome(
        json.loads((folder / "result.json").read_text(encoding="utf-8")), folder, seconds, log_text
    )


def _watch(child: subprocess.Popen[bytes], start: float, limits: Limits) -> str:
    """Waits for the end, or until the child goes over a limit; says which."""
    broken = ""
    while child.poll() is None and not broken:
        if time.monotonic() - start > limits.seconds:
            broken = "compile-timeout"
        elif resident_bytes(child.pid) > limits.memory_bytes:
            broken = "compiler-memory"
        else:
            time.sleep(POLL_S)
    return broken


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_words(log: str) -> str:
    """The line of a log that says why, where there is one: a failed check, a fatal error, or else
    the last line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check fail|CHECK|Fatal|F\d{4} ", line)]
    return (telling or lines or ["it left no message"])[-1 if not telling else 0][:600]


def _outcome(result: dict[str, Any], folder: Path, seconds: float, log: str) -> Compiled | Failure:
    if "error" in result:
        message = result["error"]["message"]
        kind = (
            "out-of-memory"
            if "RESOURCE_EXHAUSTED" in message or "Ran out of memory" in message
            else "compile-error"
        )
        return Failure(
            kind=kind,
            message=message if kind == "out-of-memory" else f"{result['error']['kind']}: {message}",
            seconds=seconds,
        )
    return Compiled(
        text=(folder / "compiled.hlo").read_text(encoding="utf-8"),
        memory=result["memory"],
        seconds=result["compile_seconds"],
        device_kind=result["device_kind"],
        versions=result["versions"],
        log=log,
    )
