"""An operation that uses a parameter, in the dtypes and layouts of a plan, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardlib.jax_types import Aval
from shardlib.lowering.mesh import eight_bit as eightbit
from shardlib.lowering.mesh.eight_bit import is_eight_bit
from shardlib.lowering.reading.contractions import Pins
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind


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

    @property
    def order(self) -> tuple[int, ...]:
        """Dims of the value in the order of the parameter's; () where they are, or where some are
        no dim of it.

        >>> View(parameter=0, dims=(1, 0)).order
        (1, 0)
        >>> View(parameter=0, dims=(0, 1)).order
        ()
        """
        dims = [dim for dim in self.dims if dim is not None]
        if len(dims) < len(self.dims) or dims == sorted(dims):
            return ()
        return tuple(sorted(range(len(dims)), key=lambda dim: dims[dim]))


@dataclass(frozen=True, kw_only=True)
class Use:
    """An operation that uses a parameter.

    Attributes:
        equation: the operation.
        operand: which operand of the operation the parameter is.
        view: how the operand relates to the parameter.
        rows: for a lookup whose rows are cast at once to a narrower dtype, that dtype.
        product: for a matmul in a dtype that is not the traced one, that dtype.
        rests: dtype of the stored parameter, where it is not the traced one.
        pins: for a contraction, the layouts in which it runs.
        again: whether the backward pass makes the other operand anew (rematerialisation).
    """

    equation: Equation
    operand: int
    view: View
    rows: Any = None
    product: Any = None
    rests: Any = None
    pins: Pins | None = None
    again: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return tuple(self.equation.eqn.invars[self.operand].aval.shape)

    @property
    def other(self) -> Aval:
        """Abstract value of the other operand of two."""
        return self.equation.eqn.invars[1 - self.operand].aval

    def run(self, operands: Sequence[jax.Array]) -> jax.Array:
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
    def dtype(self) -> np.dtype:
        """The traced dtype of the operand."""
        return self.equation.eqn.invars[self.operand].aval.dtype

    @property
    def _dims(self) -> tuple[eightbit.Numbers, tuple[int, int]]:
        left, right = self.equation.eqn.invars
        return self.equation.params["dimension_numbers"], (left.aval.ndim, right.aval.ndim)

    def gradient(
        self,
        position: int,
        other: jax.Array,
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct | jax.Array,
    ) -> jax.Array:
        """The gradient of one operand of a contraction, from the other one and the cotangent of the
        result; in the dtype of `like`.

        Args:
            like: shape and dtype of the gradient.
        """
        if is_eight_bit(self.product):
            return eightbit.gradient(*self._dims, position, other, cotangent, self.product).astype(
                like.dtype
            )
        return jax.linear_transpose(
            lambda variable: self.run((other, variable) if position else (variable, other)), like
        )(cotangent)[0]

    def slope(
        self,
        position: int,
        operands: Sequence[jax.Array | None],
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct,
    ) -> jax.Array:
        """The gradient of one operand, see `gradient`; among `operands`, that one is not looked
        at.

        Args:
            like: shape and dtype of the gradient.
        """
        operand = operands[1 - position]
        assert operand is not None, "a gradient is made of the other operand"
        return self.gradient(position, operand, cotangent, like)

    def pinned(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The operation in its own layouts."""
        pins = self.pins
        return (
            self.run(operands)
            if pins is None
            else pins.made(
                self.run(
                    [pins.read(position, operand) for position, operand in enumerate(operands)]
                )
            )
        )

    def to_activation(
        self, activation: jax.Array, weight: jax.Array, cotangent: jax.Array
    ) -> jax.Array:
        """The gradient of the other operand, in the operation's own layouts."""
        pins, position = self.pins, 1 - self.operand
        if pins is None:
            return self.gradient(position, weight, cotangent, activation)
        weight, cotangent = pins.read(self.operand, weight), pins.cotangent(cotangent)
        if pins.arriving[position] is None or not self.sums_in(cotangent.dtype, activation.dtype):
            return pins.read(position, self.gradient(position, weight, cotangent, activation))
        gradient = pins.read(
            position, self.summed(position, (weight, weight), cotangent, activation.shape)
        )
        return pins.scattered(position, gradient).astype(activation.dtype)

    def sums_in(self, wide: np.dtype, read: np.dtype) -> bool:
        """Whether gradients of operands of dtype `read` are summed in the wider dtype `wide` of the
        result, and rounded after that.

        Args:
            wide: dtype of the result.
            read: dtype of an operand.
        """
        return (
            self.product is None
            and self.equation.name == "dot_general"
            and wide.itemsize > read.itemsize
        )

    def summed(
        self,
        position: int,
        operands: Sequence[jax.Array | None],
        cotangent: jax.Array,
        shape: tuple[int, ...],
    ) -> jax.Array:
        """The gradient of one operand in the dtype of the cotangent, see `sums_in`; among
        `operands`, that one is not looked at.
        """
        operand = operands[1 - position]
        assert operand is not None, "a gradient is made of the other operand"
        operand = as_dtype(operand, self.equation.eqn.invars[1 - position].aval.dtype)
        like = jax.ShapeDtypeStruct(shape, cotangent.dtype)
        return jax.linear_transpose(
            lambda variable: bind(
                self.equation, (operand, variable) if position else (variable, operand)
            )[0],
            like,
        )(cotangent)[0]

    def kept(self, activation: jax.Array) -> jax.Array:
        """The other operand as the backward pass keeps it."""
        return (
            activation
            if self.product is None or is_eight_bit(self.product)
            else as_dtype(activation, self.product)
        )

    def found_again(self, activation: jax.Array) -> jax.Array:
        """The other operand as the backward pass finds it. What is made anew is found gathered, as
        the operation read it: products of one activation (queries, keys and values) and the
        gradients of their weights gather it once together. What is kept is kept sharded.
        """
        return (
            self.pins.read(1 - self.operand, activation)
            if self.again and self.pins is not None
            else activation
        )

    def moved(self, weight: jax.Array) -> jax.Array:
        """The operand in the narrowest dtype that it can be gathered in with no change of the
        result.
        """
        narrow = weight
        for dtype in (self.rows, self.product, self.rests):
            if (
                dtype is not None
                and not is_eight_bit(dtype)
                and dtype.itemsize < narrow.dtype.itemsize
            ):
                narrow = narrow.astype(dtype)
        return narrow

    def narrowed(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands in the dtypes that they are moved in."""
        return [
            self.moved(value) if position == self.operand else self.kept(value)
            for position, value in enumerate(operands)
        ]


def as_dtype(value: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A value in a dtype; itself where it is in that one.

    Args:
        dtype: wanted.
    """
    return value if value.dtype == dtype else value.astype(dtype)
