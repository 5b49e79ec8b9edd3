"""Where do weights and pages of a served model live?

Weights are sharded over all devices that share a layer (`shardlib.propagation.serving`); pages over
groups of devices, and within a group over key heads, and over the tokens of a page where there are
fewer heads than devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.axes import MeshShape
from shardlib.jax_types import KeyPath, Leaf
from shardlib.layout import Layout
from shardlib.lowering.mesh.device_mesh import axis_names
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.serving.cache_groups import CacheGroup
from shardlib.lowering.serving.grid import Grid
from shardlib.lowering.serving.held.columns import Columns, in_columns
from shardlib.lowering.serving.pages import Pages
from shardlib.lowering.serving.program import Forward, TracedForward
from shardlib.lowering.serving.stored import Layered, Stored, by_layer, is_stored, store
from shardlib.propagation.serving import scale_dims, serving_layouts, serving_mesh
from shardlib.serving.scheduling.capacity import Storage
from shardlib.tracing.forward_only import served_problem


def both(model: Model, weights: Tree | int) -> tuple[Tree, Tree]:
    """(params, state) of what a user gave; state of params alone is that of a new model."""
    if isinstance(weights, int):
        return jax.jit(model.init)(weights)
    if isinstance(weights, tuple) and len(weights) == 2:
        return weights
    return weights, jax.jit(lambda: model.init(0)[1])()


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a model is spread over devices.

    Attributes:
        mesh: sizes of the mesh axes.
        layouts: of each parameter, by path.
        scales: of each matrix, the dim whose elements share a scale in eight bits.
    """

    mesh: MeshShape
    layouts: Mapping[str, Layout]
    scales: Mapping[str, int]

    def abstract(self) -> AbstractMesh:
        """The mesh without devices."""
        names, sizes = axis_names(self.mesh, {})
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where arrays of a served model live.

    Attributes:
        mesh: of its devices, or of none where programs are only compiled.
        params: shardings, as a tree like the params.
        shared: of each, the dim whose elements share a scale where it is stored in eight bits; -1
            for none.
        storage: of weights and the cache.
        layered: numbers of the params that are held by layers.
        factors: of the params that are held as `Columns`, by number: the dims that products sum
            over, of a row where they are held by layers.
        threads: that compute products.
    """

    mesh: Mesh | AbstractMesh
    params: Tree
    shared: Tree
    storage: Storage
    layered: frozenset[int] = frozenset()
    factors: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    threads: int = 1

    @property
    def grid(self) -> Grid:
        """The devices of its programs."""
        return Grid(mesh=self.mesh)

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def weights(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Params and state on their devices."""
        stored = jax.device_put(params, self.params)
        if self.storage.weights != "model":
            shardings = jax.tree.map(lambda array: array.sharding, self.described(stored))
            stored = jax.jit(self._stored, out_shardings=shardings)(stored)
        if self.layered or self.factors:
            leaves, tree = jax.tree.flatten(stored, is_leaf=is_stored)
            stored = None  # or every array is there twice
            for index in self.layered:
                leaves[index] = by_layer(leaves[index])
            for index, summed in self.factors.items():
                leaves[index] = self._columns(leaves[index], summed)
            stored = jax.tree.unflatten(tree, leaves)
        return stored, jax.device_put(state, self.whole)

    def _columns(self, leaf: Leaf | Layered, summed: tuple[int, ...]) -> Columns | Layered:
        converted = jax.jit(
            partial(in_columns, summed=summed, parts=self.threads), out_shardings=self.whole
        )
        if isinstance(leaf, Layered):
            return Layered(rows=tuple(converted(row) for row in leaf.rows))
        return converted(leaf)

    def described(self, params: Tree) -> Tree:
        """Params as they are stored, without their contents, each with its sharding."""
        if self.storage.weights == "model":
            return jax.tree.map(_like, params, self.params)
        shapes = jax.eval_shape(self._stored, params)

        def of(leaf: Tree, sharding: NamedSharding, dim: int) -> Tree:
            if not isinstance(leaf, Stored):
                return _like(leaf, sharding)
            spec = [*sharding.spec, *[None] * (len(leaf.values.shape) - len(sharding.spec))]
            spec[dim] = None
            scale = NamedSharding(self.mesh, PartitionSpec(*spec))
            return replace(
                leaf, values=_like(leaf.values, sharding), scale=_like(leaf.scale, scale)
            )

        return jax.tree.map(of, shapes, self.params, self.shared, is_leaf=is_stored)

    def _stored(self, params: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf, dim: leaf if dim < 0 else store(leaf, dim, self.storage.weights),
            params,
            self.shared,
        )

    def of_pages(
        self, forward: TracedForward, groups: Sequence[CacheGroup], size: int
    ) -> Mapping[str, Tree]:
        """Pages without their contents, each with its sharding."""
        grid = self.grid
        pages = forward.new_pages(groups, size, self.storage.cache, grid.groups)

        def page(array: Tree, heads: int) -> Tree:
            return jax.tree.map(
                lambda array, spec: jax.ShapeDtypeStruct(
                    array.shape, array.dtype, sharding=grid.sharding(spec)
                ),
                array,
                grid.page_spec(array, heads),
            )

        return {
            call.path: tuple(page(one, call.key_heads) for one in pages[call.path])
            for call in forward.calls
        }

    def pages(
        self, forward: TracedForward, groups: Sequence[CacheGroup], size: int
    ) -> Mapping[str, Pages]:
        """Empty pages on their devices, for each call of attention."""
        shapes = self.of_pages(forward, groups, size)
        return jax.jit(
            lambda: jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), shapes),
            out_shardings=jax.tree.map(lambda page: page.sharding, shapes),
        )()


def _like(leaf: Leaf, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def placed(
    model: Model,
    arrangement: Arrangement,
    mesh: Mesh | AbstractMesh,
    storage: Storage | None = None,
    cpu: TracedForward | None = None,
) -> Placed:
    """Where the arrays of a model live.

    Args:
        storage: of weights and the cache; None for those of the model.
    """

    storage = storage or Storage()

    def of(path: KeyPath, _: Leaf) -> NamedSharding:
        return named_sharding(mesh, arrangement.layouts[path_text(path) or "params"])

    def shared(path: KeyPath, leaf: Leaf) -> int:
        dim = arrangement.scales.get(path_text(path) or "params", -1)
        return dim if jnp.issubdtype(leaf.dtype, jnp.floating) else -1

    params = jax.tree_util.tree_map_with_path(of, model.params)
    specs = [sharding.spec for sharding in jax.tree.leaves(params)]
    rows = {index for index, spec in enumerate(specs) if not (*spec, None)[0]}
    layered = frozenset(rows & cpu.scanned) if cpu else frozenset[int]()
    factors = cpu.factors if cpu and storage.weights == "model" else {}
    return Placed(
        mesh=mesh,
        params=params,
        shared=jax.tree_util.tree_map_with_path(shared, model.params),
        storage=storage,
        layered=layered,
        factors={index: dims for index, dims in factors.items() if not any(specs[index])},
        threads=os.cpu_count() or 1,
    )


def arranged(
    model: Model, forward: Forward, traced: TracedForward, *, tensor: int, data: int = 1
) -> Arrangement:
    """Spreads a model over groups of devices."""
    mesh = serving_mesh(tensor=tensor, key_heads=traced.key_heads, data=data)
    problem = served_problem(model, forward, longest=traced.longest)
    return Arrangement(
        mesh=mesh, layouts=serving_layouts(problem, mesh), scales=scale_dims(problem)
    )
