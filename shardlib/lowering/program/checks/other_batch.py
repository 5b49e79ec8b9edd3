"""What is wrong with a batch that is another tree than the one a program was compiled for."""

from __future__ import annotations

import jax

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.untrusted import fit, printable

#: Names that a message lists of each kind.
MOST = 20


def refuse(batch: Tree, asked: Tree) -> None:
    """Says which arrays are missing and which are too much.

    Args:
        batch: what was given.
        asked: abstract, of another tree.

    Raises:
        BatchError: always.
    """
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
        "the batch is not the one that the program was compiled for",
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
