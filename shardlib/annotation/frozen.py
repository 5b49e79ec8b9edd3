"""What becomes of arrays that are not trained and that no loss changes: teachers, buffers,
statistics in evaluation?

They come out of a front end as model state. `freeze` makes parameters of them that are not trained,
so that they are sharded, stored and gathered as parameters are; what is left as state is what the
loss updates, random streams, and integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree, path_parts, path_text
from shardlib.jax_types import Index, KeyPath


def freeze(model: Model, paths: Collection[str]) -> Model:
    """The model with some of its state among its parameters, not trained."""
    moved = _movable(model, paths)
    if not moved:
        return model
    moving = _Moving(params=model.params, state=model.state, moved=moved)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return moving.there(*model.init(seed))

    def bind(loss: Callable[..., Tree]) -> PureLoss:
        pure = model.bind(loss)

        def run(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, (metrics, after) = pure(*moving.back(params, state), batch)
            return value, (metrics, moving.left(after))

        return run

    params, state = moving.there(model.params, model.state)
    return replace(
        model,
        init=init,
        params=params,
        state=state,
        bind=bind,
        rebuild=lambda params, state: model.rebuild(*moving.back(params, state)),
        frozen=model.frozen | moved,
        axes={
            **model.axes,
            **{path: axes for path, axes in model.state_axes.items() if path in moved},
        },
        state_axes={path: axes for path, axes in model.state_axes.items() if path not in moved},
    )


@dataclass(frozen=True, kw_only=True)
class _Moving:
    """Trees of params and state, before and after some leaves of the state have moved.

    Attributes:
        params, state: abstract, before.
        moved: dotted paths of the state.
    """

    params: Tree
    state: Tree
    moved: frozenset[str]

    def there(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Trees after the move, of those before."""
        gone = [
            (path, leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            if path_text(path) in self.moved
        ]
        return _grafted(params, gone), self.left(state)

    def left(self, state: Tree) -> Tree:
        """The state after the move, of that before."""
        return _without(state, self.moved, "")

    def back(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Trees before the move, of those after."""
        params_by_path, theirs = _by_path(params), _by_path(state)
        ours = [leaf for path, leaf in params_by_path.items() if path not in self.moved]
        return self._params.unflatten(ours), self._state[1].unflatten(
            [
                params_by_path[path] if path in self.moved else theirs[path]
                for path in self._state[0]
            ]
        )

    @cached_property
    def _params(self) -> Any:
        return jax.tree.structure(self.params)

    @cached_property
    def _state(self) -> tuple[tuple[str, ...], Any]:
        return tuple(_by_path(self.state)), jax.tree.structure(self.state)


def _movable(model: Model, paths: Collection[str]) -> frozenset[str]:
    """Those whose way leads through dicts, here and there, to a place that is free."""
    movable = set[str]()
    for path, _ in jax.tree_util.tree_leaves_with_path(model.state):
        if (
            path_text(path) in paths
            and all(isinstance(key, jax.tree_util.DictKey) for key in path)
            and _free(model.params, path_parts(path))
        ):
            movable.add(path_text(path))
    distinct = all(
        len(_by_path(tree)) == len(jax.tree.leaves(tree)) for tree in (model.params, model.state)
    )
    return frozenset(movable.difference(_by_path(model.params))) if distinct else frozenset()


def _free(tree: Any, keys: KeyPath) -> bool:
    for key in keys:
        if type(tree) is not dict or any(type(sibling) is not type(key) for sibling in tree):
            return False
        if key not in tree:
            return True
        tree = tree[key]
    return False


def _grafted(tree: Tree, leaves: list[tuple[tuple[Any, ...], Any]]) -> Tree:
    """Nested dicts with more leaves."""
    for path, leaf in leaves:
        tree = _put(tree, path_parts(path), leaf)
    return tree


def _put(tree: Mapping[Any, Any], keys: KeyPath, leaf: Any) -> dict[Any, Any]:
    first, *inner_keys = keys
    return {
        **tree,
        first: _put(tree.get(first, {}), tuple(inner_keys), leaf) if inner_keys else leaf,
    }


def _without(tree: Any, gone: Collection[str], prefix: str) -> Any:
    """Nested dicts without some leaves, and without what held nothing else."""
    if type(tree) is not dict:
        return tree
    left: dict[Any, Any] = {}
    for key, branch in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if path in gone and type(branch) is not dict:
            continue
        inner = _without(branch, gone, path)
        if type(branch) is not dict or inner or not branch:
            left[key] = inner
    return left


def _by_path(tree: Tree) -> dict[str, Any]:
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
