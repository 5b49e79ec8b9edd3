"""What crosses in few bits is rounded alike by all devices that hold the same."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.islands.small import program, stepped


@pytest.mark.parametrize(
    ("mesh", "wire"), [("zero-3", "int8"), ("tensor", "int8"), ("tensor", "int4")]
)
def test_replicas_stay_alike(mesh: str, wire: str) -> None:
    made = program(mesh, exchange=f"diloco:2:2:fragments=2:wire={wire}")
    state = stepped(made, made.init(0), 0, 3)
    trees = (state.exchange, *((one.params, one.opt_state) for one in state.islands))
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if not isinstance(leaf, jax.Array):
            continue
        first: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            mine = np.asarray(shard.data)
            where = f"{jax.tree_util.keystr(path)} {shard.index}"
            np.testing.assert_array_equal(mine, first.setdefault(where, mine), where)
