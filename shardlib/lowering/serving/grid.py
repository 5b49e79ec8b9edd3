"""Which devices compute what of a program that serves?

    data            groups of devices, each with requests, tokens and pages of its own
    tensor          key heads, with their queries and pages
    context         the tokens of every page, where there are fewer key heads than devices: every
                    device attends over its part, and parts are put together by their weights
                    (Milakov and Gimelshein, arXiv:1805.02867)

Weights move nowhere. A function of what one device holds is made one of whole arrays by
`jax.shard_map`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ArgumentError
from shardlib.jax_types import Function, Leaf, Value

#: Mesh axes that share every layer, as weights are sharded over them.
SHARED = ("tensor", "context")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The devices of a program.

    Attributes:
        mesh: of them; None for one.
    """

    mesh: Mesh | AbstractMesh | None = None

    def ways(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def groups(self) -> int:
        """Groups of devices with requests of their own."""
        return self.ways(("data",))

    def heads(self, count: int) -> tuple[str, ...]:
        """Axes over which so many key heads are cut."""
        return ("tensor",) if count % self.ways(("tensor",)) == 0 else ()

    def tokens(self, count: int) -> tuple[str, ...]:
        """Axes over which the tokens of pages with so many key heads are cut."""
        return tuple(axis for axis in SHARED if axis not in self.heads(count))

    def page_spec(self, page: Tree, heads: int) -> Tree:
        """How pages [layers, pages, tokens, ...] are cut: a spec for each array that they are."""
        tokens = self.tokens(heads)
        if page.shape[2] % self.ways(tokens):
            raise ArgumentError(
                f"page is {page.shape[2]}; pages of {heads} key heads are sharded over"
                f" {self.ways(tokens)} devices, which share the tokens of each\nTry: a multiple"
                f" of {self.ways(tokens)}"
            )
        along = self.heads(heads) if len(page.shape) > 4 else ()
        spec = None, "data", tokens or None, along or None
        return jax.tree.map(lambda array: PartitionSpec(*spec[: len(array.shape)]), page)

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """The sharding of a spec; None on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def by_group(self, tree: Tree) -> Tree:
        """Shardings of arrays of which each group of devices has its rows, and of scalars."""

        def of(leaf: Leaf) -> NamedSharding | None:
            return self.sharding(PartitionSpec("data") if leaf.ndim else PartitionSpec())

        return jax.tree.map(of, tree)

    def by_row(self, function: Function, logits: Value, beside: Tree) -> Tree:
        """What a function makes of each row of logits, on one device where their number divides
        over all of them, and else on all of its group.

        Args:
            function: (logits, beside) -> arrays with as many rows.
            logits: [D R, vocab].
        """
        if self.mesh is None or self.mesh.size == 1:
            return function(logits, beside)
        rows, vocab = logits.shape
        as_computed = PartitionSpec("data", SHARED if vocab % self.ways(SHARED) == 0 else None)
        # first as they are made, or weights are gathered for single rows
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(self.mesh, as_computed))
        row = PartitionSpec(("data", *SHARED) if rows % self.mesh.size == 0 else "data")
        specs = jax.tree.map(lambda array: row if array.ndim else PartitionSpec(), beside)
        return self.local(function, (row, specs), row)(logits, beside)

    def local(self, function: Function, arguments: Tree, results: Tree) -> Function:
        """A function of what one device holds as a function of whole arrays."""
        if self.mesh is None or self.mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False
        )

    def first(self, axes: tuple[str, ...], count: int) -> Value | int:
        """The first of the positions that a device has of so many a device; inside of `local`."""
        return jax.lax.axis_index(axes) * count if self.ways(axes) > 1 else 0
