"""Which operations use a parameter, and which dim of theirs is which dim of the parameter?

A parameter is followed through casts, transpositions and reshapes, and into the layers of a scan,
to the matmul, convolution or lookup that uses it. There its gradient comes about, so there it can
be reduced (`lowering/weights/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._jax_compat import scan_counts
from shardlib.lowering.mesh import eight_bit as eightbit
from shardlib.lowering.mesh.eight_bit import is_eight_bit
from shardlib.lowering.reading.contractions import Pins
from shardlib.tracing.program import REMAT, Equation, Program, callee, flatten
from shardlib.tracing.rewriting.binding import bind

_SAME: frozenset[str] = frozenset({"convert_element_type", "copy", "copy_p", "reduce_precision"})


@dataclass(frozen=True, kw_only=True)
class View:
    """A value that holds the elements of one parameter, or of one layer of it.

    Attributes:
        parameter: index of the parameter.
        dims: for every dim of the value the dim of the parameter whose major part it is; None where
            it is none.
        lengths: of the scans whose slices it is, the outermost first.
    """

    parameter: int
    dims: tuple[int | None, ...]
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Use:
    """An operation that uses a parameter.

    Attributes:
        equation: the operation.
        operand: which operand of the operation the parameter is.
        view: how the operand relates to the parameter.
        rows: for a lookup whose rows are cast at once to a narrower dtype, that dtype.
        product: for a matmul in a dtype that is not the traced one, that dtype.
        rests: dtype of the parameter at rest, where it is not the traced one.
        pins: for a contraction, the layouts in which it runs.
    """

    equation: Equation
    operand: int
    view: View
    rows: Any = None
    product: Any = None
    rests: Any = None
    pins: Pins | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return tuple(self.equation.eqn.invars[self.operand].aval.shape)

    @property
    def other(self) -> Any:
        """Abstract value of the other operand of two."""
        return self.equation.eqn.invars[1 - self.operand].aval

    def run(self, operands: Sequence[Any]) -> Any:
        """The operation, in the dtype of the product; its result has the traced dtype."""
        if self.product is None:
            return bind(
                self.equation,
                [
                    as_dtype(operand, variable.aval.dtype)
                    for operand, variable in zip(operands, self.equation.eqn.invars, strict=True)
                ],
            )[0]
        if is_eight_bit(self.product):
            return eightbit.product(
                *self._dims, self.product, self.equation.eqn.outvars[0].aval.dtype
            )(*operands)
        narrow = [as_dtype(operand, self.product) for operand in operands]
        return bind(self.equation, narrow, preferred_element_type=self.product)[0].astype(
            self.equation.eqn.outvars[0].aval.dtype
        )

    @property
    def dtype(self) -> Any:
        """The traced dtype of the operand."""
        return self.equation.eqn.invars[self.operand].aval.dtype

    @property
    def _dims(self) -> tuple[eightbit.Numbers, tuple[int, int]]:
        left, right = self.equation.eqn.invars
        return self.equation.params["dimension_numbers"], (left.aval.ndim, right.aval.ndim)

    def gradient(self, wanted: int, other: Any, cotangent: Any, like: jax.ShapeDtypeStruct) -> Any:
        """The gradient of one operand of a contraction, from the other one and the cotangent of the
        result; in the dtype of `like`.
        """
        if is_eight_bit(self.product):
            return eightbit.gradient(*self._dims, wanted, other, cotangent, self.product).astype(
                like.dtype
            )
        return jax.linear_transpose(
            lambda one: self.run((other, one) if wanted else (one, other)), like
        )(cotangent)[0]

    def slope(
        self, wanted: int, operands: Sequence[Any], cotangent: Any, like: jax.ShapeDtypeStruct
    ) -> Any:
        """The gradient of one operand, see `gradient`; among `operands`, that one is not looked
        at.
        """
        return self.gradient(wanted, operands[1 - wanted], cotangent, like)

    def pinned(self, operands: Sequence[Any]) -> Any:
        """The operation in its own layouts."""
        pins = self.pins
        return (
            self.run(operands)
            if pins is None
            else pins.made(
                self.run([pins.read(at, operand) for at, operand in enumerate(operands)])
            )
        )

    def to_activation(self, activation: Any, weight: Any, cotangent: Any) -> Any:
        """The gradient of the other operand, in the operation's own layouts."""
        pins, at = self.pins, 1 - self.operand
        if pins is None:
            return self.gradient(at, weight, cotangent, activation)
        return pins.read(
            at,
            self.gradient(
                at, pins.read(self.operand, weight), pins.cotangent(cotangent), activation
            ),
        )

    def kept(self, activation: Any) -> Any:
        """The other operand as the backward pass keeps it."""
        return (
            activation
            if self.product is None or is_eight_bit(self.product)
            else as_dtype(activation, self.product)
        )

    def moved(self, weight: Any) -> Any:
        """The operand in the narrowest dtype that it can be gathered in with no change of the
        result.
        """
        found = weight
        for dtype in (self.rows, self.product, self.rests):
            if (
                dtype is not None
                and not is_eight_bit(dtype)
                and dtype.itemsize < found.dtype.itemsize
            ):
                found = found.astype(dtype)
        return found

    def narrowed(self, operands: Sequence[Any]) -> list[Any]:
        """The operands in the dtypes that they are moved in."""
        return [
            self.moved(value) if at == self.operand else self.kept(value)
            for at, value in enumerate(operands)
        ]


def as_dtype(value: Any, dtype: Any) -> Any:
    """A value in a dtype; itself where it is in that one."""
    return value if value.dtype == dtype else value.astype(dtype)


def weight_uses(program: Program, parameters: int) -> Mapping[str, Use]:
    """Finds the matmuls, convolutions and lookups of parameters.

    Args:
        program: the loss; its first inputs are the parameters.
        parameters: how many inputs are parameters.

    Returns:
        Path of the equation -> how it uses a parameter; an equation with several parameters among
        its operands is left out.
    """
    found: dict[str, Use] = {}
    views = {
        number: View(parameter=i, dims=tuple(range(len(program.avals[number].shape))))
        for i, number in enumerate(program.inputs[:parameters])
    }
    _follow(program, views, found)
    return found


def _follow(program: Program, known: Mapping[int, View], found: dict[str, Use]) -> None:
    views = dict(known)
    for equation in program.equations:
        operands = [views.get(number) for number in equation.inputs]
        if not any(operands):
            continue
        if equation.name in REMAT:
            _enter(
                flatten(callee(equation.eqn), f"{equation.path}/", equation.scope), operands, found
            )
        elif equation.name == "scan":
            _enter(
                flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope),
                _scanned(equation, operands),
                found,
            )
        elif equation.name in ("dot_general", "conv_general_dilated", "gather"):
            using = [(i, view) for i, view in enumerate(operands) if view is not None]
            if len(using) == 1:
                found[equation.path] = Use(
                    equation=equation,
                    operand=using[0][0],
                    view=using[0][1],
                    rows=_cast(program, equation),
                )
        elif (view := seen_through(equation, operands, program)) is not None:
            views[equation.outputs[0]] = view


def seen_through(equation: Equation, operands: list[View | None], program: Program) -> View | None:
    """What the result of an equation is a view of, for views of its operands; None where it is
    none.
    """
    if len(operands) != 1 or operands[0] is None:
        return None
    dims = _dims(equation, operands[0].dims, program.avals[equation.inputs[0]].shape)
    return None if dims is None else replace(operands[0], dims=dims)


def _cast(program: Program, equation: Equation) -> Any:
    """The narrower floating dtype that is all that becomes of a lookup's rows; None where there is
    more.
    """
    if equation.name != "gather" or equation.outputs[0] in program.outputs:
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


def _enter(body: Program, operands: list[View | None], found: dict[str, Use]) -> None:
    _follow(
        body,
        {
            number: view
            for number, view in zip(body.inputs, operands, strict=True)
            if view is not None
        },
        found,
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

    >>> _reshaped((0, 1), (8, 12), (8, 3, 4)), _reshaped((0, 1, 2), (8, 3, 4), (24, 4)), _reshaped((0, 1), (8, 12), (12, 8))
    ((0, 1, None), (0, 2), (None, None))
    """
    starts: dict[int, tuple[int, int | None]] = {}
    outside = 1
    for dim, size in zip(dims, before, strict=True):
        if size > 1:
            starts[outside] = size, dim
        outside *= size
    found: list[int | None] = []
    outside = 1
    for size in after:
        other, dim = starts.get(outside, (0, None))
        found.append(
            dim if size > 1 and other and (other % size == 0 or size % other == 0) else None
        )
        outside *= size
    return tuple(found)
