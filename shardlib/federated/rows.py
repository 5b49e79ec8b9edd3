"""The rows of a client, and the order in which local steps take them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import BatchError, DataError, raise_all
from shardlib.federated.job import Rows
from shardlib.untrusted.shown import shown


def read_rows(rows: Rows, batch: Tree, partition: int, partitions: int) -> Tree:
    """All rows of a client, as arrays of the host."""
    client_rows = rows(partition, partitions)
    who = f"the rows of partition {partition} of {partitions}"
    batch_leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    if jax.tree.structure(client_rows) != structure:
        raise BatchError(
            f"{who} are {shown(jax.tree.structure(client_rows))}, and a batch is {shown(structure)}"
        )
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(client_rows)]
    failures = [
        f"{path_text(path) or 'rows'} is {array.dtype}{list(array.shape)}, and in a batch"
        f" {leaf.dtype}{['rows', *np.shape(leaf)[1:]]}".replace("'", "")
        for (path, leaf), array in zip(batch_leaves, arrays, strict=True)
        if array.shape[1:] != np.shape(leaf)[1:]
        or not array.ndim
        or jax.dtypes.canonicalize_dtype(array.dtype) != leaf.dtype
    ]
    if not failures and len({len(array) for array in arrays}) > 1:
        failures = [
            f"{path_text(path) or 'rows'} has {len(array)} rows"
            for (path, _), array in zip(batch_leaves, arrays, strict=True)
        ]
    if failures:
        raise_all(BatchError, f"{who} are not those of a batch", failures)
    if not len(arrays[0]):
        raise DataError(
            f"partition {partition} of {partitions} has no rows: its client has nothing to train"
            " on\nTry: fewer partitions, or a client that does not take part"
        )
    return jax.tree.unflatten(structure, arrays)


def count(rows: Tree) -> int:
    """How many rows there are."""
    return len(jax.tree.leaves(rows)[0])


def batches(rows: Tree, size: int, epochs: int, key: tuple[int, ...]) -> Iterator[Tree]:
    """The batches of a round: passes over all rows, one after the other, each in an order of its
    own; what is left at the end and fills no batch is left out. Of fewer rows than one batch
    takes, some come twice.
    """
    many, order = count(rows), np.random.default_rng(key)
    waiting = np.zeros(0, np.int64)
    for _ in range(steps(many, size, epochs)):
        while len(waiting) < size:
            waiting = np.concatenate([waiting, order.permutation(many)])
        now, waiting = waiting[:size], waiting[size:]
        yield jax.tree.map(lambda array, now=now: array[now], rows)


def steps(many: int, size: int, epochs: int) -> int:
    """How many steps a round has.

    >>> steps(10, 4, 1), steps(10, 4, 2), steps(3, 4, 1)
    (2, 5, 1)

    Args:
        many: rows of the client.
        size: rows of a batch.
        epochs: passes over the rows.
    """
    return max(1, many * epochs // size)
