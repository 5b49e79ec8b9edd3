"""How does a contraction run in the layouts that were chosen for it, forward and backward?

Its operands are pinned where it reads them, and so are the cotangent that its gradients are made of
and these gradients. What the backward pass finds saved are the operands as they come, so that a
weight that is stored sharded is gathered again, and not kept gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.layout import Layout
from shardlib.lowering.mesh.pinning import held
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.propagation.contractions import arriving, used
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind

#: Primitives that multiply and add up; linear in each of their first two operands.
CONTRACTIONS: frozenset[str] = frozenset(
    {"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"}
)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """The layouts of one contraction while it runs.

    Attributes:
        operands: of every operand.
        result: of the result, and so of the cotangent that gradients are made of.
        settles: whether the result is pinned to that before anything else is asked of it.
        arriving: of every operand before it is gathered; None where it is not.
    """

    operands: tuple[NamedSharding, ...]
    result: NamedSharding
    settles: bool
    arriving: tuple[NamedSharding | None, ...] = (None, None)

    @staticmethod
    def of(
        equation: Equation, placements: Mapping[tuple[str, int], Layout], mesh: Mesh | AbstractMesh
    ) -> Pins | None:
        """The pins of an equation; None where it is no contraction, or the plan has no layouts for
        it.
        """
        if equation.name not in CONTRACTIONS:
            return None
        layouts = [
            layout
            for position in range(len(equation.inputs) + 1)
            if (layout := placements.get(used(equation.path, position))) is not None
        ]
        if len(layouts) <= len(equation.inputs):
            return None
        *operands, result = layouts
        return Pins(
            operands=tuple(named_sharding(mesh, operand) for operand in operands),
            result=named_sharding(mesh, result),
            settles=not follows(placements.get((equation.path, 0)), operands, result),
            arriving=tuple(
                None if layout is None else named_sharding(mesh, layout)
                for layout in (
                    placements.get(arriving(equation.path, position)) for position in (0, 1)
                )
            ),
        )

    def read(self, position: int, value: jax.Array) -> jax.Array:
        """An operand as the contraction reads it; also the gradient of that operand."""
        return held(value, self.operands[position])

    def scattered(self, position: int, gradient: jax.Array) -> jax.Array:
        """The gradient of an operand, sharded as that operand was before it was gathered."""
        before = self.arriving[position]
        return gradient if before is None else held(gradient, before)

    def made(self, value: jax.Array) -> jax.Array:
        """The result as the contraction makes it."""
        return held(value, self.result) if self.settles else value

    def cotangent(self, value: jax.Array) -> jax.Array:
        """The cotangent of the result as gradients read it."""
        return held(value, self.result)


def follows(planned: Layout | None, operands: Sequence[Layout], result: Layout) -> bool:
    """Whether the layout that is asked of a result is that of the operation, but for partial sums
    that are scattered.

    That the partitioner does right in every form there is; where other axes move as well, not in
    all of them.
    """
    if planned is None:
        return False
    partial = {axis for operand in operands for axis in operand.axes} - result.axes
    return all(
        planned_axes[: len(axes)] == axes and partial.issuperset(planned_axes[len(axes) :])
        for planned_axes, axes in zip(planned, result, strict=True)
    )


#: Operands of a contraction; the one whose gradient is asked for may be missing.
Operands = Sequence[jax.Array | None]


class Contraction(Protocol):
    """An operation that is linear in each of its first two operands."""

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation."""
        ...

    def sums_in(self, wide: np.dtype, read: np.dtype, /) -> bool:
        """Whether gradients of operands of dtype `read` are summed in the wider dtype `wide` of the
        result, and rounded after that.
        """
        ...

    def summed(
        self, position: int, operands: Operands, cotangent: jax.Array, shape: tuple[int, ...], /
    ) -> jax.Array:
        """The gradient of one operand as `slope` has it, of that shape, before it is rounded: in
        the dtype of the cotangent.
        """
        ...

    def slope(
        self,
        position: int,
        operands: Operands,
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct,
        /,
    ) -> jax.Array:
        """The gradient of one operand, in the dtype of `like`; among `operands`, that one is not
        looked at.

        Args:
            like: shape and dtype of the gradient.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AsWritten:
    """An equation as the model has it."""

    equation: Equation

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation."""
        return bind(self.equation, operands)[0]

    def sums_in(self, wide: np.dtype, read: np.dtype, /) -> bool:
        """See `Contraction`."""
        return self.equation.name == "dot_general" and wide.itemsize > read.itemsize

    def summed(
        self, position: int, operands: Operands, cotangent: jax.Array, shape: tuple[int, ...], /
    ) -> jax.Array:
        """See `Contraction`."""
        return self.slope(
            position, operands, cotangent, jax.ShapeDtypeStruct(shape, cotangent.dtype)
        )

    def slope(
        self,
        position: int,
        operands: Operands,
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct,
        /,
    ) -> jax.Array:
        """The gradient of one operand.

        Args:
            like: shape and dtype of the gradient.
        """
        left = operands[0]
        if position == 1 and self.equation.name == "dot_general" and left is not None:
            return _slope_of_right(self.equation, left, cotangent).astype(like.dtype)

        def linear(variable: jax.Array) -> jax.Array:
            return self.run(
                [
                    variable if operand is None or index == position else operand
                    for index, operand in enumerate(operands)
                ]
            )

        return jax.linear_transpose(linear, like)(cotangent)[0]


def _slope_of_right(equation: Equation, left: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of the right operand of a product, with the left operand on the left.

    JAX has the cotangent on the left and transposes what comes out. The compiler for CPUs then
    makes the cotangent transposed, with all that is fused into it, column after column: a quarter
    of the step of a small GPT-2.
    """
    (of_left, of_right), (batch_left, batch_right) = equation.eqn.params["dimension_numbers"]
    free_left = [dim for dim in range(left.ndim) if dim not in (*of_left, *batch_left)]
    batch = range(len(batch_left))
    product = jax.lax.dot_general(
        left,
        cotangent,
        ((free_left, range(len(batch), len(batch) + len(free_left))), (batch_left, batch)),
        precision=equation.eqn.params["precision"],
        preferred_element_type=equation.eqn.params["preferred_element_type"],
    )
    summed = [right for _, right in sorted(zip(of_left, of_right, strict=True))]
    free = [dim for dim in range(product.ndim) if dim not in (*batch_right, *summed)]
    order = [*batch_right, *summed, *free]
    return jax.lax.transpose(product, [order.index(dim) for dim in range(product.ndim)])


def pinned(contraction: Contraction, pins: Pins, operands: Sequence[jax.Array]) -> jax.Array:
    """The result of a contraction that runs in its own layouts, and whose gradients do."""
    like = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]

    def made(*operands: jax.Array) -> jax.Array:
        return pins.made(
            contraction.run(
                [pins.read(position, operand) for position, operand in enumerate(operands)]
            )
        )

    run = jax.custom_vjp(made)

    def forward(*operands: Any) -> Any:
        values = [operand.value for operand in operands]
        left, right = (operand.perturbed for operand in operands[:2])
        # Not `run`: what a policy of rematerialisation saves it must see.
        return made(*values), (
            values[0] if right else None,
            values[1] if left else None,
            values[2:],
        )

    def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
        left, right, others = saved
        if isinstance(cotangent, SymbolicZero):
            return (None,) * len(like)
        reads = [
            None if value is None else pins.read(position, value)
            for position, value in enumerate((left, right, *others))
        ]
        back = pins.cotangent(cotangent)

        def gradient(position: int) -> Any:
            if reads[1 - position] is None:
                return None
            aval = like[position]
            if pins.arriving[position] is None or not contraction.sums_in(back.dtype, aval.dtype):
                return pins.read(position, contraction.slope(position, reads, back, aval))
            # Rounded first, partial sums would be added up whole before they are scattered.
            summed = pins.read(position, contraction.summed(position, reads, back, aval.shape))
            return pins.scattered(position, summed).astype(aval.dtype)

        return gradient(0), gradient(1), *(None for _ in others)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*operands)
