"""Runs of `shardlib train` that benchmarks start, and what their folders hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardlib.training.measures import by_step, read_records
from shardlib.training.run import RunFolder


def shardlib(*words: str) -> list[str]:
    """A command of shardlib as words."""
    return [sys.executable, "-m", "shardlib", *words]


def training(folder: Path, card: Path, steps: int, save_every: int, *more: str) -> list[str]:
    """The words of a command that trains on the text of Python's JSON package."""
    fixed = f"--steps {steps} --save-every {save_every} --batch 8 --seq 32 --sample-bytes 0"
    files = ("--run", str(folder), "--model", str(card), "--data", str(Path(json.__file__).parent))
    return ["train", *files, *fixed.split(), "--quiet", "--spike", "0", *more]


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step."""
    if not folder.metrics.exists():
        return {}
    return {step: row["loss"] for step, row in by_step(read_records(folder.metrics)).items()}


def difference(found: dict[int, float], reference: dict[int, float]) -> float:
    """The largest relative difference of a loss."""
    return max(abs(found[step] - loss) / abs(loss) for step, loss in reference.items())


def resumed_at(folder: RunFolder) -> list[int]:
    """The steps after which processes of the run went on, for each that came so far."""
    return [row["step"] for row in read_records(folder.metrics) if row.get("event") == "resumed"]


def last_arrays(folder: RunFolder, steps: int) -> Any:
    """Shapes and sums of the arrays of the last checkpoint; None where there is none."""
    paths = [*(folder.checkpoints / str(steps)).rglob("about/*")]
    return json.loads(paths[0].read_text())["content"]["arrays"] if paths else None
