"""Several processes of two devices that read a model from safetensors files and write it again.
Arguments: how many, a free port, the folder.

Every process writes which share of the model it has read into `share-NUMBER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardlib.checkpointing import huggingface
from tests.checkpointing.test_huggingface import CONFIGS, program_of
from tests.processes import forked


def run(number: int, count: int, port: str, where: str) -> None:
    folder = Path(where)
    jax.distributed.initialize(f"localhost:{port}", count, number)
    program = program_of(CONFIGS["mixtral-8x7b"], folder / f"config-{number}", (count, 2))
    whole = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    read = 0
    read_part = huggingface.read_part

    def counted(*arguments: Any) -> np.ndarray:
        nonlocal read
        found = read_part(*arguments)
        read += found.size
        return found

    huggingface.read_part = counted
    imported = huggingface.load(folder / "in", program)
    huggingface.read_part = read_part
    huggingface.save(program, imported.state, folder / "out", config=folder / "in" / "config.json")
    Path(folder, f"share-{number}").write_text(f"{read / whole:.3f}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(run))
