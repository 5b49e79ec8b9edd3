"""Sums that are scattered as whole tiles, or as rows, are the rows of the sum."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardlib.lowering.weights import LANES, SUBLANES, _scattered_rows

SHAPES = (
    ((8 * SUBLANES, 10 * LANES), 0, "tiles"),
    ((8 * SUBLANES, 100), 0, "tiles of one row's columns"),
    ((8 * SUBLANES, LANES + 2), 0, "tiles, filled up"),
    ((3 * LANES, 16 * SUBLANES), 1, "tiles along the last dim"),
    ((24, 3, LANES), 0, "rows"),
    ((40, 5), 0, "short rows"),
)


@pytest.mark.parametrize(("shape", "dim", "_what"), SHAPES, ids=[what for _, _, what in SHAPES])
def test_shards_are_those_of_the_sum(shape: tuple[int, ...], dim: int, _what: str):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("major", "minor"))
    partial = np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype(np.float32)
    cut = [("major", "minor") if at == dim else None for at in range(len(shape))]
    scattered = jax.shard_map(
        lambda one: _scattered_rows(one[0], dim, ("major", "minor"), stacked=False),
        mesh=mesh,
        in_specs=PartitionSpec(("major", "minor")),
        out_specs=PartitionSpec(*cut),
    )
    np.testing.assert_array_equal(jax.jit(scattered)(partial), partial.sum(0))
