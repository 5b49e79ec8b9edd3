"""Several processes beside one: equal losses, faults, overhead of the launcher, idle processes.

    python -m benchmarks launch_faults [--only equality|faults|overhead|idle] [--steps 10]

- `equality`: a small transformer is trained by 4 processes of 2 simulated devices and by one
  process of 8, for meshes whose fsdp, tensor, stage and expert axes cross the borders of the
  processes: largest relative difference of a loss.
- `faults`: of 4 processes, one is killed, one frozen (SIGSTOP), one has another version of the
  code, the port of process 0 is taken, one comes 30 s late. `seconds` is the time from the fault
  (for those of the start: from the start of the launcher) to the line that names the process;
  `within` is what it must stay below: for a frozen process the time that it may be silent and what
  a heartbeat and a look take, for those of the start what four processes take to begin on this
  machine and the time that they wait for each other. Where the run goes on, its losses are compared
  with those of a run that was left alone, bit by bit; where a place fails at every start and an
  elastic run goes on with half of the processes under another plan, `error` is the largest relative
  difference.
- `overhead`: seconds from the start of 4 processes to the end of all, where each finds the others
  and asks JAX for its devices: with `shardlib launch` and `shardlib.join()`, against a bare script
  that starts the same processes with `jax.distributed.initialize`. In turns, medians.
- `idle`: 2 and 4 processes of 2 simulated devices train on a mesh of all, half or one of them, so
  that some own no device of it. The last process is killed after a checkpoint, and 4 or 2 processes
  go on: steps at which they resume, exit codes, and the largest relative difference of a loss
  from one process on one device. By version of JAX.
"""

from __future__ import annotations

import itertools
import os
import queue
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT, alternate, command_line, stored, write
from benchmarks.runs import difference, losses, resumed_at, shardlib, training
from shardlib.processes.console import free_port
from shardlib.training.run import RunFolder

CARD = ROOT / "benchmarks" / "models" / "launched.toml"
EXPERTS = CARD.with_name("launched-experts.toml")
#: Meshes of which one axis crosses the borders of 4 processes of 2 devices each.
MESHES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "fsdp": ({"fsdp": 8}, ()),
    "tensor": ({"data": 2, "tensor": 4}, ()),
    "stage": ({"stage": 4, "data": 2}, ("--pin", "microbatches=4", "--pin", "pipeline=lockstep")),
    "expert": ({"expert": 4, "tensor": 2}, ()),
}
SILENT = 6.0
FOUR = ["-n", "4", "--devices-per-process", "1"]
#: Seconds that four processes may take on this machine to be there: what they import, on two cores.
BEGIN = 30.0
LATE = 30.0
JOIN = 10


def train(folder: Path, devices: int, mesh: dict[str, int], steps: int, *more: str) -> list[str]:
    """The words of a run."""
    pins = [word for axis, size in mesh.items() for word in ("--pin", f"mesh.{axis}={size}")]
    card = EXPERTS if "expert" in mesh and mesh["expert"] > 1 else CARD
    return training(folder, card, steps, 5, "--topology", f"cpu:{devices}", *pins, *more)


def alone(command: list[str]) -> None:
    """Runs a program without a launcher."""
    subprocess.run(command, env=environ(), check=True, stdout=subprocess.DEVNULL)


def environ() -> dict[str, str]:
    """Variables of a launcher: without devices of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


class Launched:
    """A launcher, and when it wrote what."""

    def __init__(self, options: list[str], command: list[str]) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            shardlib("launch", *options, "--", *command),
            env=environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._new: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put((time.monotonic(), line.rstrip("\n")))

    def until(self, part: str, seconds: float = 300) -> tuple[float, str]:
        """The time and text of the first line that has a part."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.lines.append(self._new.get(timeout=1))
            except queue.Empty:
                if self.process.poll() is None:
                    continue
                break
            if part in self.lines[-1][1]:
                return self.lines[-1]
        raise SystemExit(
            f"no line has {part!r}:\n" + "\n".join(text for _, text in self.lines[-30:])
        )

    def end(self) -> int:
        """The exit code."""
        return self.process.wait(timeout=600)


def equality(root: Path, steps: int) -> list[dict[str, Any]]:
    """A row a mesh."""
    rows = []
    for axis, (mesh, more) in MESHES.items():
        one, many = root / f"one-{axis}", root / f"many-{axis}"
        alone(shardlib(*train(one, 8, mesh, steps, *more)))
        begin = time.monotonic()
        launched = Launched(
            ["-n", "4", "--devices-per-process", "2"], train(many, 8, mesh, steps, *more)
        )
        code = launched.end()
        first, other = losses(RunFolder(one)), losses(RunFolder(many))
        assert code == 0 and len(first) == len(other) == steps, launched.lines
        rows.append(
            {
                "axis": axis,
                "mesh": mesh,
                "steps": steps,
                "error": difference(other, first),
                "seconds": time.monotonic() - begin,
            }
        )
        print(rows[-1], flush=True)
    return rows


def trained(folder: Path, steps: int) -> None:
    """Waits until a run has done so many steps."""
    end = time.monotonic() + 300
    while len(losses(RunFolder(folder))) < steps and time.monotonic() < end:
        time.sleep(0.02)


def pid_of(folder: Path, number: int) -> int:
    """The process of a number, as its heartbeat says."""
    return next(beat.pid for beat in RunFolder(folder).heartbeats() if beat.rank == number)


def struck(
    root: Path,
    name: str,
    strike: signal.Signals,
    steps: int,
    whole: dict[int, float],
    within: float,
) -> dict[str, Any]:
    """Process 2 of 4 gets a signal while it trains; the run goes on."""
    folder = root / name
    launched = Launched(
        [*FOUR, "--restarts", "2", "--silent-seconds", str(SILENT)],
        train(folder, 4, {"fsdp": 4}, steps),
    )
    trained(folder, 8)
    os.kill(pid_of(folder, 2), strike)
    begin = time.monotonic()
    seen, text = launched.until("process 2 of 4 ")
    code = launched.end()
    return {
        "fault": name,
        "seconds": seen - begin,
        "within": within,
        "message": text,
        "code": code,
        "resumed_at": resumed_at(RunFolder(folder)),
        "whole_seconds": time.monotonic() - begin,
        "losses_equal": losses(RunFolder(folder)) == whole,
    }


def disguised(number: int, before: str, command: list[str]) -> list[str]:
    """A command before which process `number` does something else."""
    return [
        "bash",
        "-c",
        f'if [ "$SHARDLIB_PROCESS" = {number} ]; then {before}; fi; exec {shlex.join(command)}',
    ]


def at_start(
    name: str, options: list[str], command: list[str], part: str, within: float
) -> dict[str, Any]:
    """A fault that is there from the beginning; the processes end, or wait."""
    launched = Launched([*FOUR, *options], command)
    seen, text = launched.until(part)
    code = launched.end()
    return {
        "fault": name,
        "seconds": seen - launched.began,
        "within": within,
        "message": text,
        "code": code,
        "ended_seconds": time.monotonic() - launched.began,
    }


def faults(root: Path, steps: int) -> list[dict[str, Any]]:
    """A row a fault."""
    whole = root / "whole"
    assert Launched(FOUR, train(whole, 4, {"fsdp": 4}, steps)).end() == 0
    left_alone = losses(RunFolder(whole))
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row | {"in_time": row["seconds"] < row["within"]})
        print(rows[-1], flush=True)

    add(struck(root, "killed", signal.SIGKILL, steps, left_alone, within=1.0))
    add(struck(root, "frozen", signal.SIGSTOP, steps, left_alone, within=SILENT + 3.0))
    other = root / "other"
    shutil.copytree(
        ROOT / "shardlib", other / "shardlib", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (other / "shardlib" / "lowering" / "step.py").open("a") as file:
        file.write("\n# a newer version\n")

    def words(name: str, mesh: dict[str, int], *more: str) -> list[str]:
        return shardlib(*train(root / name, 4, mesh, steps, *more))

    ours = words("code", {"fsdp": 4})
    newer = disguised(1, f"cd {shlex.quote(str(other))}", ours)
    add(at_start("other code", [], newer, "code of shardlib: ", BEGIN))
    with socket.socket() as listener:
        port = free_port("127.0.0.1")
        listener.bind(("127.0.0.1", port))
        listener.listen()
        taken = f"process 0 cannot listen at 127.0.0.1:{port}"
        add(at_start("port taken", ["--port", str(port)], ours, taken, BEGIN))
    late = disguised(3, f"sleep {LATE:g}", words("late", {"fsdp": 4}))
    add(at_start("30 s late, waited for", [], late, "waiting for process 3 of 4", BEGIN + 10))
    rows[-1]["losses_equal"] = losses(RunFolder(root / "late")) == left_alone
    allowed, missed = ["--join-seconds", str(JOIN)], "process 3 of 4 did not come"
    add(at_start(f"30 s late, {JOIN} s allowed", allowed, late, missed, BEGIN + JOIN))
    fails = 'if [ "$SHARDLIB_HOST_PROCESS" = 2 ]; then exit 9; fi; exec'
    gone = ["bash", "-c", f"{fails} {shlex.join(words('gone', {}, '--elastic'))}"]
    smaller = "going on with 2 of 4 processes"
    elastic = ["--restarts", "2", "--elastic"]
    add(at_start("a place that always fails", elastic, gone, smaller, 2 * BEGIN))
    rows[-1]["error"] = difference(losses(RunFolder(root / "gone")), left_alone)
    return rows


#: Devices of the mesh, by processes of two devices.
USED: dict[str, Callable[[int], int]] = {
    "all": lambda processes: 2 * processes,
    "half": lambda processes: processes,
    "one": lambda processes: 1,
}


def idle(root: Path, steps: int) -> list[dict[str, Any]]:
    """A row for each number of processes and mesh."""
    one = root / "idle-one"
    whole = dict.fromkeys(("stage", "data", "expert", "context", "tensor"), 1)
    alone(shardlib(*train(one, 1, whole | {"fsdp": 1}, steps)))
    reference, rows = losses(RunFolder(one)), []
    for (processes, others), (used, count) in itertools.product(((2, 4), (4, 2)), USED.items()):
        folder = root / f"idle-{processes}-{used}"

        def begun(
            number: int, folder: Path = folder, count: Callable[[int], int] = count
        ) -> Launched:
            command = train(folder, 2 * number, whole | {"fsdp": count(number)}, steps)
            return Launched(["-n", str(number), "--devices-per-process", "2"], command)

        first = begun(processes)
        trained(folder, 7)
        while not RunFolder(folder).saved():
            time.sleep(0.02)
        os.kill(pid_of(folder, processes - 1), signal.SIGKILL)
        codes = [first.end()]
        begin = time.monotonic()
        second = begun(others)
        codes.append(second.end())
        found = losses(RunFolder(folder))
        assert codes[1] == 0 and len(found) == steps, second.lines
        rows.append(
            {
                "processes": processes,
                "then": others,
                "mesh": used,
                "devices": [count(processes), count(others)],
                "codes": codes,
                "resumed_at": resumed_at(RunFolder(folder)),
                "error": difference(found, reference),
                "seconds": time.monotonic() - begin,
            }
        )
        print(rows[-1], flush=True)
    return rows


BARE = """
import subprocess, sys
one = "import sys, jax; jax.config.update('jax_num_cpu_devices', 1); jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2])); assert len(jax.devices()) == 4"
processes = [subprocess.Popen([sys.executable, "-c", one, sys.argv[1], str(number)], stdout=subprocess.DEVNULL) for number in range(4)]
sys.exit(max(process.wait() for process in processes))
"""
OURS = "import shardlib; shardlib.join(); import jax; assert len(jax.devices()) == 4"


def overhead(pairs: int) -> dict[str, Any]:
    """Medians, and their ratio."""

    def bare() -> None:
        alone([sys.executable, "-c", BARE, f"127.0.0.1:{free_port('127.0.0.1')}"])

    def launched() -> None:
        alone(shardlib("launch", *FOUR, "--", sys.executable, "-c", OURS))

    calls = alternate({"bare": bare, "launch": launched}, pairs, warm_up=False)
    seconds = {name: timings.seconds for name, timings in calls.items()}
    medians = {name: statistics.median(all_of) for name, all_of in seconds.items()}
    return {
        "processes": 4,
        "bare_seconds": medians["bare"],
        "launch_seconds": medians["launch"],
        "ratio": medians["launch"] / medians["bare"],
        "pairs": [[*pair] for pair in zip(seconds["bare"], seconds["launch"], strict=True)],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", choices=("equality", "faults", "overhead", "idle"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    path = RESULTS / "launch_faults.json"
    found = stored(path)
    with tempfile.TemporaryDirectory() as name:
        parts = {
            "overhead": lambda: overhead(given.pairs),
            "equality": lambda: equality(Path(name), given.steps),
            "faults": lambda: faults(Path(name), 3 * given.steps),
            "idle": lambda: {
                **found.get("idle", {}),
                f"jax {version('jax')}": idle(Path(name), 3 * given.steps),
            },
        }
        for part, run in parts.items():
            if given.only in (None, part):
                found[part] = run()
                write(path, {part: found[part] for part in parts if part in found})
