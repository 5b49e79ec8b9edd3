"""Weights that stand first in their products, in as many parts as there are threads: a form of
CPUs.

Of a few rows x [T, K] and weights w [K, N], XLA's products on CPUs copy w into blocks before they
multiply, and one product of so few rows keeps one thread busy. Held as w.T in parts [N / parts, K],
each part is the first operand of a product of its own; the copy is then of the few rows.

>>> held = in_columns(jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), summed=(0,), parts=1)
>>> [part.tolist() for part in held.parts], whole(held).tolist()
([[[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.jax_types import Function, Value
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind

#: Elements of a part at least; smaller ones take longer to hand to a thread than to multiply.
LEAST = 2**17
#: Rows that are few.
FEW = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Columns:
    """An array that products sum over the same dims of.

    Attributes:
        parts: [n, k] each: of the other dims, flattened, some; of the summed dims, flattened, all.
        summed: dims that products sum over, ascending.
        shape: of the array that it stands for.
    """

    parts: tuple[Value, ...]
    summed: tuple[int, ...] = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """Of the array that it stands for."""
        return jnp.dtype(self.parts[0].dtype)

    @property
    def sharding(self) -> Sharding:
        """Of the array that it stands for: whole on every device."""
        sharding = self.parts[0].sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        return sharding

    @property
    def free(self) -> tuple[int, ...]:
        """Dims that products keep."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.summed)


def in_columns(array: Value, *, summed: tuple[int, ...], parts: int) -> Columns:
    """Holds an array as the first operand of products."""
    free = tuple(dim for dim in range(array.ndim) if dim not in summed)
    rows = math.prod(array.shape[dim] for dim in free)
    flat = array.transpose(*free, *summed).reshape(rows, -1)
    count = max(1, min(parts, array.size // LEAST, rows))
    bounds = [rows * index // count for index in range(count + 1)]
    return Columns(
        parts=tuple(flat[first:last] for first, last in itertools.pairwise(bounds)),
        summed=summed,
        shape=tuple(array.shape),
    )


def whole(columns: Columns) -> Value:
    """The array that columns stand for."""
    order = *columns.free, *columns.summed
    flat = jnp.concatenate(columns.parts).reshape([columns.shape[dim] for dim in order])
    return flat.transpose(*(order.index(dim) for dim in range(len(order))))


def converted(columns: Columns, equation: Equation) -> Columns:
    """Columns in another dtype."""
    parts = tuple(bind(equation, [part])[0] for part in columns.parts)
    return Columns(parts=parts, summed=columns.summed, shape=columns.shape)


def product(equation: Equation, operands: Sequence[Value | Columns]) -> Value:
    """What a product with columns gives."""
    position = 0 if isinstance(operands[0], Columns) else 1
    columns, rows = operands[position], operands[1 - position]
    assert isinstance(columns, Columns) and not isinstance(rows, Columns)
    summed, _ = equation.params["dimension_numbers"]
    pairs = sorted(zip(summed[position], summed[1 - position], strict=True))
    along = [dim for _, dim in pairs]
    free = [dim for dim in range(rows.ndim) if dim not in along]
    sizes = [rows.shape[dim] for dim in free]
    flat = rows.transpose(*free, *along).reshape(math.prod(sizes), -1)
    result = _multiplied(equation, position)(columns.parts, flat)
    free_sizes = [columns.shape[dim] for dim in columns.free]
    return (
        result.reshape(*sizes, *free_sizes)
        if position == 1
        else result.T.reshape(*free_sizes, *sizes)
    )


def _multiplied(equation: Equation, position: int) -> Function:
    """(parts [n, k], rows [m, k]) -> [m, N]; rows of several tokens are one product. What parts
    make of few rows is turned when it has been put together; many rows cost less where they stand
    first than to turn.
    """
    numbers = ((1,), (1,)), ((), ())
    precision = equation.params["precision"]
    pair = precision if isinstance(precision, tuple) else (precision, precision)

    def product(parts: tuple[Value, ...], rows: Value) -> Value:
        few = rows.shape[0] <= FEW
        order = pair if few == (position == 0) else pair[::-1]
        products = [
            bind(
                equation,
                [part, rows] if few else [rows, part],
                dimension_numbers=numbers,
                precision=order if isinstance(precision, tuple) else precision,
            )[0]
            for part in parts
        ]
        return jnp.concatenate(products).T if few else jnp.concatenate(products, axis=1)

    def of_tokens(
        size: int, batched: tuple[tuple[bool, ...], bool], parts: tuple[Value, ...], rows: Value
    ) -> tuple[Value, bool]:
        if any(batched[0]):
            dims = tuple(0 if mapped else None for mapped in batched[0]), 0 if batched[1] else None
            return jax.vmap(product, in_axes=dims)(parts, rows), True
        result = again(parts, rows.reshape(-1, rows.shape[-1]))
        return result.reshape(size, -1, result.shape[-1]), True

    again = custom_vmap(product)
    again.def_vmap(of_tokens)
    return again
