"""Two writers on one folder: is anything lost?

    python -m benchmarks owner_races [--races 20] [--steps 24] [--out results/owner_races.json]

In every race two processes train the same run in the same folder. They start at the same moment, or
the second comes while the first trains or while it saves; in some races the first is then killed
with SIGKILL, and the second is started again at once. One of the two must get the folder, and the
other must be told who has it, and touch nothing. After each race:

- `finished`, `refused`: how many processes did all steps, and how many ended with `OwnedError`;
- `lines_wrong`: lines of metrics.jsonl that are not records, steps that are there twice or out of
  order (after a kill, those since the newest checkpoint are done again);
- `steps_missing`: steps without a record; `losses_equal`: whether all losses have the bits of a run
  that was alone;
- `parameters_equal`: the same of the last checkpoint's arrays, by the sums that it keeps;
- `saves_lost`: checkpoints that the first had committed or was writing when the second came, and
  that are gone although it went on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2", XLA_FLAGS="--xla_backend_optimization_level=0"
)

import jax
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks.environment import command_line, write
from benchmarks.runs import last_arrays, losses
from shardlib.checkpointing.store import Keep
from shardlib.errors import OwnedError
from shardlib.training.fit import fit
from shardlib.training.measures import by_step, read_lines
from shardlib.training.run import RunFolder
from shardlib.training.settings import Settings

WIDTH, BATCH, SAVE_EVERY = 16, 8, 3
#: Seconds that a batch takes, so that there is a while in which the other can come.
SLOW = 0.03


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, rngs=rngs)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error."""
    return ((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2).mean()


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Numbers that depend on the step."""
    time.sleep(SLOW if step else 0.0)
    x = np.random.default_rng((7, step)).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def train(folder: Path, steps: int, outcome: Path, ready: Path, go: Path) -> None:
    """One process of a race: is ready, waits for the start, and writes down how it ended."""
    program = shardlib.compile(
        Model, loss, optax.adam(1e-2), batch_of(0), topology="cpu:2", pin={"mesh": {"data": 2}}
    )
    program.prepare()
    ready.touch()
    while not go.exists():
        time.sleep(0.001)
    try:
        fit(
            program,
            batch_of,
            steps=steps,
            settings=Settings(
                run=folder, save_every=SAVE_EVERY, keep=Keep(newest=None), loggers=()
            ),
        )
        found = {"end": "finished"}
    except Exception as error:
        found = {
            "end": type(error).__name__,
            "message": str(error),
            "owned": isinstance(error, OwnedError),
        }
    outcome.write_text(json.dumps(found))


def start(root: Path, name: str, folder: Path, steps: int) -> int:
    """A process of a race, a fork from before JAX has started anything."""
    child = os.fork()
    if child == 0:
        os.setsid()
        sys.stderr = sys.stdout = (root / f"{name}.log").open("w")
        try:
            train(folder, steps, root / f"{name}.json", root / f"{name}.ready", root / f"{name}.go")
        finally:
            os._exit(0)
    return child


def until(look: Any, seconds: float = 300.0) -> None:
    """Waits for something to be so."""
    end = time.monotonic() + seconds
    while not look():
        if time.monotonic() > end:
            raise SystemExit(
                "a process of the race does not come on\nTry: a machine that does less"
            )
        time.sleep(0.002)


def ended(root: Path, name: str, child: int) -> dict[str, Any]:
    """How a process ended."""
    os.waitpid(child, 0)
    path = root / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"end": "killed"}


def race(root: Path, steps: int, kind: str, alone: dict[int, float], sums: Any) -> dict[str, Any]:
    """Two writers on one folder, and what is left."""
    folder = RunFolder(root / "run")
    children = {name: start(root, name, folder.path, steps) for name in ("first", "second")}
    until(lambda: all((root / f"{name}.ready").exists() for name in children))
    (root / "first.go").touch()
    writing: list[str] = []
    if kind == "save":
        until(
            lambda: (
                folder.checkpoints.exists()
                and (
                    writing.extend(
                        path.name
                        for path in folder.checkpoints.iterdir()
                        if "orbax-checkpoint-tmp" in path.name
                    )
                    or writing
                )
            )
        )
    elif kind != "together":
        until(lambda: len(folder.saved()) >= 2)
    before = set(folder.saved()) if kind != "together" else set[int]()
    (root / "second.go").touch()
    ends = {}
    if kind == "killed":
        ends["second"] = ended(root, "second", children["second"])
        os.killpg(children["first"], signal.SIGKILL)
        ends["first"] = ended(root, "first", children["first"])
        before = set(folder.saved())
        child = start(root, "third", folder.path, steps)
        (root / "third.go").touch()
        ends["third"] = ended(root, "third", child)
    else:
        ends = {name: ended(root, name, child) for name, child in children.items()}
    return {
        "kind": kind,
        "ends": {name: end["end"] for name, end in ends.items()},
        "messages": [end["message"] for end in ends.values() if "message" in end],
    } | left(folder, steps, before, writing, ends, alone, sums)


def left(
    folder: RunFolder,
    steps: int,
    before: set[int],
    writing: list[str],
    ends: dict[str, dict[str, Any]],
    alone: dict[int, float],
    sums: Any,
) -> dict[str, Any]:
    """What the race has left in the folder."""
    lines = read_lines(folder.metrics)
    order = [record["step"] for record in lines.records if "event" not in record]
    resumed = [record["step"] for record in lines.records if record.get("event") == "resumed"]
    due = [*range(1, steps + 1)] if not resumed else None
    found = {step: record["loss"] for step, record in by_step(lines.records).items()}
    wrong = lines.unread * (not resumed) + (
        0
        if due is None or order == due
        else sum(one != other for one, other in zip(order, due, strict=False))
        + abs(len(order) - len(due))
    )
    promised = before | {int(name.partition(".")[0]) for name in writing}
    return {
        "finished": sum(end["end"] == "finished" for end in ends.values()),
        "refused": sum(bool(end.get("owned")) for end in ends.values()),
        "lines_wrong": wrong,
        "steps_missing": len(set(range(1, steps + 1)) - set(found)),
        "losses_equal": not alone or found == alone,
        "parameters_equal": not sums or last_arrays(folder, steps) == sums,
        "saves_lost": len(promised - set(folder.saved())),
    }


def good(row: dict[str, Any]) -> bool:
    """Whether a race has lost nothing."""
    return (
        row["finished"] == 1
        and row["refused"] == 1
        and not row["lines_wrong"]
        and not row["steps_missing"]
        and row["losses_equal"]
        and row["parameters_equal"]
        and not row["saves_lost"]
    )


def main() -> None:
    parser = command_line(__doc__, "owner_races.json")
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kinds = [("together", "train", "save", "killed")[number % 4] for number in range(given.races)]
    random.Random(given.seed).shuffle(kinds)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "alone").mkdir()
        child = start(root / "alone", "one", root / "alone" / "run", given.steps)
        (root / "alone" / "one.go").touch()
        assert ended(root / "alone", "one", child) == {"end": "finished"}, (
            root / "alone" / "one.log"
        ).read_text()
        one = RunFolder(root / "alone" / "run")
        alone, sums = (
            losses(one),
            last_arrays(one, given.steps),
        )
        rows = []
        for number, kind in enumerate(kinds):
            (root / str(number)).mkdir()
            rows.append(race(root / str(number), given.steps, kind, alone, sums))
            print(number + 1, kind, "well" if good(rows[-1]) else rows[-1], flush=True)
    write(
        given.out,
        {
            "races": given.races,
            "steps": given.steps,
            "save_every": SAVE_EVERY,
            "races_that_lost_nothing": sum(map(good, rows)),
            "rows": rows,
        },
    )
    print(f"{sum(map(good, rows))} of {given.races} races lost nothing")
