"""Matrices of the optimizer are divided among devices by their FLOPs."""

from __future__ import annotations

import pytest

from shardlib.graph import Contraction, MatrixUpdate, UpdateArray
from shardlib.matrix_updates import (
    MAX_IDLE_FLOPS,
    UpdateGroup,
    buffers,
    busiest,
    exchanges,
    update_groups,
)

KINDS = {"q": (8, 8), "k": (8, 2), "v": (8, 2), "o": (8, 8), "up": (8, 32), "gate": (8, 32)}


def update(path: str, number: int, rows: int, columns: int, flops: float = 0.0) -> MatrixUpdate:
    """An update that reads and leaves one array; its FLOPs are those of the products of Muon."""
    array = UpdateArray(dtype="float32", shape=(rows, columns), replicated=False)
    flops = flops or 2.0 * min(rows, columns) ** 2 * (2 * max(rows, columns) + min(rows, columns))
    return MatrixUpdate(
        path=path,
        shape=(number, rows, columns),
        stack=(0,),
        reads=(array,),
        writes=(array,),
        contractions=(Contraction(flops=flops * number, dtype="float32"),),
        alike=path,
    )


def decoder(sizes: dict[str, int], layers: int = 24) -> tuple[UpdateGroup, ...]:
    updates = [update(name, layers, *shape) for name, shape in KINDS.items()]
    updates.append(update("down", layers, 32, 8))
    specs = {u.path: [(), ("fsdp",)] for u in updates}
    return update_groups(updates, specs, sizes, "owned")


def test_unlike_matrices_are_divided_together() -> None:
    groups = decoder({"fsdp": 64})
    assert busiest(groups, [1.0] * 7) == 3  # of 168 on 64 devices; 7 where every kind is apart


@pytest.mark.parametrize("sizes", [{"fsdp": 5}, {"fsdp": 16}, {"data": 3, "fsdp": 8}, {"fsdp": 64}])
def test_a_device_has_a_matrix_more_than_its_share_at_most(sizes: dict[str, int]) -> None:
    groups = decoder(sizes)
    flops = [group.flops for group in groups]
    assert busiest(groups, flops) <= sum(group.share for group in groups) + max(flops)
    for group in groups:
        matrices = sorted(group.owned[group.owned >= 0])
        assert matrices == list(range(24))


def test_matrices_of_stages_are_beside_those_of_all() -> None:
    layers, table = update("layers", 6, 8, 8), update("table", 2, 8, 8)
    specs = {"layers": [("stage",), ("fsdp",)], "table": [(), ("fsdp",)]}
    sizes = {"stage": 2, "fsdp": 2}
    groups = update_groups([layers, table], specs, sizes, "owned")
    assert [group.extra.sum() for group in groups] == [1, 2]
    # a device of each stage has two of the layers' matrices, the others one and that of a table
    assert busiest(groups, [group.flops for group in groups]) == 2 * groups[0].flops


def test_a_buffer_holds_the_shape_as_often_as_any_device_needs_it() -> None:
    groups = decoder({"fsdp": 64})
    sizes = {b.array.shape: b.size for b in buffers(groups, [g.shards_read for g in groups])}
    assert sizes == {(8, 8): 1, (8, 2): 2, (8, 32): 1, (32, 8): 1}
    moved = [size for kind, _, size in exchanges(groups) if kind == "all-to-all"]
    assert sum(moved) == 2 * 64 * 4 * (64 + 2 * 16 + 256 + 256) / 64


def test_a_matrix_far_above_an_even_share_is_left_to_the_partitioner() -> None:
    sizes, specs = {"fsdp": 4}, {"large": [(), ("fsdp",)], "small": [(), ("fsdp",)]}
    large, small = (
        update(name, 1, 8, 8, flops)
        for name, flops in (("large", 2 * MAX_IDLE_FLOPS), ("small", MAX_IDLE_FLOPS))
    )
    groups = update_groups([large, small], specs, sizes, "owned")
    assert [group.layout for group in groups] == ["sharded", "owned"]
