"""Is a state one of this program? Asked once a call has failed, so that a good step pays nothing
for it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import StateError, raise_all
from shardlib.lowering.host_memory.disk.arrays import DiskArray
from shardlib.lowering.runtime.state import TrainState

#: Differences that an error names.
NAMED = 3
#: What a call raises that is given arrays that it was not compiled for.
FOREIGN = (TypeError, ValueError, IndexError)
OWN = (
    "a state of this very program, from program.init, program.step, or"
    " Checkpoints.restore(program), which fits it to another plan or mesh"
)


def require_state(asked: str, state: object) -> None:
    """Refuses what is no state at all."""
    if not isinstance(state, TrainState):
        raise StateError(
            f"{asked} was given"
            f" {'None' if state is None else f'a value of type {type(state).__name__}'}, which is"
            " no state of training\nTry: state = program.init(seed=0), and then state, metrics ="
            " program.step(state, batch)"
        )


def require_own(
    asked: str, found: Tree, wanted: Tree, *, error: Exception | None = None, laid_out: bool = True
) -> None:
    """Refuses a state of another program; does nothing where it is one of this program.

    Args:
        laid_out: whether arrays must have the dtypes and shardings of the program too.
    """
    others = _structure(found, wanted) or _arrays(found, wanted, laid_out=laid_out)
    moved = [] if others or not laid_out else _layouts(found, wanted)
    differences = others or moved
    if not differences:
        return
    movable = (
        moved
        and isinstance(found, TrainState)
        and not any(isinstance(leaf, DiskArray) for leaf in jax.tree.leaves(found))
    )
    hint = (
        "state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, program.state)),"
        " which lays it out as this program does"
        if movable
        else OWN
    )
    more = [f"and {len(differences) - NAMED} more"] if len(differences) > NAMED else []
    try:
        raise_all(
            StateError,
            f"the state given to {asked} is none of this program",
            [*differences[:NAMED], *more],
            hint=hint,
        )
    except StateError as refused:
        raise refused from error


def _structure(found: Tree, wanted: Tree) -> list[str]:
    """Arrays that are missing or too many, or else parts of another kind."""
    ours, theirs = (
        dict.fromkeys(path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        for tree in (wanted, found)
    )
    paths = [f"{path} is not in it" for path in ours if path not in theirs] + [
        f"{path} is in it, and not in the program's" for path in theirs if path not in ours
    ]
    if paths or jax.tree.structure(found) == jax.tree.structure(wanted):
        return paths
    names = (
        [field.name for field in fields(TrainState)]
        if isinstance(found, TrainState)
        else list(found)
    )
    pairs = [
        (
            name,
            *(
                getattr(tree, name) if isinstance(tree, TrainState) else tree[name]
                for tree in (found, wanted)
            ),
        )
        for name in names
    ]
    return [
        f"{name} is {_kind(one, other)}, the program has {_kind(other, one)}"
        for name, one, other in pairs
        if jax.tree.structure(one) != jax.tree.structure(other)
    ]


def _kind(tree: Tree, other: Tree) -> str:
    """What a tree is, in words that tell it from another one without arrays that differ."""
    return (
        ("None" if tree is None else f"a {type(tree).__name__}")
        if type(tree) is not type(other)
        else f"the tree {jax.tree.structure(tree)}"
    )


def _arrays(found: Tree, wanted: Tree, *, laid_out: bool) -> list[str]:
    """Arrays of another shape or dtype, of trees of one structure."""

    def text(leaf: Any) -> str:
        return (
            f"{leaf.dtype if hasattr(leaf, 'dtype') else np.asarray(leaf).dtype}"
            f"{list(np.shape(leaf))}"
            if laid_out
            else str(list(np.shape(leaf)))
        )

    return [
        f"{path_text(path)} is {text(leaf)}, the program has {text(asked)}"
        for (path, leaf), asked in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
        )
        if text(leaf) != text(asked)
    ]


def _layouts(found: Tree, wanted: Tree) -> list[str]:
    """Arrays on devices that lie there in another way."""
    return [
        f"{path_text(path)} is {_text(leaf.sharding, asked.sharding)}, the program has"
        f" {_text(asked.sharding, leaf.sharding)}"
        for (path, leaf), asked in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
        )
        if _lies_elsewhere(leaf, asked)
    ]


def _lies_elsewhere(leaf: Any, asked: jax.ShapeDtypeStruct) -> bool:
    if isinstance(leaf, DiskArray):
        one, other = (
            sharding.with_memory_kind(None)  # pyright: ignore[reportArgumentType]
            for sharding in (leaf.sharding, asked.sharding)
        )
        return not one.is_equivalent_to(other, len(asked.shape))
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return False  # such arrays are put where the program wants them
    return not leaf.sharding.is_equivalent_to(asked.sharding, leaf.ndim)


def _text(sharding: Any, other: Any) -> str:
    """A sharding in words that tell it from another one."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    mesh = (
        " x ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1)
        or "one device"
    )
    text = f"{sharding.spec} over {mesh}"
    if sharding.memory_kind != other.memory_kind:
        return f"{text} in {sharding.memory_kind}"
    if (
        isinstance(other, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and (sharding.spec, sharding.mesh.shape) == (other.spec, other.mesh.shape)
    ):
        return (
            f"{text}, devices {', '.join(str(device.id) for device in sharding.mesh.devices.flat)}"
        )
    return text
