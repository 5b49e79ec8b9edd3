"""Rounds that ten federated clients take to a loss, by data, local epochs and FedProx's term.

    python -m benchmarks federated_text [--rounds 20]

Each case is `examples/federated_text.py` in a process of its own: Flower's simulation, SGD of a
rate that nothing was tuned for, one seed. The loss is that of all rows that are held out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT, write

#: What each case says.
CASES = {
    "alike": ("--alike",),
    "apart": (),
    "alike, 4 epochs": ("--alike", "--epochs", "4"),
    "apart, 4 epochs": ("--epochs", "4"),
    "apart, 4 epochs, mu 0.01": ("--epochs", "4", "--mu", "0.01"),
}
GOALS = (2.5, 2.3, 2.2)


def measured(words: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """A case: losses by round, and the first round of each goal."""
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder, "figures.json"), time.monotonic()
        script = [sys.executable, str(ROOT / "examples" / "federated_text.py")]
        given = [*words, "--rounds", str(rounds), "--out", str(out)]
        subprocess.run([*script, *given], check=True, capture_output=True)
        losses = json.loads(out.read_text())["losses"]
    reached = {
        str(goal): next((n for n, loss in enumerate(losses) if loss <= goal), None)
        for goal in GOALS
    }
    return {"losses": losses, "rounds to": reached, "seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "federated_text.json")
    asked = parser.parse_args()
    found = {name: measured(words, asked.rounds) for name, words in CASES.items()}
    for name, case in found.items():
        print(f"{name:26} {case['losses'][-1]:.3f} at last; rounds to {case['rounds to']}")
    write(asked.out, {"cases": found, "flwr": metadata.version("flwr")})
