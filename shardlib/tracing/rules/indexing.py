"""Ops that look positions up: gather, scatter, dynamic slices.

Cutting the dim that a gather looks up (an embedding table's vocabulary) works as a lookup in the
local part, zero where the position lies elsewhere, and a sum over the parts: a *summed* factor.
Cutting what a scatter writes to is parallel, for every part takes the updates that fall into it;
cutting the updates of a scatter-add leaves partial results.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.graph.factors import Dim, Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, elements
from shardlib.tracing.rules.movement import resize


def gather(call: Call) -> Description:
    """`jax.lax.gather`, from its dimension numbers."""
    numbers, slices = call.params["dimension_numbers"], call.params["slice_sizes"]
    (operand, indices), (result,) = call.operands, call.results
    factors = Factors()
    index_dims: list[Dim] = [factors.parallel(size) for size in indices[:-1]] + [
        factors.keep(indices[-1])
    ]
    batch_dims = [i for i in range(len(result)) if i not in numbers.offset_dims]
    results: list[Dim] = [()] * len(result)
    for position, i in enumerate(batch_dims):
        results[i] = index_dims[position]
    source: list[Dim] = [()] * len(operand)
    for d, i in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        source[d] = index_dims[i]
    for d in numbers.collapsed_slice_dims:
        source[d] = (
            factors.sum(operand[d]) if d in numbers.start_index_map else factors.keep(operand[d])
        )
    window = [
        d
        for d in range(len(operand))
        if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
    ]
    for d, i in zip(window, numbers.offset_dims, strict=True):
        full = slices[d] == operand[d]
        source[d] = factors.parallel(operand[d]) if full else factors.keep(operand[d])
        results[i] = source[d] if full else factors.keep(result[i])
    return Description(factors.rule([tuple(source), tuple(index_dims)], [tuple(results)]), "gather")


def scatter(call: Call) -> Description:
    """The scatter family, from its dimension numbers; an overwriting scatter must see its updates
    in order.
    """
    numbers = call.params["dimension_numbers"]
    operand, indices, updates = call.operands
    factors = Factors()
    combine = factors.keep if call.name in ("scatter", "scatter-sub") else factors.sum
    index_dims: list[Dim] = [
        (factors.parallel if i in numbers.scatter_indices_batching_dims else combine)(size)
        for i, size in enumerate(indices[:-1])
    ] + [factors.keep(indices[-1])]
    target: list[Dim] = [()] * len(operand)
    update: list[Dim] = [()] * len(updates)
    batch_dims = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    for position, i in enumerate(batch_dims):
        update[i] = index_dims[position]
    for d, i in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        target[d] = index_dims[i]
    for d in numbers.inserted_window_dims:
        target[d] = factors.parallel(operand[d])
    window = [
        d
        for d in range(len(operand))
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    for d, i in zip(window, numbers.update_window_dims, strict=True):
        full = updates[i] == operand[d]
        target[d] = factors.parallel(operand[d]) if full else factors.keep(operand[d])
        update[i] = target[d] if full else factors.keep(updates[i])
    rule = factors.rule([tuple(target), tuple(index_dims), tuple(update)], [tuple(target)])
    return Description(rule, "scatter", 0.0 if call.name == "scatter" else elements(updates))


def dynamic_slice(call: Call) -> Description:
    """A window at a position known only at run time; dims that it covers as a whole may be
    sharded.
    """
    return Description(resize(call).rule, "gather")


def dynamic_update_slice(call: Call) -> Description:
    """(operand, window, position) -> the operand with the window written over it."""
    operand, update, *starts = call.operands
    factors = Factors()
    target: list[Dim] = []
    window: list[Dim] = []
    for size, part in zip(operand, update, strict=True):
        target.append(factors.parallel(size) if size == part else factors.keep(size))
        window.append(target[-1] if size == part else factors.keep(part))
    scalars: list[Dims] = [((),) * len(shape) for shape in starts]
    return Description(
        factors.rule([tuple(target), tuple(window), *scalars], [tuple(target)]), "scatter"
    )


TABLE: Mapping[str, Describe] = {
    "gather": gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        scatter,
    ),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
