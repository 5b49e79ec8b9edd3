"""A global batch is worked through in several parts, whose gradients are added up.

Every device takes each part from its own rows: the batch dim of B rows is seen as [B / parts,
parts], and part i is the column i. No row changes its device; a part is a strided sample of the
batch. Losses and metrics are averaged over the parts: `loss/contribution` has rewritten the loss of
a part so that this average is the loss of the whole batch. Metrics with a value for every row are
put together as the batch was taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.model import PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.graph.rows import RowDim
from shardlib.jax_types import KeyPath
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.lowering.runtime.random_keys import BatchDims, Fold
from shardlib.lowering.weights.reduction_plan import GradientReductions


def part_of(batch: Tree, dims: Mapping[str, int | None], parts: int) -> Tree:
    """The abstract batch of one part.

    Args:
        dims: dim of the rows of each array, by path; None where it has none.
    """
    if parts == 1:
        return batch
    failures = (
        []
        if any(dim is not None for dim in dims.values())
        else ["no array has a dim called 'batch'"]
    )

    def part(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
        dim = dims[batch_path(path)]
        shape = list(leaf.shape)
        if dim is not None:
            if shape[dim] % parts:
                failures.append(f"{batch_path(path)} has {shape[dim]} rows in dim {dim}")
            shape[dim] //= parts
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    tree = jax.tree_util.tree_map_with_path(part, batch)
    if failures:
        raise_all(
            BatchError,
            f"the batch cannot be worked through in {parts} microbatches",
            failures,
            hint="pin microbatches to a divisor of the batch",
        )
    return tree


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """How a batch is divided.

    Attributes:
        shardings: of each array of the batch, a tree like it.
        dims: batch dim of each array, by path; None where it has none.
        count: number of microbatches.
        repeated: see `shardlib.lowering.loss.contribution.share.Contribution`.
        by_row: for each array of the metrics where it has its rows; None, as for those beyond, for
            one that is averaged.
    """

    shardings: Tree
    dims: BatchDims
    count: int
    repeated: frozenset[int] = frozenset()
    by_row: tuple[RowDim | None, ...] = ()

    def whole(self, metrics: Tree) -> Tree:
        """Metrics of the whole batch."""
        leaves, structure = jax.tree.flatten(metrics)
        return structure.unflatten(
            [
                _mean(leaf) if rows is None else _unstack(leaf, rows)
                for leaf, rows in zip_longest(leaves, self.by_row[: len(leaves)])
            ]
        )

    def averages(
        self, values: jax.Array, metrics: Tree, value: jax.Array, last: Tree, after: Tree
    ) -> Tree:
        """(loss, (metrics, state)) of all parts, from those of all but the last, along a leading
        dim, and of the last.
        """

        def joined(earlier: jax.Array, latest: jax.Array) -> jax.Array:
            return jnp.concatenate([earlier, latest[None]])

        mean = _mean(joined(values, value)).astype(values.dtype)
        return mean, (self.whole(jax.tree.map(joined, metrics, last)), after)

    def entering(self, first: Tree, state: Tree) -> Tree:
        """The model state that a microbatch begins with."""
        leaves, structure = jax.tree.flatten(state)
        return structure.unflatten(
            [
                before if index in self.repeated else leaf
                for index, (before, leaf) in enumerate(
                    zip(jax.tree.leaves(first), leaves, strict=True)
                )
            ]
        )

    def split(self, batch: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
        """Stacks the parts along a new leading dim."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        cuts = [self.dims[batch_path(path)] for path, _ in leaves]
        stacked = [
            dim.stacked(leaf, self.count)
            if isinstance(dim, Fold)
            else _stack(leaf, dim, self.count, sharding)
            for (_, leaf), dim, sharding in zip(
                leaves, cuts, jax.tree.leaves(self.shardings), strict=True
            )
            if dim is not None
        ]

        def join(slices: list[jax.Array]) -> Tree:
            remaining = iter(slices)
            return structure.unflatten(
                [
                    leaf if dim is None else next(remaining)
                    for (_, leaf), dim in zip(leaves, cuts, strict=True)
                ]
            )

        return stacked, join


def _stack(leaf: jax.Array, dim: int, parts: int, sharding: NamedSharding) -> jax.Array:
    shape = (*leaf.shape[:dim], leaf.shape[dim] // parts, parts, *leaf.shape[dim + 1 :])
    stacked = jnp.moveaxis(leaf.reshape(shape), dim + 1, 0)
    return jax.lax.with_sharding_constraint(
        stacked, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    )


def _unstack(stacked: jax.Array, rows: RowDim) -> jax.Array:
    """The rows of the whole batch of those of its parts, as `_stack` took them."""
    parts, dim, inner = stacked.shape[0], rows.dim, rows.inner
    shape = stacked.shape[1:]
    seen = stacked.reshape(parts, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    return jnp.moveaxis(seen, 0, dim + 1).reshape(
        *shape[:dim], parts * shape[dim], *shape[dim + 1 :]
    )


def accumulated(
    loss: PureLoss,
    batch: Tree,
    microbatches: Microbatches,
    cut: Callable[[Tree], Tree],
    reductions: GradientReductions,
) -> Callable[[Tree, Tree], Tree]:
    """Gradients over all parts: (params, state) -> ((loss, (metrics, state)), gradients).

    Args:
        reductions: how gradients are reduced; says the dtypes of the accumulators.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)
    if microbatches.count == 1:
        return lambda params, state: differentiate(params, state, batch)
    stacked, join = microbatches.split(batch)

    def run(params: Tree, first: Tree) -> Any:
        def body(carry: Any, slices: list[Any]) -> Any:
            state, sums = microbatches.entering(first, carry[0]), carry[1]
            (value, (metrics, after)), gradients = differentiate(params, state, join(slices))
            sums = jax.tree.map(
                lambda total, gradient: total + gradient.astype(total.dtype), sums, cut(gradients)
            )
            return (after, cut(sums)), (value, metrics)

        zeros = cut(
            jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, reductions.accumulator(leaf.dtype)), params
            )
        )
        (after, sums), (values, metrics) = jax.lax.scan(body, (first, zeros), stacked)
        gradients = jax.tree.map(
            lambda total, leaf: (total / microbatches.count).astype(leaf.dtype), sums, params
        )
        return (values.mean(0), (microbatches.whole(metrics), after)), gradients

    return run


def _mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=0, dtype=jnp.promote_types(values.dtype, jnp.float32))
