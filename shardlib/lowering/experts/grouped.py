"""A matmul of rows with the matrix of their group.

`jax.lax.ragged_dot` is a kernel of its own on TPU. On CPU and GPU it is expanded to a product of
all rows with all matrices, with a copy of the rows for every group (JAX 0.10 and 0.12 as they are
set by default; compiled for H100 ahead of time). Blocks of rows do without it: every group's rows
are cut into blocks, which are multiplied with its matrix one after another (the order of work of
MegaBlocks, arXiv:2211.15841), so that the FLOPs are those of the rows and of less than a block a
group, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardlib.errors import LayoutError

_Carry = TypeVar("_Carry")
#: Gradients of all groups, [G, D, F]; the sums of one, [D, F]; which one.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """How rows are multiplied.

    Attributes:
        kind: "ragged" for `jax.lax.ragged_dot`, "blocks" for blocks of rows.
        block: rows of a block.
    """

    kind: str = "ragged"
    block: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("ragged", "blocks") or self.block < 1:
            raise LayoutError(
                f"rows cannot be grouped as {self.kind!r} in blocks of {self.block}\nTry: ragged,"
                " or blocks of 128"
            )

    def matmul(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """Products of rows with the matrix of their group.

        Args:
            rows: [M, D], in the order of the groups; what is beyond the last group is not read.
            weights: [G, D, F].
            sizes: rows of every group, int32 [G].

        Returns:
            [M, F], zeros beyond the last group; the same holds for the gradient of the rows.
        """
        if self.kind == "blocks":
            return _in_blocks(self.block, rows, weights, sizes)
        real = (jnp.arange(rows.shape[0]) < sizes.sum())[
            :, None
        ]  # what a kernel leaves beyond the last group is not defined
        grouped_rows = jnp.where(real, rows, 0)
        if weights.shape[0] == 1:  # libtpu 0.0.42 makes no program of a kernel for one group
            return grouped_rows @ weights[0]
        return jnp.where(real, jax.lax.ragged_dot(grouped_rows, weights, sizes), 0)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Blocks of the rows of every group, in order; a block begins where its group does or where the
    block before ends, and the last one of a group may be short.

    Attributes:
        count: number of blocks.
        last: number of blocks up to each group, [G].
        starts, ends: rows of each group, [G].
        rows: rows of all groups, and those beyond.
        block: rows of a block.
    """

    count: jax.Array
    last: jax.Array
    starts: jax.Array
    ends: jax.Array
    rows: int
    block: int

    @staticmethod
    def of(sizes: jax.Array, rows: int, block: int) -> _Steps:
        block, ends = min(block, rows), jnp.cumsum(sizes)
        last = jnp.cumsum(-(-sizes // block))
        return _Steps(
            count=last[-1], last=last, starts=ends - sizes, ends=ends, rows=rows, block=block
        )

    def at(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(group, first row that is read, which of the rows read are of the block [block, 1])."""
        group = jnp.sum(self.last <= step)
        before = jnp.where(group > 0, self.last[group - 1], 0)
        begin = self.starts[group] + (step - before) * self.block
        first = jnp.minimum(
            begin, self.rows - self.block
        )  # the last blocks would end beyond the rows
        row = first + jnp.arange(self.block)
        return group, first, ((row >= begin) & (row < self.ends[group]))[:, None]

    def run(
        self, work: Callable[[_Carry, jax.Array, jax.Array, jax.Array], _Carry], start: _Carry
    ) -> _Carry:
        """Runs work(result so far, group, first row, rows of the block) for every block."""
        return jax.lax.fori_loop(
            0, self.count, lambda step, result: work(result, *self.at(step)), start
        )

    def read(self, array: jax.Array, first: jax.Array) -> jax.Array:
        """Rows of an array [M, ...] from a first one on."""
        return jax.lax.dynamic_slice_in_dim(array, first, self.block)


def _product(
    block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, turned: bool = False
) -> jax.Array:
    """Products [M, F] of rows [M, D] with weights [G, D, F]; or, turned, [M, D] of rows [M, F]."""
    steps = _Steps.of(sizes, rows.shape[0], block)

    def work(
        result: jax.Array, group: jax.Array, first: jax.Array, in_block: jax.Array
    ) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        product = jax.lax.dot_general(
            steps.read(rows, first),
            matrix,
            (((1,), (int(turned),)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return jax.lax.dynamic_update_slice_in_dim(
            result,
            jnp.where(in_block, product.astype(result.dtype), steps.read(result, first)),
            first,
            0,
        )

    return steps.run(
        work, jnp.zeros((rows.shape[0], weights.shape[1 if turned else 2]), rows.dtype)
    )


def _outer(
    block: int, rows: jax.Array, cotangent: jax.Array, weights: jax.Array, sizes: jax.Array
) -> jax.Array:
    """The gradient of the weights: sums over the rows of each group.

    The sums of one group are float32, and what is kept of all has the dtype of the weights: blocks
    of a group follow each other, and the last one leaves the whole sum.
    """
    steps = _Steps.of(sizes, rows.shape[0], block)

    def work(carry: _Sums, group: jax.Array, first: jax.Array, in_block: jax.Array) -> _Sums:
        result, sums, last = carry
        a, b = (
            jnp.where(in_block, steps.read(rows, first), 0),
            jnp.where(in_block, steps.read(cotangent, first), 0),
        )
        product = jnp.dot(a.T, b, preferred_element_type=jnp.float32)
        sums = jnp.where(last == group, sums, 0) + product
        weights_so_far = jax.lax.dynamic_update_index_in_dim(
            result, sums.astype(result.dtype), group, 0
        )
        return weights_so_far, sums, group

    start = (
        jnp.zeros(weights.shape, weights.dtype),
        jnp.zeros(weights.shape[1:], jnp.float32),
        jnp.full((), -1, sizes.dtype),
    )
    return steps.run(work, start)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _product(block, rows, weights, sizes)


def _forward(block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[Any, Any]:
    return _product(block, rows, weights, sizes), (rows, weights, sizes)


def _backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, sizes = saved
    return (
        _product(block, cotangent, weights, sizes, turned=True),
        _outer(block, rows, cotangent, weights, sizes),
        None,
    )


_in_blocks.defvjp(_forward, _backward)
