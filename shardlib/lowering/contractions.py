"""Contractions in the layouts of a plan, forward and backward.

The operands are constrained to their compute sharding, and so are the cotangent from which
gradients are computed and the gradients themselves. Operands are saved for the backward pass before
they are gathered, so that a weight that is stored sharded is all-gathered again, and not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.findings import Finding
from shardlib.graph import Window
from shardlib.jax_types import Aval, EqnParam
from shardlib.layout import Layout, MeshShape
from shardlib.lowering import collectives
from shardlib.lowering.collectives import DotDims, Regions, is_eight_bit
from shardlib.lowering.mesh import constrain, named_sharding
from shardlib.propagation.contractions import gather_key, use_key
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting import EquationCallback, Walk, bind

#: (path of an equation, index of its result), as `Walk.on_value` gets them.
ValueSource = tuple[str, int]
#: Layouts of the values of a loss.
ValueLayouts = Mapping[ValueSource, Layout]

#: Primitives that multiply and sum; linear in each of their first two operands.
CONTRACTIONS: frozenset[str] = frozenset(
    {"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"}
)


@dataclass(frozen=True, kw_only=True)
class ContractionShardings:
    """The layouts of one contraction while it runs.

    Attributes:
        operands: layout of each operand.
        result: layout of the result and of its cotangent.
        constrains_result: whether the result is constrained to `result` before any other layout
            of the plan applies.
        ungathered: layout of each operand before it is gathered; None if it is not gathered.
    """

    operands: tuple[NamedSharding, ...]
    result: NamedSharding
    constrains_result: bool
    ungathered: tuple[NamedSharding | None, ...] = (None, None)

    @staticmethod
    def of(
        equation: Equation, value_layouts: ValueLayouts, mesh: Mesh | AbstractMesh
    ) -> ContractionShardings | None:
        """The shardings of an equation; None if it is not a contraction, or if the plan has
        none for it.
        """
        if equation.name not in CONTRACTIONS:
            return None
        layouts = [
            layout
            for position in range(len(equation.inputs) + 1)
            if (layout := value_layouts.get(use_key(equation.path, position))) is not None
        ]
        if len(layouts) <= len(equation.inputs):
            return None
        *operands, result = layouts
        return ContractionShardings(
            operands=tuple(named_sharding(mesh, operand) for operand in operands),
            result=named_sharding(mesh, result),
            constrains_result=not only_scatters(
                value_layouts.get((equation.path, 0)), operands, result
            ),
            ungathered=tuple(
                None if layout is None else named_sharding(mesh, layout)
                for layout in (
                    value_layouts.get(gather_key(equation.path, position)) for position in (0, 1)
                )
            ),
        )

    def run(self, contraction: Contraction, operands: Sequence[jax.Array]) -> jax.Array:
        """The result of a contraction in these layouts."""
        return self.constrain_result(
            contraction.run(
                [self.constrain_operand(k, operand) for k, operand in enumerate(operands)]
            )
        )

    def gradient(
        self,
        contraction: Contraction,
        position: int,
        operands: Operands,
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct | jax.Array,
    ) -> jax.Array:
        """The gradient of one operand in its layout, from operands and cotangent in theirs."""
        if self.ungathered[position] is None or not contraction.widens(cotangent.dtype, like.dtype):
            aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
            return self.constrain_operand(
                position, contraction.operand_gradient(position, operands, cotangent, aval)
            )
        # If partial sums were rounded first, they would be all-reduced, and scattered after that.
        aval = jax.ShapeDtypeStruct(like.shape, cotangent.dtype)
        summed = self.constrain_operand(
            position, contraction.operand_gradient(position, operands, cotangent, aval)
        )
        return self.scatter_gradient(position, summed).astype(like.dtype)

    def constrain_operand(self, position: int, value: jax.Array) -> jax.Array:
        """An operand as the contraction reads it; also the gradient of that operand."""
        return constrain(value, self.operands[position])

    def scatter_gradient(self, position: int, gradient: jax.Array) -> jax.Array:
        """The gradient of an operand, in the sharding of the operand before it was gathered."""
        sharding = self.ungathered[position]
        return gradient if sharding is None else constrain(gradient, sharding)

    def constrain_result(self, value: jax.Array) -> jax.Array:
        """The result in the layout that the contraction computes."""
        return constrain(value, self.result) if self.constrains_result else value

    def constrain_cotangent(self, value: jax.Array) -> jax.Array:
        """The cotangent of the result in the layout that the gradients read."""
        return constrain(value, self.result)


def only_scatters(planned: Layout | None, operands: Sequence[Layout], result: Layout) -> bool:
    """True if the planned layout of a result is that of the operation, except that partial sums are
    reduce-scattered.

    The partitioner handles this case in all its forms; not so if other axes move as well.
    """
    if planned is None:
        return False
    partial = {axis for operand in operands for axis in operand.axes} - result.axes
    return all(
        planned_axes[: len(axes)] == axes and partial.issuperset(planned_axes[len(axes) :])
        for planned_axes, axes in zip(planned, result, strict=True)
    )


#: Operands of a contraction; the operand whose gradient is computed may be None.
Operands = Sequence[jax.Array | None]


class Contraction(Protocol):
    """An operation that is linear in each of its first two operands."""

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation."""
        ...

    def widens(self, out_dtype: np.dtype, in_dtype: np.dtype, /) -> bool:
        """True if gradients of operands are summed in the wider dtype of the result, and rounded
        after that.
        """
        ...

    def operand_gradient(
        self, position: int, operands: Operands, cotangent: jax.Array, like: jax.ShapeDtypeStruct, /
    ) -> jax.Array:
        """The gradient of one operand, in the dtype of `like`: that of the operand, or the wider
        one of the cotangent if `widens` is true. `operands[position]` is ignored.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelContraction:
    """A contraction as the model's equation computes it."""

    equation: Equation

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation."""
        return bind(self.equation, operands)[0]

    def widens(self, out_dtype: np.dtype, in_dtype: np.dtype, /) -> bool:
        """See `Contraction`."""
        return self.equation.name == "dot_general" and out_dtype.itemsize > in_dtype.itemsize

    def operand_gradient(
        self, position: int, operands: Operands, cotangent: jax.Array, like: jax.ShapeDtypeStruct, /
    ) -> jax.Array:
        """See `Contraction`."""
        left = operands[0]
        if position == 1 and self.equation.name == "dot_general" and left is not None:
            return _right_gradient(self.equation, left, cotangent).astype(like.dtype)

        def linear(variable: jax.Array) -> jax.Array:
            return self.run(
                [
                    variable if operand is None or index == position else operand
                    for index, operand in enumerate(operands)
                ]
            )

        return jax.linear_transpose(linear, like)(cotangent)[0]


def _right_gradient(equation: Equation, left: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of the right operand of a product, computed with the left operand on the left.

    JAX puts the cotangent on the left and transposes the result. XLA's CPU compiler then computes
    the transposed cotangent, with all that is fused into it, column by column: a quarter of the
    step time of a small GPT-2.
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


def run_in_layouts(
    contraction: Contraction, shardings: ContractionShardings, operands: Sequence[jax.Array]
) -> jax.Array:
    """The result of a contraction in its planned layouts, with its gradients in theirs."""
    avals = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]

    def constrained_product(*operands: jax.Array) -> jax.Array:
        return shardings.run(contraction, operands)

    run = jax.custom_vjp(constrained_product)

    def forward(*operands: Any) -> Any:
        values = [operand.value for operand in operands]
        left, right = (operand.perturbed for operand in operands[:2])
        # Not `run`: the remat policy must see what it saves.
        return constrained_product(*values), (
            values[0] if right else None,
            values[1] if left else None,
            values[2:],
        )

    def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
        left, right, others = saved
        if isinstance(cotangent, SymbolicZero):
            return (None,) * len(avals)
        inputs = [
            None if value is None else shardings.constrain_operand(position, value)
            for position, value in enumerate((left, right, *others))
        ]
        cotangent = shardings.constrain_cotangent(cotangent)

        def gradient(position: int) -> Any:
            if inputs[1 - position] is None:
                return None
            return shardings.gradient(contraction, position, inputs, cotangent, avals[position])

        return gradient(0), gradient(1), *(None for _ in others)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*operands)


# --------------------------------------------------------------------------------------------------
# Interleaving: a fused dim sharded so that each of its pieces is.
#
# Where the tensor axis shards a fused dim (`shardlib.propagation.colours`), the program keeps it in
# another order: device t of T has part t of the first piece, then part t of the second, and so on,
# the order of Megatron-LM's fused weights, here for any pieces:
#
#     order of the model     q0 q1 q2 q3 k0 k1 k2 k3
#     interleaved over T=2   q0 q1 k0 k1 | q2 q3 k2 k3
#
# A split of the interleaved dim then takes each device's part of a piece without communication. Ops
# that treat all positions alike (products, sums, activations) run unchanged. Parameters are stored
# in the model's order and are interleaved where the program reads them: a weight sharded by columns
# is first resharded by rows, so that the reordering is local (two all-to-alls of the device's shard
# of the weight). Every other op that reads or produces the dim has it in the model's order, at the
# cost of a reordering.

#: Sizes of the pieces of a dim, in the model's order.
PieceSizes = tuple[int, ...]
#: Interleaved dims of an array, with their pieces.
FusedDims = Mapping[int, PieceSizes]


def interleaved(value: jax.Array, dim: int, sizes: PieceSizes, shards: int) -> jax.Array:
    """A value with the positions of a dim in the interleaved order.

    >>> interleaved(jnp.arange(8), 0, (4, 4), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return interleave(split_pieces(value, dim, sizes), dim, shards)


def deinterleaved(value: jax.Array, dim: int, sizes: PieceSizes, shards: int) -> jax.Array:
    """The reverse of `interleaved`."""
    return jnp.concatenate(split_interleaved(value, dim, sizes, shards), axis=dim)


def split_pieces(value: jax.Array, dim: int, sizes: PieceSizes) -> list[jax.Array]:
    """The pieces of a dim in the model's order."""
    return jnp.split(value, list(accumulate(sizes))[:-1], axis=dim)


def split_interleaved(
    value: jax.Array, dim: int, sizes: PieceSizes, shards: int
) -> list[jax.Array]:
    """The pieces of an interleaved dim; no communication, since each device's part of the dim
    consists of its parts of the pieces.
    """
    by_shard = _split_dim(value, dim, (shards, value.shape[dim] // shards))
    parts = split_pieces(by_shard, dim + 1, tuple(size // shards for size in sizes))
    return [
        part.reshape(*value.shape[:dim], size, *value.shape[dim + 1 :])
        for part, size in zip(parts, sizes, strict=True)
    ]


def interleave(values: Sequence[jax.Array], dim: int, shards: int) -> jax.Array:
    """The reverse of `split_interleaved`."""
    parts = [_split_dim(value, dim, (shards, value.shape[dim] // shards)) for value in values]
    fused = jnp.concatenate(parts, axis=dim + 1)
    return fused.reshape(*fused.shape[:dim], shards * fused.shape[dim + 1], *fused.shape[dim + 2 :])


def _split_dim(value: jax.Array, dim: int, sizes: tuple[int, ...]) -> jax.Array:
    return value.reshape(*value.shape[:dim], *sizes, *value.shape[dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class PieceOp:
    """An op that splits a fused dim or makes one of its pieces.

    Attributes:
        dim: the fused dim.
        sizes: its pieces.
        windows: of every result (split, slice) or operand (concatenate, pad), its range of the
            fused dim.
    """

    dim: int
    sizes: PieceSizes
    windows: tuple[Window, ...]

    def run(
        self, equation: Equation, operands: Sequence[jax.Array], shards: int
    ) -> list[jax.Array]:
        """The results of the op; the fused dim is interleaved, its pieces are not."""
        if equation.name in ("split", "slice"):
            parts = split_interleaved(operands[0], self.dim, self.sizes, shards)
            return [self._joined_pieces(parts, window) for window in self.windows]
        if equation.name == "concatenate":
            return [
                interleave(
                    [
                        piece
                        for operand, window in zip(operands, self.windows, strict=True)
                        for piece in self._split_window(operand, window)
                    ],
                    self.dim,
                    shards,
                )
            ]
        assert equation.name == "pad", equation.name
        (window,) = self.windows
        before, after = window.start, sum(self.sizes) - window.start - window.size
        filled = [
            jnp.full(
                (*operands[0].shape[: self.dim], size, *operands[0].shape[self.dim + 1 :]),
                operands[1],
            )
            for size in (before, after)
        ]
        filled_dim = jnp.concatenate([filled[0], operands[0], filled[1]], axis=self.dim)
        return [interleave(split_pieces(filled_dim, self.dim, self.sizes), self.dim, shards)]

    def _joined_pieces(self, parts: Sequence[jax.Array], window: Window) -> jax.Array:
        pieces = [parts[index] for index in self._piece_indices(window)] or [
            split_pieces(parts[0], self.dim, (0, 0))[0]
        ]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=self.dim)

    def _split_window(self, operand: jax.Array, window: Window) -> list[jax.Array]:
        return split_pieces(
            operand, self.dim, tuple(self.sizes[index] for index in self._piece_indices(window))
        )

    def _piece_indices(self, window: Window) -> list[int]:
        starts = [0, *accumulate(self.sizes)]
        return [
            index
            for index in range(len(self.sizes))
            if window.start <= starts[index] < window.start + window.size
        ]


@dataclass(frozen=True, kw_only=True)
class PieceReshape:
    """A reshape between a fused dim of n equal pieces and a dim of size n.

    Attributes:
        dim: the fused dim, of the operand or of the result; the dim of size n has the same position
            on the other side.
        sizes: its pieces.
        splits: whether the fused dim is the operand's.
    """

    dim: int
    sizes: PieceSizes
    splits: bool

    def run(
        self, equation: Equation, operands: Sequence[jax.Array], shards: int
    ) -> list[jax.Array]:
        """The result of the reshape; the fused dim is interleaved."""
        (value,), shape = operands, tuple(equation.eqn.outvars[0].aval.shape)
        count, size = len(self.sizes), self.sizes[0]
        if self.splits:
            split = _split_dim(value, self.dim, (shards, count, size // shards))
            return [jnp.swapaxes(split, self.dim, self.dim + 1).reshape(shape)]
        outer_shape = shape[: self.dim]
        inner_shape = shape[self.dim + 1 :]
        split = value.reshape(*outer_shape, count, shards, size // shards, *inner_shape)
        return [jnp.swapaxes(split, self.dim, self.dim + 1).reshape(shape)]


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """The operations of a program that change where fused dims are interleaved.

    Attributes:
        shards: parts of every piece.
        parameters: interleaved dims of parameters, by number.
        slices: interleaved dims of slices of stacked parameters, by the path of the slice.
        piece_ops: ops that split fused dims, by path.
        operands: dims of operands whose order changes before an op: path -> operand -> dim ->
            (pieces, whether to interleave).
        results: dims of results to be interleaved, by path and index.
        findings: fused dims that are sharded in the model's order.
    """

    shards: int = 1
    parameters: Mapping[int, FusedDims] = field(default_factory=dict)
    slices: Mapping[str, FusedDims] = field(default_factory=dict)
    piece_ops: Mapping[str, PieceOp | PieceReshape] = field(default_factory=dict)
    operands: Mapping[str, Mapping[int, Mapping[int, tuple[PieceSizes, bool]]]] = field(
        default_factory=dict
    )
    results: Mapping[tuple[str, int], FusedDims] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def wrap(self, walk: Walk) -> Walk:
        """A walk that does the same as another, on interleaved dims."""
        return (
            replace(walk, on_value=self._place(walk), run=self._run(walk.run))
            if self.shards > 1
            else walk
        )

    def _place(self, walk: Walk) -> Callable[[str, int, jax.Array], jax.Array]:
        def place(path: str, index: int, value: jax.Array) -> jax.Array:
            for dim, sizes in self.results.get((path, index), {}).items():
                value = interleaved(value, dim, sizes, self.shards)
            return walk.apply(path, index, value)

        return place

    def _run(self, inner: EquationCallback | None) -> EquationCallback:
        def run(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
            reorderings = self.operands.get(equation.path)
            if reorderings is None and equation.path not in self.piece_ops:
                return None if inner is None else inner(equation, operands)
            values = [
                self._reordered(value, (reorderings or {}).get(position, {}))
                for position, value in enumerate(operands)
            ]
            if equation.path in self.piece_ops:
                return self.piece_ops[equation.path].run(equation, values, self.shards)
            results = None if inner is None else inner(equation, values)
            return bind(equation, values) if results is None else results

        return run

    def _reordered(
        self, value: jax.Array, dims: Mapping[int, tuple[PieceSizes, bool]]
    ) -> jax.Array:
        for dim, (sizes, to_interleaved) in dims.items():
            value = (interleaved if to_interleaved else deinterleaved)(
                value, dim, sizes, self.shards
            )
        return value


#: An interleaving of no dims.
NO_INTERLEAVING = Interleaving()


def interleaved_parameter(
    value: jax.Array,
    fused_dims: FusedDims,
    shards: int,
    forward_shardings: tuple[NamedSharding, NamedSharding],
    backward_shardings: tuple[NamedSharding, NamedSharding],
) -> jax.Array:
    """A parameter with interleaved dims, as the program reads it.

    Args:
        forward_shardings, backward_shardings: (in use, while dims are reordered), of the parameter
            and of its gradient.
    """

    def reordered(value: Any, reorder: Callable[..., Any], shardings: tuple[Any, Any]) -> Any:
        in_use, reordering = shardings
        # Constrained on both sides: otherwise the compiler makes the gradient in the sharding in
        # between, and gathers activations for it.
        value = jax.lax.with_sharding_constraint(
            jax.lax.with_sharding_constraint(value, in_use), reordering
        )
        for dim, sizes in fused_dims.items():
            value = reorder(value, dim, sizes, shards)
        return jax.lax.with_sharding_constraint(
            jax.lax.with_sharding_constraint(value, reordering), in_use
        )

    @jax.custom_vjp
    def in_use(value: jax.Array) -> jax.Array:
        return reordered(value, interleaved, forward_shardings)

    in_use.defvjp(
        lambda value: (in_use(value), None),
        lambda _, cotangent: (reordered(cotangent, deinterleaved, backward_shardings),),
    )
    return in_use(value)


def reordering_layout(
    layout: Layout, fused_dims: FusedDims, shape: Sequence[int], mesh: MeshShape
) -> Layout:
    """The layout in which a parameter's fused dims are reordered: these are not sharded, and their
    mesh axes shard another dim that divides, if there is one.

    >>> str(reordering_layout(Layout((), ("tensor",)), {1: (8, 8)}, (4, 16), MeshShape(tensor=4)))
    '[tensor, -]'
    """
    dims = [() if dim in fused_dims else axes for dim, axes in enumerate(layout)]
    for axis in (axis for dim in fused_dims for axis in layout[dim]):
        candidates = [
            dim
            for dim, axes in enumerate(dims)
            if dim not in fused_dims and shape[dim] % (mesh.ways(axes) * mesh[axis]) == 0
        ]
        if candidates:
            dims[candidates[0]] = (*dims[candidates[0]], axis)
    return Layout(*dims)


# --------------------------------------------------------------------------------------------------
# Grouped convolutions, whose sums over rows are computed in a manual region.
#
# Under automatic partitioning, the gradient of such a kernel is wrong: XLA adds the partial sums of
# all devices, including devices with the same rows. With rows sharded over data in a mesh of
# data=4 x tensor=2, the gradient of a depthwise kernel that tensor does not shard is doubled
# (jaxlib 0.10.2 and 0.12.0.1, in plain JAX).


@dataclass(frozen=True, kw_only=True)
class GroupedConvolution:
    """A contraction that is a grouped convolution.

    Attributes:
        contraction: its automatically partitioned form.
        equation: the model's equation.
        shardings: its layouts.
        overrides: parameters of the primitive that differ from the model's.
    """

    contraction: Contraction
    equation: Equation
    shardings: ContractionShardings
    overrides: dict[str, EqnParam]

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation. With `batch_group_count` it is a gradient inside the user's own step: the
        features that it sums over are rows.
        """
        numbers, groups = self._numbers, self.equation.params["batch_group_count"]
        rows = _axes(self.shardings.operands[0], numbers.lhs_spec[1])
        if groups == 1 or not rows:
            return self.contraction.run(operands)
        channels = self._channels(groups)

        def local(left: jax.Array, right: jax.Array) -> jax.Array:
            count = groups // self._ways(channels)
            results = bind(self.equation, (left, right), batch_group_count=count, **self.overrides)
            return jax.lax.psum(results[0], rows)

        left, right = operands
        sharded = (
            _spec(left.ndim, {numbers.lhs_spec[0]: channels, numbers.lhs_spec[1]: rows}),
            _spec(right.ndim, {numbers.rhs_spec[0]: channels, numbers.rhs_spec[1]: rows}),
        )
        result_spec = _spec(left.ndim, {numbers.out_spec[1]: channels})
        return self._regions.manual(local, sharded, result_spec)(left, right)

    def operand_gradient(
        self, position: int, operands: Operands, cotangent: jax.Array, like: jax.ShapeDtypeStruct, /
    ) -> jax.Array:
        """See `Contraction`."""
        numbers, groups = self._numbers, self.equation.params["feature_group_count"]
        rows, left = _axes(self.shardings.operands[0], numbers.lhs_spec[0]), operands[0]
        if position == 0 or left is None or groups == 1 or not rows:
            return self.contraction.operand_gradient(position, operands, cotangent, like)
        channels = self._channels(groups)
        shards, out = self._ways(channels), numbers.rhs_spec[0]
        shape = tuple(size // shards if dim == out else size for dim, size in enumerate(like.shape))

        def local(left: jax.Array, cotangent: jax.Array) -> jax.Array:
            def linear(kernel: jax.Array) -> jax.Array:
                count = groups // shards
                return bind(
                    self.equation, (left, kernel), feature_group_count=count, **self.overrides
                )[0]

            aval = jax.ShapeDtypeStruct(shape, like.dtype)
            return jax.lax.psum(jax.linear_transpose(linear, aval)(cotangent)[0], rows)

        sharded = (
            _spec(left.ndim, {numbers.lhs_spec[0]: rows, numbers.lhs_spec[1]: channels}),
            _spec(left.ndim, {numbers.out_spec[0]: rows, numbers.out_spec[1]: channels}),
        )
        result_spec = _spec(left.ndim, {out: channels})
        return self._regions.manual(local, sharded, result_spec)(left, cotangent)

    def widens(self, out_dtype: object, in_dtype: object, /) -> bool:
        """See `Contraction`: gradients of convolutions are summed in their own dtype."""
        return False

    @property
    def _numbers(self) -> jax.lax.ConvDimensionNumbers:
        return self.equation.params["dimension_numbers"]

    @property
    def _regions(self) -> Regions:
        return Regions(mesh=self.shardings.result.mesh, torus=False)

    def _channels(self, groups: int) -> tuple[str, ...]:
        """Mesh axes over which devices have whole groups."""
        axes = _axes(self.shardings.result, self._numbers.out_spec[1])
        return axes if groups % self._ways(axes) == 0 else ()

    def _ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.shardings.result.mesh.shape[axis] for axis in axes)


def with_manual_groups(
    contraction: Contraction,
    equation: Equation,
    shardings: ContractionShardings,
    **overrides: EqnParam,
) -> Contraction:
    """A contraction with its sums over rows in a manual region if it is a grouped convolution;
    others unchanged.
    """
    if equation.name != "conv_general_dilated" or shardings.result.mesh.size == 1:
        return contraction
    counts = equation.params["feature_group_count"], equation.params["batch_group_count"]
    if max(counts) == 1:
        return contraction
    return GroupedConvolution(
        contraction=contraction, equation=equation, shardings=shardings, overrides=overrides
    )


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Mesh axes that shard a dim."""
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(rank: int, axes: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) or None for dim in range(rank)))


# --------------------------------------------------------------------------------------------------
# An operation that uses a parameter, and its gradients, in the dtypes and layouts of a plan.


@dataclass(frozen=True, kw_only=True)
class View:
    """A value with the elements of one parameter, or of one layer of it.

    Attributes:
        parameter: index of the parameter.
        dims: for each dim of the value, the dim of the parameter whose major part it is, or None.
        lengths: lengths of the scans that slice it, the outermost first.
    """

    parameter: int
    dims: tuple[int | None, ...]
    lengths: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Dims of the value in the order of the parameter's; () if they are in order already, or if
        some are not dims of it.

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
        position: position of the parameter among the operands.
        view: how the operand relates to the parameter.
        rows_dtype: for a lookup whose rows are cast immediately to a narrower dtype, that dtype.
        matmul_dtype: for a matmul in a dtype other than the traced one, that dtype.
        stored_dtype: dtype of the stored parameter, if other than the traced one.
        shardings: for a contraction, the layouts in which it runs.
        recomputed: whether the backward pass recomputes the other operand (rematerialisation).
    """

    equation: Equation
    position: int
    view: View
    rows_dtype: Any = None
    matmul_dtype: Any = None
    stored_dtype: Any = None
    shardings: ContractionShardings | None = None
    recomputed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return tuple(self.equation.eqn.invars[self.position].aval.shape)

    @property
    def other_aval(self) -> Aval:
        """Abstract value of the other one of two operands."""
        return self.equation.eqn.invars[1 - self.position].aval

    def run(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The operation, in the dtype of the product; its result has the traced dtype."""
        if self.matmul_dtype is None:
            return bind(
                self.equation,
                [
                    as_dtype(operand, variable.aval.dtype)
                    for operand, variable in zip(operands, self.equation.eqn.invars, strict=True)
                ],
            )[0]
        if is_eight_bit(self.matmul_dtype):
            return collectives.eight_bit_matmul(
                *self._dims, self.matmul_dtype, self.equation.eqn.outvars[0].aval.dtype
            )(*operands)
        narrow = [as_dtype(operand, self.matmul_dtype) for operand in operands]
        return bind(self.equation, narrow, preferred_element_type=self.matmul_dtype)[0].astype(
            self.equation.eqn.outvars[0].aval.dtype
        )

    @property
    def dtype(self) -> np.dtype:
        """The traced dtype of the operand."""
        return self.equation.eqn.invars[self.position].aval.dtype

    @property
    def _dims(self) -> tuple[DotDims, tuple[int, int]]:
        left, right = self.equation.eqn.invars
        return self.equation.params["dimension_numbers"], (left.aval.ndim, right.aval.ndim)

    def operand_gradient(
        self, position: int, operands: Operands, cotangent: jax.Array, like: jax.ShapeDtypeStruct, /
    ) -> jax.Array:
        """See `Contraction`."""
        other, aval = operands[1 - position], self.equation.eqn.invars[1 - position].aval
        assert other is not None, "a gradient is computed from the other operand"
        if is_eight_bit(self.matmul_dtype):
            return collectives.eight_bit_gradient(
                *self._dims, position, other, cotangent, self.matmul_dtype
            ).astype(like.dtype)
        wide = self.widens(like.dtype, self.equation.eqn.invars[position].aval.dtype)

        def linear(variable: jax.Array) -> jax.Array:
            fixed = as_dtype(other, aval.dtype) if wide else other
            pair = (fixed, variable) if position else (variable, fixed)
            return bind(self.equation, pair)[0] if wide else self.run(pair)

        return jax.linear_transpose(linear, like)(cotangent)[0]

    def run_in_layouts(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The operation in its planned layouts."""
        return self.run(operands) if self.shardings is None else self.shardings.run(self, operands)

    def activation_gradient(
        self, activation: jax.Array, weight: jax.Array, cotangent: jax.Array
    ) -> jax.Array:
        """The gradient of the other operand, in its planned layout."""
        shardings, position = self.shardings, 1 - self.position
        if shardings is None:
            like = jax.ShapeDtypeStruct(activation.shape, activation.dtype)
            return self.operand_gradient(position, (weight, weight), cotangent, like)
        weight = shardings.constrain_operand(self.position, weight)
        cotangent = shardings.constrain_cotangent(cotangent)
        return shardings.gradient(self, position, (weight, weight), cotangent, activation)

    def widens(self, out_dtype: np.dtype, in_dtype: np.dtype, /) -> bool:
        """See `Contraction`."""
        return (
            self.matmul_dtype is None
            and self.equation.name == "dot_general"
            and out_dtype.itemsize > in_dtype.itemsize
        )

    def saved_operand(self, activation: jax.Array) -> jax.Array:
        """The other operand as it is saved for the backward pass."""
        return (
            activation
            if self.matmul_dtype is None or is_eight_bit(self.matmul_dtype)
            else as_dtype(activation, self.matmul_dtype)
        )

    def for_backward(self, activation: jax.Array) -> jax.Array:
        """The other operand for the backward pass. A recomputed one is all-gathered, as in the
        forward pass, so that the products of one activation (queries, keys and values) and their
        weight gradients share one all-gather. A saved one is saved sharded.
        """
        return (
            self.shardings.constrain_operand(1 - self.position, activation)
            if self.recomputed and self.shardings is not None
            else activation
        )

    def narrowest(self, weight: jax.Array) -> jax.Array:
        """The operand in the narrowest dtype in which it can be gathered without a change of the
        result.
        """
        narrow = weight
        for dtype in (self.rows_dtype, self.matmul_dtype, self.stored_dtype):
            if (
                dtype is not None
                and not is_eight_bit(dtype)
                and dtype.itemsize < narrow.dtype.itemsize
            ):
                narrow = narrow.astype(dtype)
        return narrow

    def narrow_operands(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands in the dtypes in which they are communicated."""
        return [
            self.narrowest(value) if position == self.position else self.saved_operand(value)
            for position, value in enumerate(operands)
        ]


def as_dtype(value: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A value cast to a dtype; unchanged if it has that dtype."""
    return value if value.dtype == dtype else value.astype(dtype)
