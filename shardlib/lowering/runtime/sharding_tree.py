"""A tree of arrays whose leaves show which device has which part: treescope's picture
(`treescope.render_array_sharding`), in the tree that treescope draws.

Values are neither shown nor read, so that nothing is computed or fetched, whatever the size of an
array and wherever its shards are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from shardlib.annotation.trees.paths import Tree

#: Arrays and devices beyond which no tree is drawn: a picture has a colour for each device.
_ARRAYS, _DEVICES = 200, 64
#: Lines up to which the tree is unfolded.
_LINES = 100


def sharding_tree(parts: Mapping[str, Tree]) -> str:
    """HTML that fetches nothing; empty without treescope, where arrays have been donated, and where
    there are too many arrays or devices to look at.
    """
    arrays = [leaf for leaf in jax.tree.leaves(dict(parts)) if isinstance(leaf, jax.Array)]
    if not 0 < len(arrays) <= _ARRAYS or any(leaf.is_deleted() for leaf in arrays):
        return ""
    if max(len(leaf.sharding.device_set) for leaf in arrays) > _DEVICES:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # treescope asks NumPy for old names
        return _drawn(jax.tree.map(_without_keys, dict(parts)))


def _drawn(parts: dict[str, Tree]) -> str:
    try:
        import treescope
    except ImportError:
        return ""

    def shown(value: Any, path: str | None) -> Any:
        """The picture of an array in place of its values."""
        if not isinstance(value, jax.Array):
            return None
        figure: Any = treescope.render_array_sharding(value)
        return treescope.IPythonVisualization(figure, replace=True)

    with (
        treescope.active_autovisualizer.set_scoped(shown),
        treescope.using_expansion_strategy(max_height=_LINES, target_width=1),
    ):
        return treescope.render_to_html(parts, compressed=True)


def _without_keys(leaf: Any) -> Any:
    """A leaf, or shape and dtype of random keys, which treescope would print."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf
