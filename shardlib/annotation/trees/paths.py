"""How is an array of a tree called? By a path written with dots: "layers.mlp.up.kernel"."""

from __future__ import annotations

from typing import Any

from shardlib.jax_types import KeyPath

#: A pytree of arrays, tracers or `jax.ShapeDtypeStruct`, without boxes or metadata.
Tree = Any
#: The same path by its parts: keys of dicts, names of fields, positions in lists.
Path = tuple[Any, ...]


def path_parts(path: KeyPath) -> Path:
    """The keys of a key path of `jax.tree_util`: keys of dicts, names of fields, positions in
    lists.
    """
    return tuple(
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path
    )


def path_text(path: KeyPath) -> str:
    """A key path of `jax.tree_util` as dotted text, without brackets or quotes.

    >>> import jax
    >>> leaves = jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1.0}]})
    >>> path_text(leaves[0][0])
    'layers.0.kernel'
    """
    return ".".join(map(str, path_parts(path)))
