"""What is wrong with a batch that is not the one that a program was compiled for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.lowering.runtime.random_keys import dtype_of
from shardlib.untrusted import fit, printable

#: Names that a message lists of each kind.
MOST = 20
#: How messages begin.
OTHER = "the batch is not the one that the program was compiled for"


def require(batch: Tree, asked: Tree) -> None:
    """Refuses a batch that is not the one that a program was compiled for."""
    expected, structure = jax.tree_util.tree_flatten_with_path(asked)
    if jax.tree.structure(batch) != structure:
        _refuse(batch, asked)
    failures = [
        f"{batch_path(path)}: found {found}, compiled for {one.dtype}{list(one.shape)}"
        for (path, one), leaf in zip(expected, jax.tree.leaves(batch), strict=True)
        if (found := _mismatch(leaf, one))
    ]
    if failures:
        hint = "compile again for these shapes, or pad the batch"
        raise_all(BatchError, OTHER, failures, hint=hint)


def _refuse(batch: Tree, asked: Tree) -> None:
    """Says which arrays are missing and which are too much."""
    given, wanted = _named(batch), _named(asked)
    failures = [
        f"{name} is missing, {leaf.dtype}{list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name not in given
    ]
    failures += [f"{name} is too much" for name in given if name not in wanted]
    if not failures:
        failures = [f"it is {_containers(batch)}, compiled for {_containers(asked)}"]
    more = len(failures) - MOST
    raise_all(
        BatchError,
        OTHER,
        [*failures[:MOST], *([f"{more:,} more"] if more > 0 else [])],
        hint="give the step the arrays that the program was compiled for, or compile again for"
        " these",
    )


def _named(batch: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch by the names that errors give them."""
    return {
        fit(printable(batch_path(path)), 200): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    }


def _containers(batch: Tree) -> str:
    """A batch as containers, whose arrays are stars."""
    text = str(jax.tree.structure(batch)).removeprefix("PyTreeDef(").removesuffix(")")
    return fit(printable(text), 300)


def _mismatch(leaf: Any, asked: jax.ShapeDtypeStruct) -> str:
    """What a leaf is, where that is not what was asked; 64-bit host numbers stand for what JAX
    makes of them.
    """
    shape = tuple(np.shape(leaf))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if shape == tuple(asked.shape) and dtype_of(leaf) == asked.dtype:
        return ""
    return f"{dtype}{list(shape)}"
