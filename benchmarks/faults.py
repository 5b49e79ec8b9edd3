"""A training run that is killed again and again, and what it loses.

    python -m benchmarks faults [--kills 50] [--steps 2500] [--seed 0]

The demonstration (a smaller model; real text; simulated devices) is trained once without an
interruption. Then the same run is trained in another folder by processes that are killed with
SIGKILL at random moments: some while they start, most while they train, many while they save. After
each kill the newest checkpoint in the folder is read off from outside, and the next process must
begin there or later. At the end:

- `steps_lost`: steps before the newest committed checkpoint that some process began before; must be
  0;
- `losses_equal`: whether the loss of every step has the same bits as in the uninterrupted run;
- `parameters_equal`: the same of the last checkpoint's arrays, by the sums that it keeps;
- `other_mesh_error`: the same run killed half way and finished on half of the devices under another
  plan: largest relative difference of a loss.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT, command_line, write
from benchmarks.runs import difference, last_arrays, losses, resumed_at, shardlib, training
from shardlib.training.run import RunFolder

CARD = ROOT / "benchmarks" / "models" / "two-layers.toml"
SAVE_EVERY = 10
#: Seconds that a process has at most once it trains, before somebody means to kill it.
LIFE = 5.0


def start(words: list[str]) -> subprocess.Popen[bytes]:
    """A process whose output is thrown away."""
    return subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(words: list[str]) -> None:
    """Runs a process to its end, which must be a good one."""
    process = start(words)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]


def in_steps(folder: RunFolder, pid: int) -> bool:
    """Whether a process has come as far as its steps."""
    return any(
        beat.pid == pid and beat.phase in ("data", "step", "save") for beat in folder.heartbeats()
    )


def saving(folder: RunFolder) -> bool:
    """Whether a checkpoint is being written right now."""
    return any(".orbax-checkpoint-tmp" in path.name for path in folder.checkpoints.iterdir())


def kill_once(words: list[str], folder: RunFolder, rng: random.Random) -> dict[str, Any]:
    """Starts a process and kills it; what the folder held just after."""
    process = start(words)
    kind = rng.choices(("start", "train", "save"), (1, 4, 5))[0]
    limit = time.monotonic() + 120
    if kind == "start":
        time.sleep(rng.uniform(0.5, 6))
    else:
        while (
            not in_steps(folder, process.pid)
            and process.poll() is None
            and time.monotonic() < limit
        ):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, LIFE))
        while (
            kind == "save"
            and not saving(folder)
            and process.poll() is None
            and time.monotonic() < limit
        ):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.05) if kind == "save" else 0)
    during = saving(folder) if folder.checkpoints.exists() else False
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return {
        "kind": kind,
        "during_save": during,
        "committed": max(folder.saved(), default=0),
        "code": process.returncode,
    }


def lost(begun: list[int], committed: int) -> int:
    """Steps that were committed before a process began, and that it began before."""
    return max((committed - step for step in begun), default=0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        whole, killed, moved = (RunFolder(root / part) for part in ("whole", "killed", "moved"))

        def command(folder: RunFolder, devices: int = 4, axis: str = "fsdp") -> list[str]:
            machine = ("--topology", f"cpu:{devices}", "--pin", f"mesh.{axis}={devices}")
            return shardlib(*training(folder.path, CARD, given.steps, SAVE_EVERY, *machine))

        begin = time.monotonic()
        finish(command(whole))
        uninterrupted = time.monotonic() - begin
        words, rows, committed, known = command(killed), [], 0, 0
        for number in range(given.kills):
            row = kill_once(words, killed, rng)
            begun = resumed_at(killed)
            row |= {"resumed": begun[known:], "lost": lost(begun[known:], committed)}
            known, committed = len(begun), row["committed"]
            rows.append(row)
            print(number + 1, row, flush=True)
            if committed >= given.steps:
                raise SystemExit(
                    f"the run was done after {number + 1} kills\nTry: --steps {given.steps * 2}"
                )
        finish(words)
        steps_lost = sum(row["lost"] for row in rows) + lost(resumed_at(killed)[known:], committed)
        alone, interrupted = losses(whole), losses(killed)
        equal = [loss == interrupted[step] for step, loss in alone.items()]
        process = start(command(moved))
        while max(moved.saved(), default=0) < given.steps // 2 and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        finish(command(moved, 2, "tensor"))
        write(
            RESULTS / "faults.json",
            {
                "kills": given.kills,
                "kills_during_save": sum(row["during_save"] for row in rows),
                "steps": given.steps,
                "save_every": SAVE_EVERY,
                "steps_lost": steps_lost,
                "losses_equal": all(equal),
                "steps_compared": len(equal),
                "parameters_equal": last_arrays(whole, given.steps)
                == last_arrays(killed, given.steps),
                "other_mesh_error": difference(losses(moved), alone),
                "uninterrupted_seconds": uninterrupted,
                "rows": rows,
            },
        )
