"""The compiled program of a step: tokens of some requests in, the next token of each row out.

There is a program for next tokens alone, one with drafts, and one that computes chunks of prompts
beside them; everything else is an operand, so that nothing is compiled after `warm_up`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.graph import Problem
from shardlib.jax_types import KeyPath, Leaf
from shardlib.layout import Layout, MeshShape
from shardlib.lowering.mesh import axis_names, named_sharding
from shardlib.processes.progress import counted
from shardlib.propagation.colours import colour
from shardlib.serve.cache import (
    CacheGroup,
    Columns,
    Grid,
    Layered,
    Pages,
    Stored,
    TokenPlacement,
    by_layer,
    in_columns,
    is_stored,
    store,
)
from shardlib.serve.program import Forward, TracedForward
from shardlib.serve.propagation import _sizes, _walked, serving_layouts, serving_mesh
from shardlib.serve.requests import Capacity, SampledToken, Shape, Storage
from shardlib.serve.sampling import Choices, Chosen, Row, choices, choose, rows_of, told
from shardlib.serve.scheduling import ScheduledChunk
from shardlib.tracing.trace import served_problem

#: (weights, pages, tokens, where they stand, rows, choices) -> (what is chosen, pages).
StepFunction = Callable[..., tuple[Chosen, Mapping[str, Pages]]]


def step_function(forward: TracedForward, groups: Sequence[CacheGroup], grid: Grid) -> StepFunction:
    """The function that a step computes."""

    def step(
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        tokens: jax.Array,
        placement: TokenPlacement,
        rows: jax.Array,
        choices: Choices,
    ) -> tuple[Chosen, Mapping[str, Pages]]:
        logits, pages = forward(*weights, pages, tokens, placement, rows, groups, grid)
        return grid.by_row(choose, logits, choices), pages

    return step


class Step:
    """Compiled programs, and the pages that they read and write.

    Args:
        forward: the traced forward pass.
        weights: (params, state) on their devices.
        pages: of each call of attention, on their devices.
        sizes: of the programs, for a group of devices.
        grid: the devices.
    """

    def __init__(
        self,
        forward: TracedForward,
        weights: tuple[Tree, Tree],
        pages: Mapping[str, Pages],
        sizes: Capacity,
        grid: Grid,
    ) -> None:
        self.forward, self.weights, self.pages, self.sizes = forward, weights, pages, sizes
        self.grid = grid
        self._programs: dict[Shape, jax.stages.Compiled] = {}
        self._which: Callable[[ScheduledChunk], int] | None = None

    @property
    def compiled(self) -> int:
        """Programs that have been compiled."""
        return len(self._programs)

    def adapt(self, weights: tuple[Tree, Tree], which: Callable[[ScheduledChunk], int]) -> None:
        """Tokens have parameters of their own from now on; programs are compiled again where the
        weights have another structure.
        """
        if jax.tree.structure(weights) != jax.tree.structure(self.weights):
            self._programs = {}
        self.weights, self._which = weights, which

    def warm_up(self) -> None:
        """Compiles all programs."""
        for shape in counted(self.sizes.shapes, "compiling programs of the server"):
            self._run(self._operands(shape), {})

    def __call__(
        self,
        shares: Sequence[ScheduledChunk],
        allowed: Mapping[int, Sequence[np.ndarray]] | None = None,
    ) -> list[list[SampledToken]]:
        """Computes a step; returns what is chosen in the rows of each share."""
        shape = next(candidate for candidate in self.sizes.shapes if self._fits(candidate, shares))
        operands = self._operands(shape)
        rows_per_group = len(operands.rows) // self.grid.groups
        chunks, used = [0] * self.grid.groups, [0] * self.grid.groups
        rows, masks, row_numbers = dict[int, Row](), dict[int, np.ndarray](), list[list[int]]()
        for share in shares:
            group, slot = divmod(share.slot, self.sizes.slots)
            if share.count == 1 and shape.singles:
                tables, places = (
                    [table[share.slot] for table in operands.where.table],
                    np.asarray([slot]),
                )
            else:
                first, many = chunks[group], -(-share.count // shape.chunk)
                chunk_rows = group * shape.chunks + first + np.arange(many)
                tables = [
                    table[chunk_rows[0] : chunk_rows[-1] + 1] for table in operands.where.chunks
                ]
                places = shape.singles + first * shape.chunk + np.arange(share.count)
                chunks[group] += many
            for table, pages in zip(tables, share.request.held, strict=True):
                table[..., np.arange(pages.gone, pages.end) % table.shape[-1]] = pages.pages
            self._fill(operands, share, group * shape.tokens + places)
            here = range(used[group], used[group] + share.rows)
            operands.rows[group * rows_per_group :][here.start : here.stop] = places[
                share.count - share.rows :
            ]
            row_numbers.append([group * rows_per_group + row for row in here])
            used[group] += share.rows
            masks.update(
                zip(row_numbers[-1], (allowed or {}).get(share.request.number, ()), strict=False)
            )
            rows.update(zip(row_numbers[-1], rows_of(share), strict=True))
        sampled = self._run(operands, rows, masks)
        return [[sampled[row] for row in each] for each in row_numbers]

    def _compiled(self, beside: Tree) -> jax.stages.Compiled:
        def held(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: leaf.sharding, tree)

        weights, pages = held(self.weights), held(self.pages)
        return (
            jax.jit(
                step_function(self.forward, self.sizes.groups, self.grid),
                donate_argnums=1,
                in_shardings=(weights, pages, *self.grid.by_group(beside)),
                out_shardings=(self.grid.sharding(PartitionSpec()), pages),
            )
            .lower(self.weights, self.pages, *beside)
            .compile()
        )

    def holds(self, shares: Sequence[ScheduledChunk]) -> bool:
        """Returns whether one step computes them all."""
        return any(self._fits(shape, shares) for shape in self.sizes.shapes)

    def _fits(self, shape: Shape, shares: Sequence[ScheduledChunk]) -> bool:
        """Returns whether a program computes what groups of devices have."""
        used = [0] * self.grid.groups
        for share in shares:
            if share.count > 1 or not shape.singles:
                many = -(-share.count // shape.chunk) if shape.chunk else shape.chunks + 1
                used[share.slot // self.sizes.slots] += many
        return max(used) <= shape.chunks

    def _fill(self, operands: Operands, share: ScheduledChunk, places: np.ndarray) -> None:
        """The tokens of a share, at their places."""
        if share.count == 1:
            self._fill_one(operands, share, int(places[0]))
            return
        position = np.arange(share.first, share.first + share.count)
        page = self.sizes.page
        operands.tokens[places] = share.tokens
        if operands.where.adapter is not None and self._which is not None:
            operands.where.adapter[places] = self._which(share)
        operands.where.position[places] = position
        for entry, group in zip(operands.where.entry, share.request.held, strict=True):
            pages = np.asarray(group.pages, np.int32)[position // page - group.gone]
            entry[places] = pages * page + position % page

    def _fill_one(self, operands: Operands, share: ScheduledChunk, place: int) -> None:
        """The token of a share that has one: without the arrays that several want."""
        page, position = self.sizes.page, share.first
        operands.tokens[place], operands.where.position[place] = share.tokens[0], position
        if operands.where.adapter is not None and self._which is not None:
            operands.where.adapter[place] = self._which(share)
        for entry, group in zip(operands.where.entry, share.request.held, strict=True):
            entry[place] = group.at(position // page) * page + position % page

    def _operands(self, shape: Shape) -> Operands:
        blank = operands(self.sizes, shape, self.grid.groups)
        if self._which is None:
            return blank
        return replace(blank, where=replace(blank.where, adapter=np.zeros_like(blank.tokens)))

    def _run(
        self,
        operands: Operands,
        rows: Mapping[int, Row],
        masks: Mapping[int, np.ndarray] | None = None,
    ) -> dict[int, SampledToken]:
        row_choices = choices(
            [rows.get(number) for number in range(len(operands.rows))],
            vocab=self.forward.vocab,
            longest=self.sizes.table * self.sizes.page,
            allowed=masks,
        )
        beside = operands.tokens, operands.where, operands.rows, row_choices
        if operands.shape not in self._programs:
            self._programs[operands.shape] = self._compiled(beside)
        chosen, self.pages = self._programs[operands.shape](self.weights, self.pages, *beside)
        return told(chosen, rows)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Operands of a step, NumPy arrays that are filled in place.

    Attributes:
        shape: of the program.
        tokens: int32 [T], of each group of devices as its shape says.
        where: their places.
        rows: int32, of each group as many, tokens whose logits are wanted.
    """

    shape: Shape
    tokens: np.ndarray
    where: TokenPlacement
    rows: np.ndarray


def operands(sizes: Capacity, shape: Shape, devices: int) -> Operands:
    """Operands of a step that computes nothing."""
    tokens, groups = devices * shape.tokens, sizes.groups

    def tables(count: int) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros((devices * count, group.table), np.int32) for group in groups)

    return Operands(
        shape=shape,
        tokens=np.zeros(tokens, np.int32),
        where=TokenPlacement(
            position=np.zeros(tokens, np.int32),
            entry=tuple(np.full(tokens, group.pages * sizes.page, np.int32) for group in groups),
            table=tables(shape.singles),
            chunks=tables(shape.chunks),
        ),
        rows=np.zeros(devices * min(shape.tokens, sizes.rows), np.int32),
    )


# --------------------------------------------------------------------------------------------------
# Places of the weights and pages of a served model.
#
# Weights are sharded over all devices that share a layer (`shardlib.serve.propagation`); pages
# over groups of devices, and within a group over key heads, and over the tokens of a page where
# there are fewer heads than devices.


def both(model: Model, weights: Tree | int) -> tuple[Tree, Tree]:
    """(params, state) of what a user gave; state of params alone is that of a new model."""
    if isinstance(weights, int):
        return jax.jit(model.init)(weights)
    if isinstance(weights, tuple) and len(weights) == 2:
        return weights
    return weights, jax.jit(lambda: model.init(0)[1])()


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The spread of a model over devices.

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
class PlacedModel:
    """The shardings of the arrays of a served model.

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
            call.path: tuple(page(array, call.key_heads) for array in pages[call.path])
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
) -> PlacedModel:
    """Returns the shardings of the arrays of a model."""

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
    return PlacedModel(
        mesh=mesh,
        params=params,
        shared=jax.tree_util.tree_map_with_path(shared, model.params),
        storage=storage,
        layered=layered,
        factors={index: dims for index, dims in factors.items() if not any(specs[index])},
        threads=os.cpu_count() or 1,
    )


def scale_dims(problem: Problem) -> Mapping[str, int]:
    """The dim whose elements share a scale where weights are stored in eight bits, for every matrix
    by path: that of the residual stream, or the longest.
    """
    colouring = colour(problem)
    walked, sizes = _walked(problem, colouring), _sizes(problem, colouring)
    stream = max(sizes, key=lambda name: sizes[name], default=None)
    dims = dict[str, int]()
    for parameter in problem.parameters:
        names = colouring.parameters[parameter.path]
        inner = [
            dim
            for dim, size in enumerate(parameter.shape)
            if size > 1 and (names[dim] is None or names[dim] not in walked)
        ]
        if len(inner) > 1:
            dims[parameter.path] = next(
                (dim for dim in inner if names[dim] == stream),
                max(inner, key=lambda dim: parameter.shape[dim]),
            )
    return dims


def arranged(
    model: Model, forward: Forward, traced: TracedForward, *, tensor: int, data: int = 1
) -> Arrangement:
    """Spreads a model over groups of devices."""
    mesh = serving_mesh(tensor=tensor, key_heads=traced.key_heads, data=data)
    problem = served_problem(model, forward, longest=traced.longest)
    return Arrangement(
        mesh=mesh, layouts=serving_layouts(problem, mesh), scales=scale_dims(problem)
    )
