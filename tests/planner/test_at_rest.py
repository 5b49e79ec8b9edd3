"""Along which dim is a parameter stored sharded?"""

from __future__ import annotations

import itertools
import math

import pytest

from shardlib.layout import Layout, MeshShape
from shardlib.planner.layouts import stored_layout

#: Dims of matrices of language models, all whole numbers of 128.
SIZES = (256, 512, 1024, 4096, 5120, 8192, 11008, 14336, 28672)


def padded(rows: int, columns: int) -> int:
    """Elements that a bfloat16 matrix takes in tiles of 16 x 128, the better way around."""
    return min(
        math.prod(
            math.ceil(size / tile) * tile for size, tile in zip(sizes, (16, 128), strict=True)
        )
        for sizes in ((rows, columns), (columns, rows))
    )


@pytest.mark.parametrize("ways", [8, 16, 64, 256])
def test_shards_of_a_matrix_are_not_padded_where_a_dim_has_whole_tiles(ways: int) -> None:
    mesh = MeshShape(fsdp=ways)
    for shape in itertools.product(SIZES, SIZES):
        chosen = stored_layout(Layout((), (), ()), (32, *shape), mesh, frozenset({0}))
        shards = {
            dim: tuple(size // (ways if dim == at else 1) for at, size in enumerate(shape))
            for dim in (0, 1)
            if shape[dim] % ways == 0
        }
        waste = {dim: padded(*shard) - math.prod(shard) for dim, shard in shards.items()}
        if 0 in waste.values():
            assert waste[next(dim for dim in (0, 1) if chosen[dim + 1])] == 0, (shape, chosen)
