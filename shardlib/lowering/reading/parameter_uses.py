"""Which operations use a parameter, and which dim of theirs is which dim of the parameter?

A parameter is followed through casts, transpositions and reshapes, and into the layers of a scan,
to the matmul, convolution, lookup or slice that uses it. There its gradient comes about, so there
it can be reduced (`lowering/weights/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shardlib._jax_compat import scan_counts
from shardlib.lowering.reading.use import Use, View
from shardlib.tracing.program import REMAT, Equation, Program, callee, flatten

#: An operation that adds a parameter to an activation.
ADDITION = "add"
#: Operations that take a part of a parameter.
SLICES: frozenset[str] = frozenset({"slice", "dynamic_slice"})
_LINEAR: frozenset[str] = frozenset({"dot_general", "conv_general_dilated", "gather", *SLICES})
_SAME: frozenset[str] = frozenset({"convert_element_type", "copy", "copy_p", "reduce_precision"})


def weight_uses(program: Program, parameters: int) -> Mapping[str, Use]:
    """Finds the matmuls, convolutions, lookups and slices of parameters, and additions of matrices
    to activations that have more dims.

    Returns:
        Path of the equation -> how it uses a parameter; an equation with several parameters among
    """
    uses: dict[str, Use] = {}
    views = {
        number: View(parameter=i, dims=tuple(range(len(program.avals[number].shape))))
        for i, number in enumerate(program.inputs[:parameters])
    }
    _follow(program, views, uses)
    return uses


def _follow(program: Program, parameter_views: Mapping[int, View], uses: dict[str, Use]) -> None:
    views, spread = dict(parameter_views), dict[int, View]()
    for equation in program.equations:
        operands = [views.get(number) for number in equation.inputs]
        beside = [spread.get(number) for number in equation.inputs]
        if any(beside) and not any(operands):
            _follow_spread(equation, beside, spread, uses)
            continue
        if not any(operands):
            continue
        if equation.name == "broadcast_in_dim" and (view := _with_more_dims(equation, operands)):
            spread[equation.outputs[0]] = view
            continue
        if equation.name in REMAT:
            _enter(
                flatten(callee(equation.eqn), f"{equation.path}/", equation.scope), operands, uses
            )
        elif equation.name == "scan":
            _enter(
                flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope),
                _scanned(equation, operands),
                uses,
            )
        elif equation.name in _LINEAR:
            using = [(i, view) for i, view in enumerate(operands) if view is not None]
            if len(using) == 1:
                uses[equation.path] = Use(
                    equation=equation,
                    operand=using[0][0],
                    view=using[0][1],
                    rows=_cast(program, equation),
                )
        elif (view := seen_through(equation, operands, program)) is not None:
            views[equation.outputs[0]] = view


def _with_more_dims(equation: Equation, operands: list[View | None]) -> View | None:
    """The view of a matrix that gets more dims, of one element each; None for anything else."""
    view, shape = operands[0], equation.params["shape"]
    aval = equation.eqn.invars[0].aval
    if view is None or len(operands) != 1 or sum(size > 1 for size in aval.shape) < 2:
        return None
    places = dict(zip(equation.params["broadcast_dimensions"], range(aval.ndim), strict=True))
    if any(
        size != (aval.shape[places[dim]] if dim in places else 1) for dim, size in enumerate(shape)
    ):
        return None
    return replace(
        view,
        dims=tuple(view.dims[places[dim]] if dim in places else None for dim in range(len(shape))),
    )


def _follow_spread(
    equation: Equation, operands: list[View | None], spread: dict[int, View], uses: dict[str, Use]
) -> None:
    """Follows a matrix that has got more dims through casts to the addition that it is for."""
    using = [(i, view) for i, view in enumerate(operands) if view is not None]
    if equation.name in _SAME:
        spread[equation.outputs[0]] = using[0][1]
    elif equation.name == ADDITION and len(using) == 1:
        uses[equation.path] = Use(equation=equation, operand=using[0][0], view=using[0][1])


def seen_through(equation: Equation, operands: list[View | None], program: Program) -> View | None:
    """What the result of an equation is a view of, for views of its operands; None where it is
    none.

    Args:
        operands: views of its operands; None where one is none.
    """
    if len(operands) != 1 or operands[0] is None:
        return None
    dims = _dims(equation, operands[0].dims, program.avals[equation.inputs[0]].shape)
    return None if dims is None else replace(operands[0], dims=dims)


def _cast(program: Program, equation: Equation) -> Any:
    """The narrower floating dtype that is all that becomes of what a lookup or slice takes; None
    where there is more.
    """
    if equation.name not in ("gather", *SLICES) or equation.outputs[0] in program.outputs:
        return None
    readers = [reader for reader in program.equations if equation.outputs[0] in reader.inputs]
    wide = program.avals[equation.outputs[0]].dtype
    if (
        len(readers) != 1
        or readers[0].name != "convert_element_type"
        or not jnp.issubdtype(wide, jnp.floating)
    ):
        return None
    narrow = readers[0].params["new_dtype"]
    return (
        narrow if jnp.issubdtype(narrow, jnp.floating) and narrow.itemsize < wide.itemsize else None
    )


def _enter(body: Program, operands: list[View | None], uses: dict[str, Use]) -> None:
    _follow(
        body,
        {
            number: view
            for number, view in zip(body.inputs, operands, strict=True)
            if view is not None
        },
        uses,
    )


def _scanned(equation: Equation, operands: list[View | None]) -> list[View | None]:
    """Views inside the body of a scan: constants as they are, carries unknown, stacks as one
    layer.
    """
    constants, carried = scan_counts(equation.params)
    layers = [
        (
            None
            if view is None
            else replace(
                view, dims=view.dims[1:], lengths=(*view.lengths, equation.params["length"])
            )
        )
        for view in operands[constants + carried :]
    ]
    return [*operands[:constants], *[None] * carried, *layers]


def _dims(
    equation: Equation, dims: tuple[int | None, ...], shape: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """The dims of a result that rearranges its one operand; None where it does anything else."""
    params: dict[str, Any] = equation.params
    if equation.name in _SAME:
        return dims
    if equation.name == "transpose":
        return tuple(dims[i] for i in params["permutation"])
    if equation.name == "squeeze":
        return tuple(dim for i, dim in enumerate(dims) if i not in params["dimensions"])
    if equation.name == "reshape" and params.get("dimensions") is None:
        return _reshaped(dims, shape, tuple(params["new_sizes"]))
    return None


def _reshaped(
    dims: tuple[int | None, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int | None, ...]:
    """The dims after a reshape: those that begin at the same stride, where one is a multiple of the
    other, share their major part.

    >>> _reshaped((0, 1), (8, 12), (8, 3, 4)), _reshaped((0, 1, 2), (8, 3, 4), (24, 4))
    ((0, 1, None), (0, 2))
    >>> _reshaped((0, 1), (8, 12), (12, 8))
    (None, None)
    """
    starts: dict[int, tuple[int, int | None]] = {}
    outside = 1
    for dim, size in zip(dims, before, strict=True):
        if size > 1:
            starts[outside] = size, dim
        outside *= size
    dims_after: list[int | None] = []
    outside = 1
    for size in after:
        before_size, dim = starts.get(outside, (0, None))
        dims_after.append(
            dim
            if size > 1 and before_size and (before_size % size == 0 or size % before_size == 0)
            else None
        )
        outside *= size
    return tuple(dims_after)
