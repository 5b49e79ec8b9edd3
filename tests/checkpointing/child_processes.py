"""Several processes of two devices that save and restore together. Arguments: how many, a free
port, the folder.

They save step 1, wait until somebody else has saved step 2, and restore that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

from shardlib.checkpointing.store import Checkpoints
from tests.checkpointing.states import ROWS, abstract, mesh, state
from tests.processes import forked, until


def same_here(found: Any, expected: Any) -> bool:
    """Whether the parts of arrays that this process holds are right."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if any(
            (jax.device_get(shard.data) != jax.device_get(other)[shard.index]).any()
            for shard in one.addressable_shards
        ):
            return False
    return True


def run(number: int, count: int, port: str, folder: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", count, number)
    target = abstract(state(), mesh(2 * count, 1), ROWS)
    first = jax.jit(
        lambda: state(1), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target)
    )()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, first, plan=None, extra={"position": 1}, wait=True)
    until((Path(folder) / "2").is_dir)
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored = checkpoints.restore(target)
        assert (restored.step, restored.extra) == (2, {"position": 2}) and same_here(
            restored.state, state(2)
        )
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(run))
