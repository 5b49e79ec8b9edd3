"""A set of rows in batches; the last one has the rows that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError
from shardlib.lowering.runtime.batches import shapes_of_batch
from shardlib.tracing.batch import describe_batch
from shardlib.tracing.row_proofs import rows_of
from shardlib.training.validation.asked import Validation


def batches_of(asked: Validation, usual: int) -> Iterator[Tree]:
    """The batches of a validation, in order."""
    data, rows = asked.data, asked.rows
    if callable(data):
        return iter(cast("Callable[[], Iterable[Tree]]", data)())
    size = usual if rows == 0 else rows
    if hasattr(data, "examples_per_epoch"):
        return _of_dataset(data, size)
    return _of_tree(data, asked.batch_axes, size)


def dims_and_rows(batch: Tree, batch_axes: Tree) -> tuple[tuple[int | None, ...], int]:
    """The dim of the rows in each array of a batch, None where it has none, and how many rows there
    are.

    Args:
        batch_axes: logical axes, a tree like it; None for those by convention.
    """
    dims, sizes = rows_of(describe_batch(shapes_of_batch(batch), batch_axes))
    if len(sizes) != 1 or not sizes[0]:
        found = f"{', '.join(map(str, sizes))} rows" if sizes and sizes[0] else "no rows"
        raise BatchError(
            f"a batch of the validation has {found}\nTry: arrays with one number of rows, or"
            " batch_axes, which says where they are"
        )
    return dims, sizes[0]


def _of_dataset(data: Tree, size: int | None) -> Iterator[Tree]:
    total = int(data.examples_per_epoch)
    step = total if size is None else size
    for start in range(0, total, step):
        yield data.batch(start, min(step, total - start))


def _of_tree(data: Tree, batch_axes: Tree, size: int | None) -> Iterator[Tree]:
    dims, total = dims_and_rows(data, batch_axes)
    leaves, structure = jax.tree.flatten(data)
    step = total if size is None else size
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield structure.unflatten(
            [
                leaf
                if dim is None
                else np.asarray(leaf)[(slice(None),) * dim + (slice(start, stop),)]
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
        )
