"""Elements that are looked up in rows, and how they are picked where devices have parts of a row.

`jnp.take_along_axis(logits, targets[..., None], -1)` is a gather at computed positions, and its
gradient a scatter-add into an array of zeros as large as the logits. A partitioner moves whole rows
between devices for either. Summed over the row with zeros for all others, the element is found by
element-wise ops that need no row in one place, and so is its gradient:

>>> import jax.numpy as jnp
>>> picked(jnp.array([[5.0, 7.0]]), jnp.array([[1]]), None)
Array([[7.]], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardlib.jax_types import Value
from shardlib.tracing.program import Equation

#: Elements of a row that are picked at once; for more, each row is read too often.
MOST = 8


def is_element_lookup(equation: Equation) -> bool:
    """Whether a gather takes single elements along the last dim, a few in each row."""
    if equation.name != "gather":
        return False
    numbers, operand = equation.params["dimension_numbers"], equation.eqn.invars[0].aval
    indices, rows = equation.eqn.invars[1].aval, operand.ndim - 1
    return (
        rows > 0
        and jnp.issubdtype(operand.dtype, jnp.floating)
        and operand.shape[rows] > MOST
        and numbers.operand_batching_dims == tuple(range(rows))
        and numbers.start_indices_batching_dims == tuple(range(rows))
        and numbers.collapsed_slice_dims == numbers.start_index_map == (rows,)
        and not numbers.offset_dims
        and set(equation.params["slice_sizes"]) == {1}
        and indices.ndim == rows + 2
        and indices.shape[rows] <= MOST
    )


def picked(rows: Value, indices: Value, outside: float | None) -> Value:
    """Elements of rows, [..., n] of [..., size].

    Args:
        indices: int [..., n].
        outside: what is found where an index is out of range; None takes the nearest element.
    """
    size = rows.shape[-1]
    positions = jnp.clip(indices, 0, size - 1) if outside is None else indices
    hits = positions[..., None] == jnp.arange(size, dtype=indices.dtype)
    elements = jnp.sum(jnp.where(hits, rows[..., None, :], jnp.zeros((), rows.dtype)), axis=-1)
    if outside is None:
        return elements
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, elements, jnp.asarray(outside, rows.dtype))


def by_elements(equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
    """Runs a lookup of elements in rows as a sum over the row; None for any other equation."""
    if not is_element_lookup(equation):
        return None
    rows, indices = operands
    fill, mode = equation.params["fill_value"], equation.params["mode"]
    outside = (
        (float("nan") if fill is None else fill)
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP
        else None
    )
    return [picked(jnp.asarray(rows), jnp.asarray(indices)[..., 0], outside)]
