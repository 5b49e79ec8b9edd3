"""Is a state still there? A step donates the state that it is given: its buffers become those of
the next state.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import jax
from jax.core import Tracer

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import StateError, raise_all

_IS_DELETED = methodcaller("is_deleted")
#: Leaves that an error names.
NAMED = 3


def require_present(caller: str, state: Tree) -> None:
    """Refuses a state whose arrays were donated or deleted; a compiled program would read what is
    no longer there, which kills the process on simulated devices.
    """
    try:
        gone = any(
            map(_IS_DELETED, jax.tree.leaves(state))
        )  # hundreds of leaves at every step: some tens of microseconds
    except (AttributeError, jax.errors.JAXTypeError):  # arrays of NumPy, or traced ones
        gone = any(map(_deleted, jax.tree.leaves(state)))
    if not gone:
        return
    paths = [
        path_text(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if _deleted(leaf)
    ]
    more = [f"and {len(paths) - NAMED} more"] if len(paths) > NAMED else []
    raise_all(
        StateError,
        f"the state given to {caller} is no longer there: a step takes over the buffers of the"
        " state that it is given",
        [*(f"{path} was deleted" for path in paths[:NAMED]), *more],
        hint="use the state that step returned: state, metrics = program.step(state, batch)",
    )


def _deleted(leaf: Any) -> bool:
    return hasattr(leaf, "is_deleted") and not isinstance(leaf, Tracer) and leaf.is_deleted()
