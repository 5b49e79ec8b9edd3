"""Operations on sharded weights: gathering, and the reduction of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.cost.memory import LARGE_RESULT
from shardlib.jax_types import Aval, DType, Index, Value
from shardlib.layout import MESH_AXES, Layout
from shardlib.lowering.collectives import DimAxes, Precision, Regions, regions_of, row_major
from shardlib.lowering.contractions import Use, ValueLayouts
from shardlib.lowering.mesh import plan_indices, without_axes
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting import bind

# --------------------------------------------------------------------------------------------------
# Frozen weights that are stored sharded.
#
# They are gathered where they are used, as trained ones are, and have no gradient: the backward
# pass gathers them again for the gradient of the activation. Only their shards are kept between the
# two; the activation is not saved for them.


def in_operand_order(use: Use, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (activation, weight, ...) as one of the operands in their own order."""
    return lambda *operands: run(
        use.saved_operand(operands[1 - use.position]), operands[use.position]
    )


def with_frozen_weight(use: Use, gathered: Callable[[Value], Value]) -> Callable[..., Value]:
    """An operation whose weight is frozen: gathered in the forward and again in the backward
    pass.
    """
    if use.equation.name == "gather":
        return lambda table, *others: use.run((gathered(use.narrowest(table)), *others))

    def run(activation: Value, weight: Value) -> Value:
        like = jax.ShapeDtypeStruct(activation.shape, activation.dtype)

        def forward(activation: Value, weight: Value) -> Value:
            operand = gathered(use.narrowest(weight))
            return use.run((activation, operand) if use.position else (operand, activation))

        @jax.custom_vjp
        def frozen(activation: Value, weight: Value) -> Value:
            return forward(activation, weight)

        def backward(weight: Value, cotangent: Value) -> tuple[Value, None]:
            operand = gathered(use.narrowest(weight))
            return use.operand_gradient(1 - use.position, (operand, operand), cotangent, like), None

        frozen.defvjp(lambda activation, weight: (forward(activation, weight), weight), backward)
        return frozen(activation, weight)

    return in_operand_order(use, run)


# --------------------------------------------------------------------------------------------------
# Weights gathered where they are used.
#
# A weight that is stored sharded is gathered where it is used, in its compute dtype, and again in
# the backward pass: only its shards are kept between the two.


def weight_gather(
    use: Use, parameter: ParameterLayout, regions: Regions
) -> Callable[[Value], Value]:
    """Gathers an operand from its stored sharding to its compute sharding in the plan.

    If the stored shards are not pieces of the operand, the compiler chooses how. An operand that is
    the transposed parameter is gathered in the parameter's own order of dims, so that compilers
    gather a table that is used both ways once.
    """
    if parameter.rest == parameter.compute:
        return lambda operand: operand
    origins = [(dim, origin) for dim, origin in enumerate(use.view.dims) if origin is not None]
    compute: DimAxes = {dim: parameter.compute[origin] for dim, origin in origins}
    stored: DimAxes = {dim: parameter.rest[origin] for dim, origin in origins}
    if {axis for names in compute.values() for axis in names} != set(parameter.compute.axes):
        return lambda operand: operand
    in_pieces = {axis for names in stored.values() for axis in names} == set(parameter.rest.axes)
    order = use.view.order
    if not order:
        return regions.gather_function(use.shape, stored if in_pieces else None, compute)
    gather = regions.gather_function(
        tuple(use.shape[dim] for dim in order),
        _permuted(stored, order) if in_pieces else None,
        _permuted(compute, order),
    )
    return lambda operand: gather(operand.transpose(order)).transpose(np.argsort(order))


def _permuted(axes: DimAxes, order: Sequence[int]) -> DimAxes:
    """The sharding of a value after a permutation of its dims."""
    return {position: axes[dim] for position, dim in enumerate(order) if dim in axes}


def gather_updated(
    plan: Plan, trained: Tree, mesh: Mesh | AbstractMesh
) -> Callable[[Tree, Tree], Tree]:
    """Gathers updated parameters that are stored replicated and whose optimizer state is sharded
    (ZeRO 1 and 2).

    Stacks of matrices are gathered one by one, in place: gathered together, they would be in memory
    twice. On CPU devices they are gathered together: XLA runs independent loops concurrently there,
    and if two of them have collectives over the same group, devices deadlock (seen with JAX 0.10.2;
    its executor orders the starts of collectives, but a loop starts before its collectives do).

    Returns:
        (updated, old) parameters -> the updated ones in their stored sharding.
    """
    regions, indices = regions_of(plan, mesh), plan_indices(plan, trained)
    loops = not _on_cpu(mesh)

    def function(parameter: ParameterLayout) -> Callable[[Value, Value], Value]:
        if parameter.state == parameter.rest:
            return lambda leaf, old: leaf
        stacked = (
            loops and len(parameter.shape) > 2 and not parameter.state[0] and not parameter.rest[0]
        )
        leading = 1 if stacked else 0
        gathering = regions.gather_function(
            parameter.shape[leading:],
            dict(enumerate(tuple(parameter.state)[leading:])),
            dict(enumerate(tuple(parameter.rest)[leading:])),
        )
        return partial(_gather_stack, gathering) if stacked else lambda leaf, old: gathering(leaf)

    functions = [function(plan.parameters[i]) for i in indices]

    def gather(params: Tree, old_params: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(
            [
                function(leaf, old)
                for leaf, old, function in zip(
                    leaves, jax.tree.leaves(old_params), functions, strict=True
                )
            ]
        )

    return gather


def _on_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """True if a program's devices are CPU devices; False for an abstract mesh."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def _gather_stack(gather: Callable[[Value], Value], stack: Value, old: Value) -> Value:
    """A stack gathered matrix by matrix, each over the old one.

    A loop that stacks its results starts from zeros, and XLA merges these with the zeros that
    gradients of stacks start from: they would be live from the first gradient on (seen with JAX
    0.10.2: 26 GiB of 90 for Llama 3 8B). The old parameters are donated, and dead by then; the
    barrier keeps the first matrix from being overwritten before all have been read.

    Args:
        stack: the updated matrices, [layers, ...], sharded.
        old: the matrices before the update, in their stored sharding and the same dtype.
    """

    def body(index: Index, out: Value) -> Value:
        matrix = jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, gather(matrix), index, 0)

    start, _ = jax.lax.optimization_barrier((old, stack))
    return jax.lax.fori_loop(0, stack.shape[0], body, start)


# --------------------------------------------------------------------------------------------------
# Gradients of weights computed before the gradient of the activation, where that frees a large
# cotangent.
#
# Both gradients of a head read the cotangent of the logits, which is far larger than the
# activations of the last layer. Nothing reads the gradient of the weight before the step ends, so
# XLA for GPUs may compute it after the loop over layers, and the cotangent of the logits stays live
# through the whole backward pass. Here, the backward pass of the layers waits for the partial sums:
#
#     partial sums = activation^T x cotangent         one element of them is the token
#     to the layers = where(token == token, cotangent x weight^T, nan)
#     gradient = reduced partial sums                 whenever the links are free
#
# The condition holds of all numbers, so that the results are the same. XLA for GPUs removes its
# optimization barriers before it schedules, and cannot remove this.


def has_large_result(use: Use) -> bool:
    """True if the result of a contraction of a weight is far larger than its activation, and is
    computed once per step or microbatch: the logits.
    """
    result = use.equation.eqn.outvars[0].aval
    once = "body" not in use.equation.path.split("/")
    return once and _bytes(result) >= LARGE_RESULT * _bytes(use.other_aval)


def _bytes(aval: Aval) -> int:
    return aval.size * aval.dtype.itemsize


def one_element(sums: Value) -> Value:
    """One element of a device's partial sums, [1]; inside a manual region."""
    return jax.lax.slice(sums, (0,) * sums.ndim, (1,) * sums.ndim).reshape(1)


def after_token(value: Value, token: Value) -> Value:
    """A value that cannot be read before a token is computed: NaN if that is."""
    return jnp.where((token == token).reshape((1,) * value.ndim), value, jnp.nan)


# --------------------------------------------------------------------------------------------------
# Reduction of the partial sums of one gradient to the gradient that the optimizer reads.
#
# The partial sums of a device over its own examples are reduce-scattered over the mesh axes that
# shard the gradient, and all-reduced over the other axes that hold partial sums. For a weight
# A[I, J_T] in use whose gradient is stored as A[I_F, J_T], with the batch sharded over fsdp and
# data:
#
#     partial sums [I, J_T] on every device
#     reduce-scatter over fsdp along I      [I_F, J_T]
#     all-reduce over data                  A[I_F, J_T]
#
# On a TPU torus the compiler makes a reduce-scatter only along one physical dim at a time, and
# only of the rows of a matrix. So the sums are reshaped to rows, and scattered over the physical
# parts of fsdp one after another, the major one first.

#: Columns and rows of a tile in TPU memory, elements (jax-ml/jax docs/pallas/tpu/details.rst).
LANES, SUBLANES = 128, 8


@dataclass(frozen=True, kw_only=True)
class OperandReduction:
    """The reduction of the partial sums of one gradient to the gradient that the optimizer reads.

    Attributes:
        scattered: dims of the operand along which the stored gradient is sharded, beyond the
            compute sharding.
        all_reduced: mesh axes that hold partial sums and shard no dim.
        order: dims of the operand in the order of the parameter's, if it is used transposed: sums
            are all-reduced in the parameter's order, so that compilers add the gradients of a table
            that is used both ways before they reduce them. () if the order is the same.
    """

    scattered: DimAxes
    all_reduced: tuple[str, ...]
    order: tuple[int, ...] = ()

    def apply(self, sums: jax.Array, regions: Regions, *, stacked: bool = False) -> jax.Array:
        """Reduces one device's partial sums in the communication dtype, inside a manual region:
        reduce-scatters over the mesh axes that shard the gradient, all-reduces over the others.
        """
        dtype = sums.dtype
        if regions.reduction_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            sums = sums.astype(regions.reduction_dtype)
        return self._collectives(sums, regions, stacked).astype(dtype)

    def _collectives(self, sums: jax.Array, regions: Regions, stacked: bool) -> jax.Array:
        for dim, axes in self.scattered.items():
            sums = (
                _scattered_rows(sums, dim, regions.physical_axes(axes), stacked)
                if regions.torus
                else _scattered(sums, dim, regions.physical_axes(axes))
            )
        if not self.all_reduced:
            return sums
        parts = regions.physical_axes(self.all_reduced)
        if len(self.order) != sums.ndim:
            return jax.lax.psum(sums, parts)
        return jax.lax.psum(sums.transpose(self.order), parts).transpose(np.argsort(self.order))


def _scattered(sums: jax.Array, dim: int, parts: Sequence[str]) -> jax.Array:
    result = jax.lax.psum_scatter(sums, tuple(parts), scatter_dimension=dim, tiled=True)
    return row_major(result) if dim else result


def _scattered_rows(sums: jax.Array, dim: int, parts: Sequence[str], stacked: bool) -> jax.Array:
    """Reduce-scatters sums along a dim, one part after another, with that dim outside of the memory
    tiles.

    Along a dim inside of tiles the TPU compiler has no reduce-scatter, or one with padding and an
    exchange of rows between neighbours; rows that end inside of a tile are padded with zeros.
    """
    first = jnp.moveaxis(sums, dim, 0)
    length, size = first.shape[0], first.size // first.shape[0]
    missing = -size % LANES if size > LANES else 0
    flat = jnp.pad(first.reshape(length, size), ((0, 0), (0, missing)))
    devices = math.prod(jax.lax.axis_size(part) for part in parts)
    in_tiles = flat.shape[1] % LANES == 0 and length % (devices * SUBLANES) == 0
    result = (
        _tiles_scattered(flat, parts)
        if in_tiles
        else _rows_scattered(flat, parts, force_row_major=stacked or length > flat.shape[1])
    )
    return jnp.moveaxis(result[:, :size].reshape(-1, *first.shape[1:]), 0, dim)


def _tiles_scattered(flat: jax.Array, parts: Sequence[str]) -> jax.Array:
    """Reduce-scatters the rows of a matrix in blocks of whole memory tiles, without padding. As
    matrices of lanes, rows would be padded: 10 x 128 columns of a row take 16 x 128.
    """
    length, size = flat.shape
    tiles = flat.reshape(length // SUBLANES, SUBLANES, size // LANES, LANES).swapaxes(1, 2)
    for part in parts:
        tiles = jax.lax.psum_scatter(row_major(tiles), part, scatter_dimension=0, tiled=True)
    return tiles.swapaxes(1, 2).reshape(-1, size)


def _rows_scattered(flat: jax.Array, parts: Sequence[str], *, force_row_major: bool) -> jax.Array:
    """Reduce-scatters rows whose shards are not whole tiles, each as a matrix of lanes."""
    length, size = flat.shape
    rows = flat.reshape(length, size // LANES, LANES) if size % LANES == 0 else flat
    for part in parts:
        if force_row_major or rows.ndim == 2:
            rows = row_major(rows)
        rows = jax.lax.psum_scatter(rows, part, scatter_dimension=0, tiled=True)
    return rows.reshape(rows.shape[0], size)


def operand_reduction(
    use: Use,
    gradient: Layout,
    partial_axes: tuple[str, ...],
    regions: Regions,
    weight_axes: DimAxes | None = None,
) -> OperandReduction:
    """The reduction of the gradient of one operand.

    Args:
        gradient: layout of the parameter's gradient as the optimizer reads it.
        weight_axes: compute sharding of the operand.
    """
    scattered: DimAxes = {}
    for dim, origin in enumerate(use.view.dims):
        axes = () if origin is None else gradient[origin]
        compute_axes = (weight_axes or {}).get(dim, ())
        further = axes[len(compute_axes) :]
        if (
            further
            and axes[: len(compute_axes)] == compute_axes
            and set(further) <= set(partial_axes)
            and use.shape[dim] % regions.ways(axes) == 0
        ):
            scattered[dim] = further
    scattered_axes = {axis for axes in scattered.values() for axis in axes}
    return OperandReduction(
        scattered=scattered,
        all_reduced=tuple(axis for axis in partial_axes if axis not in scattered_axes),
        order=use.view.order,
    )


# --------------------------------------------------------------------------------------------------
# A matrix that is only added to activations, such as the positions of a vision transformer.
#
# Its gradient is the sum of the cotangent over the batch. Under automatic partitioning, TPUs make a
# reduce-scatter of that if the batch is sharded over one dim of the torus, and an all-reduce if
# over several. So every device sums over its own examples, and `OperandReduction` reduces the
# partial sums.


def added_matrix(
    use: Use, batch: tuple[str, ...], parameter: ParameterLayout, regions: Regions
) -> Callable[..., Value] | None:
    """An addition of a gathered matrix whose gradient is reduced directly to its stored sharding;
    None if the compiler does so itself, or if dims other than the first are summed over.
    """
    rank, rows = len(use.shape), use.other_aval.shape[0]
    if (
        not parameter.trained
        or parameter.compute.axes
        or not regions.torus
        or len(regions.physical_axes(batch)) < 2
        or rows % regions.ways(batch)
        or tuple(use.other_aval.shape) != (rows, *use.shape[1:])
        or use.shape[0] != 1
    ):
        return None
    reduction = operand_reduction(use, parameter.gradient, batch, regions)
    if not reduction.scattered:
        return None
    gathered = weight_gather(use, parameter, regions)
    specs = (regions.spec({0: batch}, rank),), regions.spec(reduction.scattered, rank)

    def forward(activation: Value, weight: Value) -> Value:
        return bind(use.equation, (activation, gathered(weight)))[0]

    @jax.custom_vjp
    def run(activation: Value, weight: Value) -> Value:
        return forward(activation, weight)

    def local(cotangent: Value) -> Value:
        return reduction.apply(cotangent.sum(0, keepdims=True), regions)

    run.defvjp(
        lambda activation, weight: (forward(activation, weight), None),
        lambda _, cotangent: (cotangent, regions.manual(local, *specs)(cotangent)),
    )
    return run if use.position else lambda weight, activation: run(activation, weight)


# --------------------------------------------------------------------------------------------------
# Shardings of the operands of an operation on a weight whose gradient is per-device partial sums.

#: Mesh axes that shard weights in use; the others shard the batch.
WEIGHT_AXES: tuple[str, ...] = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class _ManualGradient:
    """An operation on a weight whose gradient is computed in a manual region.

    Attributes:
        reduction: the reduction of the gradient.
        weight_axes: compute sharding of the weight.
        partial_axes: mesh axes that hold partial sums.
        operand_specs: shardings of activation and cotangent where partial sums are computed.
    """

    use: Use
    reduction: OperandReduction
    weight_axes: DimAxes
    partial_axes: tuple[str, ...]
    operand_specs: tuple[PartitionSpec, PartitionSpec]
    regions: Regions

    #: Whether the gradient of the activation reads the weight.
    reads_weight: ClassVar[bool] = True

    @property
    def gradient_spec(self) -> PartitionSpec:
        """The sharding of the reduced gradient."""
        rank = len(self.use.shape)
        axes: DimAxes = {
            dim: (*self.weight_axes.get(dim, ()), *self.reduction.scattered.get(dim, ()))
            for dim in range(rank)
        }
        return self.regions.spec(axes, rank)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the weight in its compute sharding on one device."""
        return tuple(
            size // self.regions.ways(self.weight_axes.get(dim, ()))
            for dim, size in enumerate(self.use.shape)
        )

    def cotangent_for_sums(self, cotangent: Value) -> Value:
        """The cotangent of the result as it is resharded for the partial sums."""
        return cotangent

    def tokens(self) -> tuple[PartitionSpec, ...]:
        """Shardings of the tokens of partial sums that are computed before the gradient of the
        activation is passed on; empty if they may wait: compilers for TPUs delay none, and where
        tensor shards the weight, partial sums overlap with the communication of the gradient of the
        activation.
        """
        wait = (
            self.regions.torus or any(self.weight_axes.values()) or not has_large_result(self.use)
        )
        return () if wait else (PartitionSpec(self.regions.physical_axes(self.partial_axes)),)

    def after(self, gradient: Value | None, tokens: Sequence[Value]) -> Value | None:
        """The gradient of the activation, once the tokens are there."""
        spec, specs = self.operand_specs[0], self.tokens()
        if gradient is None or not specs:
            return gradient
        return self.regions.manual(after_token, (spec, *specs), spec)(gradient, *tokens)


@dataclass(frozen=True, kw_only=True)
class OperandAxes:
    """Shardings of the operands of a weight's gradient inside the region.

    Attributes:
        partial_axes: mesh axes that shard the dims that are summed over.
    """

    activation: DimAxes
    result: DimAxes
    partial_axes: tuple[str, ...]


def weight_axes_in_use(use: Use, parameter: ParameterLayout) -> DimAxes | None:
    """The compute sharding of a weight; None if axes other than `WEIGHT_AXES` shard it, or if it
    shards a dim of the parameter that is not a dim of the operand.
    """
    weight_axes: DimAxes = {
        dim: parameter.compute[source]
        for dim, source in enumerate(use.view.dims)
        if source is not None and parameter.compute[source]
    }
    axes = {axis for names in weight_axes.values() for axis in names}
    return weight_axes if axes == set(parameter.compute.axes) and axes <= set(WEIGHT_AXES) else None


def operand_axes(use: Use, result: Layout, weight_axes: DimAxes) -> OperandAxes | None:
    """Consistent shardings: dims of the weight in its compute sharding, dims of the activation
    alone as in the result; None if the batch is not sharded.
    """
    dims = contraction_dims(use.equation, use.position)
    used = {axis for names in weight_axes.values() for axis in names}
    free_axes = {dim: tuple(axis for axis in result[dim] if axis not in used) for dim in dims.free}
    partial_axes = tuple(axis for dim in dims.free for axis in free_axes[dim])
    if not any(axis not in WEIGHT_AXES for axis in partial_axes) or any(
        axis not in WEIGHT_AXES
        for dim in range(len(result))
        if dim not in dims.free
        for axis in result[dim]
    ):
        return None
    activation = {
        **{dims.free[dim]: names for dim, names in free_axes.items()},
        **{to: weight_axes[dim] for dim, to in dims.activation.items() if dim in weight_axes},
    }
    return OperandAxes(
        activation=activation,
        result={
            **free_axes,
            **{to: weight_axes[dim] for dim, to in dims.result.items() if dim in weight_axes},
        },
        partial_axes=partial_axes,
    )


@dataclass(frozen=True, kw_only=True)
class ContractionDims:
    """The correspondence between the dims of a contraction.

    Attributes:
        free: result dim -> activation dim, for dims that are not in the weight.
        activation: weight dim -> activation dim.
        result: weight dim -> result dim.
    """

    free: dict[int, int]
    activation: dict[int, int]
    result: dict[int, int]


def contraction_dims(equation: Equation, weight: int) -> ContractionDims:
    """The dims that a matmul or convolution matches, given which operand is the weight."""
    numbers = equation.params["dimension_numbers"]
    if equation.name == "conv_general_dilated":
        ungrouped = (
            equation.params["batch_group_count"] == 1
            and equation.params["feature_group_count"] == 1
            and weight == 1
        )
        free_dims = {numbers.out_spec[0]: numbers.lhs_spec[0]} if ungrouped else {}
        return ContractionDims(
            free=free_dims,
            activation={numbers.rhs_spec[1]: numbers.lhs_spec[1]},
            result={numbers.rhs_spec[0]: numbers.out_spec[1]},
        )
    contracted, batch = numbers
    ranks = [variable.aval.ndim for variable in equation.eqn.invars]
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    offsets = {0: len(batch[0]), 1: len(batch[0]) + len(free[0])}
    activation = 1 - weight
    return ContractionDims(
        free={offsets[activation] + i: dim for i, dim in enumerate(free[activation])},
        activation={
            **dict(zip(contracted[weight], contracted[activation], strict=True)),
            **dict(zip(batch[weight], batch[activation], strict=True)),
        },
        result={
            **{dim: offsets[weight] + i for i, dim in enumerate(free[weight])},
            **{dim: i for i, dim in enumerate(batch[weight])},
        },
    )


# --------------------------------------------------------------------------------------------------
# A matmul or convolution whose weight gradient is computed in a manual region.
#
# Under automatic partitioning, the partial sums of its gradient become an all-reduce of the whole
# array, of which every device then keeps its shard: twice the bytes of a reduce-scatter. So every
# device multiplies its own examples by its own part of the weight's dims in a manual region, and
# `OperandReduction` reduces the result. The forward pass and the gradient of the activation stay
# automatic.


class ManualContraction(_ManualGradient):
    """A contraction whose weight gradient is computed in a manual region."""

    def run(self, activation: Value, weight: Value) -> Value:
        """The operation."""
        return self.use.run_in_layouts(
            (activation, weight) if self.use.position else (weight, activation)
        )

    def partial_sums(self, activation: Value, cotangent: Value, dtype: DType) -> Value:
        """The gradient of the weight from one device's examples, inside a manual region."""
        like = jax.ShapeDtypeStruct(self.local_shape, dtype)
        return self.use.operand_gradient(
            self.use.position, (activation, activation), cotangent, like
        )

    def activation_gradient(self, activation: Value, weight: Value, cotangent: Value) -> Value:
        """The gradient of the activation."""
        return self.use.activation_gradient(activation, weight, cotangent)

    def sum_dtype(self, accumulator_dtype: DType) -> DType:
        """The dtype in which partial sums are computed: that of the weight."""
        return self.use.dtype


def manual_contraction(
    use: Use, result: Layout, parameter: ParameterLayout, regions: Regions
) -> ManualContraction | None:
    """A contraction with per-device partial sums; None if the batch is not sharded, or if the
    gradient cannot be computed one device at a time.
    """
    weight_axes = weight_axes_in_use(use, parameter)
    axes = None if weight_axes is None else operand_axes(use, result, weight_axes)
    if weight_axes is None or axes is None:
        return None
    return ManualContraction(
        use=use,
        reduction=operand_reduction(
            use, parameter.gradient, axes.partial_axes, regions, weight_axes
        ),
        weight_axes=weight_axes,
        partial_axes=axes.partial_axes,
        operand_specs=(
            regions.spec(axes.activation, use.other_aval.ndim),
            regions.spec(axes.result, len(result)),
        ),
        regions=regions,
    )


# --------------------------------------------------------------------------------------------------
# A lookup in a sharded table, and its gradient: a scatter-add on every device.
#
# Every device adds the cotangents of its own examples to its own rows of the table, and
# `OperandReduction` reduces the sums.


def is_lookup(equation: Equation) -> bool:
    """True if a gather takes whole rows of a matrix: `table[indices]`."""
    numbers, table = equation.params["dimension_numbers"], equation.eqn.invars[0].aval
    rank = equation.eqn.outvars[0].aval.ndim
    return (
        table.ndim == 2
        and numbers.start_index_map == (0,)
        and numbers.collapsed_slice_dims == (0,)
        and numbers.offset_dims == (rank - 1,)
        and not numbers.operand_batching_dims
        and tuple(equation.params["slice_sizes"]) == (1, table.shape[1])
    )


@dataclass(frozen=True, kw_only=True)
class ManualLookup(_ManualGradient):
    """A lookup in a table; its activation is the indices.

    Attributes:
        result: layout of the looked-up rows.
        reads_weight: False; indices have no gradient.
    """

    result: Layout
    reads_weight: ClassVar[bool] = False

    def run(self, indices: Value, table: Value) -> Value:
        """The operation, on a table that may be in a narrower dtype than its own; if rows are
        sharded, each device looks up its own, and the results are summed.
        """
        rank, dtype = len(self.result), self.use.equation.eqn.outvars[0].aval.dtype
        if not self.weight_axes[0]:
            return bind(self.use.equation, (table, indices))[0].astype(dtype)
        sharding = {
            **{
                dim: tuple(a for a in axes if a not in self.weight_axes[0])
                for dim, axes in enumerate(self.result[:-1])
            },
            rank - 1: self.weight_axes[1],
        }
        scattered = next(
            (
                dim
                for dim, axes in enumerate(self.result[:-1])
                if axes == (*sharding[dim], *self.weight_axes[0])
            ),
            None,
        )
        parts = self.regions.physical_axes(self.weight_axes[0])

        def local(indices: Value, table: Value) -> Value:
            rows = self._rows(indices, table)
            return (
                jax.lax.psum(rows, parts)
                if scattered is None
                else jax.lax.psum_scatter(rows, parts, scatter_dimension=scattered, tiled=True)
            )

        target = sharding if scattered is None else {**sharding, scattered: self.result[scattered]}
        return self.regions.manual(
            local,
            (self.operand_specs[0], self.regions.spec(self.weight_axes, 2)),
            self.regions.spec(target, rank),
        )(indices, table).astype(dtype)

    def _rows(self, indices: Value, table: Value) -> Value:
        """The rows that one device has, zeros for the others; for out-of-range indices the result
        of the operation's mode, on the first device.
        """
        rows = table.at[self._inside(indices)[..., 0]].get(mode="fill", fill_value=0)
        if self._clips:
            return rows
        filled = self.use.equation.params["fill_value"]
        outside = (indices < 0) | (indices >= self.use.shape[0])
        first = jax.lax.axis_index(self.regions.physical_axes(self.weight_axes[0])) == 0
        return jnp.where(
            outside & first, jnp.asarray(jnp.nan if filled is None else filled, rows.dtype), rows
        )

    @property
    def _clips(self) -> bool:
        return "clip" in str(self.use.equation.params["mode"]).lower()

    def _inside(self, indices: Value) -> Value:
        """Indices into the device's own rows; the number of these for rows of other devices."""
        clipped = jnp.clip(indices, 0, self.use.shape[0] - 1) if self._clips else indices
        index = clipped - (
            jax.lax.axis_index(self.regions.physical_axes(self.weight_axes[0]))
            * self.local_shape[0]
            if self.weight_axes[0]
            else 0
        )
        return jnp.where((index >= 0) & (index < self.local_shape[0]), index, self.local_shape[0])

    def cotangent_for_sums(self, cotangent: Value) -> Value:
        """The cotangent in the dtype in which the rows are used: compilers for TPUs gather it in
        the dtype that it has.
        """
        rows = self.use.rows_dtype
        return cotangent if rows is None else cotangent.astype(rows)

    def partial_sums(self, indices: Value, cotangent: Value, dtype: DType) -> Value:
        """The gradient of the table from one device's examples, inside a manual region."""
        rank, inside = len(self.result), self._inside(indices)
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(rank - 1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
        )
        return jax.lax.scatter_add(
            jnp.zeros(self.local_shape, dtype),
            inside,
            cotangent.astype(dtype),
            numbers,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    def tokens(self) -> tuple[PartitionSpec, ...]:
        """Empty: nothing waits for the partial sums, since indices have no gradient."""
        return ()

    def activation_gradient(self, indices: Value, table: Value, cotangent: Value) -> None:
        """None: indices have no gradient."""
        return None

    def sum_dtype(self, accumulator_dtype: DType) -> DType:
        """The dtype in which partial sums are computed: that of all sums, since many rows of the
        cotangent may be added to one row of the table.
        """
        return accumulator_dtype


def manual_lookup(
    use: Use, result: Layout, parameter: ParameterLayout, regions: Regions
) -> ManualLookup | None:
    """A lookup with per-device partial sums; None if the batch is not sharded, or if it is not a
    lookup of whole rows.
    """
    if use.position != 0 or not is_lookup(use.equation) or None in use.view.dims:
        return None
    weight_axes: DimAxes = {
        i: tuple(a for a in parameter.compute[dim] if a in WEIGHT_AXES)
        for i, dim in enumerate(use.view.dims)
        if dim is not None
    }
    used = {axis for axes in weight_axes.values() for axis in axes}
    sharding: DimAxes = {
        dim: tuple(a for a in axes if a not in used) for dim, axes in enumerate(result[:-1])
    }
    partial_axes = tuple(axis for axes in sharding.values() for axis in axes)
    if not any(axis not in WEIGHT_AXES for axis in partial_axes):
        return None
    rank = len(result)
    return ManualLookup(
        use=use,
        reduction=operand_reduction(use, parameter.gradient, partial_axes, regions, weight_axes),
        weight_axes=weight_axes,
        partial_axes=partial_axes,
        operand_specs=(
            regions.spec(sharding, rank),
            regions.spec({**sharding, rank - 1: weight_axes[1]}, rank),
        ),
        result=result,
        regions=regions,
    )


#: An operation on a weight with per-device partial sums.
ManualOp = ManualContraction | ManualLookup


def manual_operation(
    use: Use, result: Layout, parameter: ParameterLayout, regions: Regions
) -> ManualOp | None:
    """A contraction or lookup with per-device partial sums; None if the batch is not sharded, or if
    the gradient cannot be computed one device at a time.
    """
    build = manual_lookup if use.equation.name == "gather" else manual_contraction
    return build(use, result, parameter, regions)


# --------------------------------------------------------------------------------------------------
# A slice of a parameter that is stored sharded: shards are sliced, then gathered.
#
# A sequence of 1,024 tokens reads as many rows of a table of positions [4096, embed_F]: every
# device slices its own columns, and these are gathered in their compute dtype. Gathered before the
# slice, it would be the whole table in its stored dtype.


def gathered_slice(
    use: Use, parameter: ParameterLayout, regions: Regions
) -> Callable[..., Value] | None:
    """A slice of a parameter that is gathered after slicing, and whose gradient is in the sharding
    that the optimizer reads; None if the parameter is sharded along a dim that the slice shortens.
    """
    out = use.equation.eqn.outvars[0].aval
    if use.position != 0 or None in use.view.dims or not parameter.trained:
        return None

    def by_dim(layout: Layout) -> DimAxes:
        return {
            dim: layout[origin] for dim, origin in enumerate(use.view.dims) if origin is not None
        }

    compute, stored, gradient = map(by_dim, (parameter.compute, parameter.rest, parameter.gradient))
    if not any(gradient.values()) or any(
        layout[dim]
        for layout in (compute, stored, gradient)
        for dim, size in enumerate(out.shape)
        if size < use.shape[dim]
    ):
        return None
    gathered = regions.gather_function(out.shape, stored, compute)
    # Over the batch the gradient is scattered first; the axes that shard its rows are gathered
    # later.
    gradient_spec = regions.spec(gradient, out.ndim)
    scattered = PartitionSpec(*(axes or PartitionSpec.UNCONSTRAINED for axes in gradient_spec))
    shardings = [NamedSharding(regions.mesh, spec) for spec in (scattered, gradient_spec)]

    def take(table: Value, *starts: Value) -> Value:
        return bind(use.equation, (table, *starts))[0]

    def forward(table: Value, *starts: Value) -> Value:
        return gathered(take(use.narrowest(table), *starts)).astype(out.dtype)

    @jax.custom_vjp
    def run(table: Value, *starts: Value) -> Value:
        return forward(table, *starts)

    def backward(starts: tuple[Value, ...], cotangent: Value) -> tuple[Value | None, ...]:
        summed = cotangent if use.rows_dtype is None else cotangent.astype(use.rows_dtype)
        for sharding in shardings:
            summed = jax.lax.with_sharding_constraint(summed, sharding)
        table = jax.ShapeDtypeStruct(use.shape, use.dtype)
        transpose = jax.linear_transpose(lambda table: take(table, *starts), table)
        return (*transpose(summed.astype(out.dtype)), *(None for _ in starts))

    run.defvjp(lambda table, *starts: (forward(table, *starts), starts), backward)
    return run


# --------------------------------------------------------------------------------------------------
# An operation on a weight, whose partial sums are accumulated over several runs and reduced once.
#
#     run(activation, weight, sums)      d/d sums = this device's partial sums; d/d weight = 0
#     run_last(activation, weight, sums) d/d weight = the reduced gradient of this run and of `sums`

#: (activation, weight, sums) -> result.
Operation = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class DeferredOp:
    """An operation whose weight is gathered before it runs, and whose gradient is reduced after
    several runs (deferred gradient reduction).

    Attributes:
        run: (operands in order, sums) -> result. The weight has no gradient; instead the gradient
            of `sums`, any array like `sums_aval`, is the per-device partial sums.
        run_last: (operands in order, sums) -> result, in the last run: `sums` are those of all runs
            before, and the gradient of the weight is that of all runs, reduced.
        gathers: whether the weight is stored sharded.
        gather: the operand in its stored sharding -> in its compute sharding.
        sums_aval: shape and dtype of partial sums, [devices that have some, ...].
        sums_spec: their sharding.
        reduce: partial sums -> the gradient of the operand, in its stored sharding.
    """

    use: Use
    run: Callable[[Sequence[Any], Any], Any]
    run_last: Callable[[Sequence[Any], Any], Any]
    gathers: bool
    gather: Callable[[Any], Any]
    sums_aval: jax.ShapeDtypeStruct
    sums_spec: PartitionSpec
    reduce: Callable[[Any], Any]


def deferred_op(
    use: Use, result: Layout, parameter: ParameterLayout, regions: Regions, *, lookups: bool = False
) -> DeferredOp | None:
    """An operation that reduces its gradient later; None for lookups unless `lookups`."""
    if (use.equation.name == "gather" and not lookups) or not parameter.trained:
        return None
    operation = manual_operation(use, result, parameter, regions)
    if operation is None:
        return None
    rank, size = len(use.shape), regions.ways(operation.partial_axes)
    sums_spec = PartitionSpec(
        regions.physical_axes(operation.partial_axes), *regions.spec(operation.weight_axes, rank)
    )

    def in_order(function: Operation) -> Callable[[Sequence[Any], Any], Any]:
        return lambda operands, sums: function(
            use.saved_operand(operands[1 - use.position]), operands[use.position], sums
        )

    gathered = weight_gather(use, parameter, regions)
    return DeferredOp(
        use=use,
        run=in_order(_run_deferred(operation, sums_spec)),
        run_last=in_order(_run_last(operation, sums_spec)),
        gathers=parameter.rest != parameter.compute,
        gather=lambda operand: gathered(use.narrowest(operand)),
        sums_aval=jax.ShapeDtypeStruct((size, *use.shape), use.dtype),
        sums_spec=sums_spec,
        reduce=regions.manual(
            lambda sums: operation.reduction.apply(sums[0], regions),
            (sums_spec,),
            operation.gradient_spec,
        ),
    )


def _backward(
    operation: ManualOp,
    activation: Any,
    get_weight: Callable[[], Any],
    cotangent: Any,
    *,
    finish_sums: Callable[..., tuple[Any, ...]],
    result_specs: Sequence[PartitionSpec],
    dtype: DType,
    sums: Sequence[Any] = (),
    sums_specs: Sequence[PartitionSpec] = (),
) -> tuple[Any, Sequence[Any]]:
    """The gradient of the activation, and the results of `finish_sums` on every device.

    Args:
        get_weight: gives the weight in its compute sharding.
        finish_sums: (partial sums, local shards of `sums`) -> arrays, on every device.
        result_specs: shardings of these arrays.
        dtype: of sums.
        sums, sums_specs: further arguments of `finish_sums`, and their shardings.
    """
    token_specs = operation.tokens()

    def local(activation: Any, cotangent: Any, *sums: Any) -> tuple[Any, ...]:
        own_sums = operation.partial_sums(activation, cotangent, operation.sum_dtype(dtype))
        return *finish_sums(own_sums, *sums), *(one_element(own_sums) for _ in token_specs)

    outputs = operation.regions.manual(
        local, (*operation.operand_specs, *sums_specs), (*result_specs, *token_specs)
    )(activation, operation.cotangent_for_sums(cotangent), *sums)
    gradient = operation.activation_gradient(activation, get_weight(), cotangent)
    results, tokens = outputs[: len(result_specs)], outputs[len(result_specs) :]
    return operation.after(gradient, tokens), results


def _run_deferred(operation: ManualOp, sums_spec: PartitionSpec) -> Operation:
    """(activation, weight, sums) -> result, whose partial sums are the gradient of `sums`."""

    @jax.custom_vjp
    def run(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.run(activation, weight)

    def backward(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved
        activation_gradient, (partial_sums,) = _backward(
            operation,
            activation,
            lambda: weight,
            cotangent,
            finish_sums=lambda own_sums: (own_sums[None].astype(sums.dtype),),
            result_specs=(sums_spec,),
            dtype=sums.dtype,
        )
        return activation_gradient, jnp.zeros_like(weight), partial_sums

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = operation.use.for_backward(activation)
        # the backward pass reads only the dtype of this array
        return operation.run(read, weight), (read, weight, jnp.zeros((), sums.dtype))

    run.defvjp(forward, backward)
    return run


def _run_last(operation: ManualOp, sums_spec: PartitionSpec) -> Operation:
    """(activation, weight, sums) -> result, with the gradient of the weight over all runs."""

    @jax.custom_vjp
    def run(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.run(activation, weight)

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = operation.use.for_backward(activation)
        return operation.run(read, weight), (read, weight, sums)

    def backward_of_all(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def finish_sums(own_sums: Any, sums: Any) -> tuple[Any, ...]:
            total = own_sums.astype(sums.dtype) + sums[0]
            return (operation.reduction.apply(total, operation.regions).astype(weight.dtype),)

        activation_gradient, (gradient,) = _backward(
            operation,
            activation,
            lambda: weight,
            cotangent,
            finish_sums=finish_sums,
            result_specs=(operation.gradient_spec,),
            dtype=sums.dtype,
            sums=(sums,),
            sums_specs=(sums_spec,),
        )
        return activation_gradient, gradient, jnp.zeros_like(sums)

    run.defvjp(forward, backward_of_all)
    return run


def with_reduced_gradient(
    use: Use, result: Layout, parameter: ParameterLayout, regions: Regions
) -> Callable[..., Value] | None:
    """An operation whose weight is gathered, and its gradient reduced, as the plan says.

    Returns:
        A function of the operands; None if the batch is not sharded, or if the gradient cannot be
        computed one device at a time.
    """
    gathered = weight_gather(use, parameter, regions)
    if not parameter.trained:
        return None if parameter.rest == parameter.compute else with_frozen_weight(use, gathered)
    operation = manual_operation(use, result, parameter, regions)
    if operation is None:
        return None

    def forward(activation: Value, weight: Value) -> Value:
        return operation.run(activation, gathered(use.narrowest(weight)))

    @jax.custom_vjp
    def run(activation: Value, weight: Value) -> Value:
        return forward(activation, weight)

    def fwd(activation: Value, weight: Value) -> tuple[Value, tuple[Value, Value | None]]:
        read = use.for_backward(activation)
        return forward(read, weight), (read, weight if operation.reads_weight else None)

    def backward(saved: tuple[Value, Value | None], cotangent: Value) -> tuple[Any, Value]:
        activation, weight = saved
        activation_gradient, (gradient,) = _backward(
            operation,
            activation,
            lambda: None if weight is None else gathered(use.narrowest(weight)),
            cotangent,
            finish_sums=lambda sums: (operation.reduction.apply(sums, regions),),
            result_specs=(operation.gradient_spec,),
            dtype=use.dtype,
        )
        return activation_gradient, gradient

    run.defvjp(fwd, backward)
    return in_operand_order(use, run)


# --------------------------------------------------------------------------------------------------
# The reduction of every parameter's gradient: over which mesh axes, when, to which sharding, in
# which dtype.
#
# Computed once from a plan and its loss, and carried out by every driver of a step (whole batch,
# accumulated microbatches, both pipelines, state on disk):
#
#     embed.kernel   partial sums over data, fsdp; in the last microbatch; to A[I_F, J_T]; bfloat16
#     norm.scale     partial sums over data, fsdp; each microbatch; to A[I]; its own dtype

#: Time of the reduction: in each microbatch; in the backward pass of the last microbatch, for the
#: partial sums of all; or after the last microbatch has left the pipeline.
EVERY_MICROBATCH, LAST_MICROBATCH = "each microbatch", "in the last"
AFTER_PIPELINE = "after the pipeline"


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """The reduction of the gradient of one parameter.

    Attributes:
        path: of the parameter.
        axes: mesh axes over which there are partial sums, in the order of the mesh.
        when: `EVERY_MICROBATCH`, `LAST_MICROBATCH` or `AFTER_PIPELINE`. Gradients that are not
            computed in a manual region (those of the scale of a norm) are reduced in every
            microbatch.
        layout: layout of the gradient as the optimizer reads it.
        dtype: communication dtype of the partial sums; None for their own.
    """

    path: str
    axes: tuple[str, ...]
    when: str
    layout: Layout
    dtype: Any


@dataclass(frozen=True, kw_only=True)
class GradientReductions:
    """The reductions of all gradients of a step.

    Attributes:
        parameters: for every parameter of the loss, in its order; None for frozen ones.
        when: the time of those reductions that can be deferred.
        manual: whether gradients of weights are reduced in manual regions, by the operations that
            use them; otherwise this is left to the compiler, except for reductions in the last
            microbatch.
    """

    parameters: tuple[GradientReduction | None, ...]
    when: str
    manual: bool
    precision: Precision

    def accumulator(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a dtype are summed over microbatches."""
        return self.precision.accumulator(dtype)


def reduction_time(plan: Plan) -> str:
    """The time of the reductions that a plan can defer; see `GradientReduction`."""
    if plan.mesh["stage"] > 1:
        return AFTER_PIPELINE if plan.gather == "once" or plan.zero < 2 else EVERY_MICROBATCH
    return LAST_MICROBATCH if plan.microbatches > 1 and plan.zero < 2 else EVERY_MICROBATCH


def gradient_reductions(
    plan: Plan,
    plan_indices: Sequence[int],
    uses: Mapping[str, Use],
    value_layouts: ValueLayouts,
    regions: Regions,
    loop_paths: Collection[str],
) -> GradientReductions:
    """The reductions of the gradients of a loss under a plan."""
    when = reduction_time(plan)
    layouts = [without_axes(plan.parameters[i], ("stage",)) for i in plan_indices]
    partial_axes: dict[int, set[str]] = {}
    for path, use in uses.items():
        index = use.view.parameter
        if (path, 0) in value_layouts and path not in loop_paths and layouts[index].trained:
            operation = manual_operation(use, value_layouts[path, 0], layouts[index], regions)
            if operation is not None and operation.partial_axes:
                partial_axes.setdefault(index, set()).update(operation.partial_axes)
    batch = {axis for _, layout in plan.batch_layouts for axis in layout.axes}

    def reduction(index: int, parameter: ParameterLayout) -> GradientReduction | None:
        if not parameter.trained:
            return None
        axes = partial_axes.get(index, batch.difference(parameter.compute.axes))
        return GradientReduction(
            path=parameter.path,
            axes=tuple(axis for axis in MESH_AXES if axis in axes),
            when=when if index in partial_axes else EVERY_MICROBATCH,
            layout=plan.parameters[plan_indices[index]].gradient,
            dtype=regions.reduction_dtype,
        )

    return GradientReductions(
        parameters=tuple(reduction(index, layout) for index, layout in enumerate(layouts)),
        when=when,
        manual=regions.reduction_dtype is not None or not _shares_memory(plan),
        precision=Precision.of(plan),
    )


def _shares_memory(plan: Plan) -> bool:
    """True if the devices are simulated ones of one process: only the number of collectives matters
    there, and XLA's CPU compiler combines all-reduces, but not reduce-scatters.
    """
    return all(link.kind == "memory" for _, links in plan.placement for link in links)
