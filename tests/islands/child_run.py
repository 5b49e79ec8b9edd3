"""A run of islands that ends with SIGKILL while the batch of a step is made. Arguments: the folder,
the step.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import shardlib
from tests.islands.small import program, rows


def main(folder: str, last: int) -> None:
    def batches(step: int) -> dict[str, np.ndarray]:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(step)

    settings = shardlib.Settings(run=folder, save_every=3, loggers=())
    shardlib.fit(program("zero-3"), batches, steps=12, settings=settings)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
