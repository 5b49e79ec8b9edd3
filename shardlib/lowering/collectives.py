"""Building blocks of manual regions: axes and shardings, exchanges of partial sums, 8-bit matmuls,
dtypes of a step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.errors import MissingPackageError, PinError
from shardlib.formats import FORMATS
from shardlib.jax_types import Function
from shardlib.lowering.mesh import owner_of, physical_axes, shapes_of
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan

#: Mesh axes by dim; dims that are not sharded may be omitted.
DimAxes = dict[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Regions:
    """The mesh of manual regions, and the form of their collectives.

    Attributes:
        torus: whether some of the mesh's links form a torus.
        reduction_dtype: communication dtype of partial sums of gradients; None for their own.
    """

    mesh: Mesh | AbstractMesh
    torus: bool
    reduction_dtype: np.dtype | None = None

    def physical_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The names that mesh axes have in the mesh."""
        return physical_axes(self.mesh, axes)

    def ways(self, axes: Sequence[str]) -> int:
        """Number of shards of a dim that is sharded over axes."""
        size = 1
        for part in self.physical_axes(axes):
            size *= self.mesh.shape[part]
        return size

    def spec(self, target: DimAxes, rank: int) -> PartitionSpec:
        """The partition spec of an array."""
        return PartitionSpec(
            *(self.physical_axes(target.get(dim, ())) or None for dim in range(rank))
        )

    def manual(
        self,
        function: Function,
        in_specs: tuple[PartitionSpec, ...],
        out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Function:
        """A function of one device's shards as a function of global arrays; axes that are manual
        around it stay so.
        """
        automatic = {
            name
            for name, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            if kind != AxisType.Manual
        }
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self._with_single(spec, automatic) for spec in in_specs),
            out_specs=(
                self._with_single(out_specs, automatic)
                if isinstance(out_specs, PartitionSpec)
                else tuple(self._with_single(spec, automatic) for spec in out_specs)
            ),
            axis_names=automatic,
            check_vma=False,
        )

    def _with_single(self, spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
        """A spec whose first dim is also sharded over those mesh axes of size 1 that it omits.

        JAX reduces the gradient of an array over axes that do not shard it, and the compiler for
        simulated devices keeps a reduction among single devices: a copy of the gradient.
        """
        named = {name for dim in spec for name in ([dim] if isinstance(dim, str) else dim or ())}
        single = [
            name
            for name, size in self.mesh.shape.items()
            if size == 1 and name in axes and name not in named
        ]
        if not len(spec) or not single:
            return spec
        first = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
        return PartitionSpec((*first, *single), *spec[1:])

    def all_gather(self, array: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
        """A device's shard all-gathered along a dim that is sharded over axes; inside of a manual
        region. See `gather_function`.
        """
        parts = self.physical_axes(axes)
        if parts and dim and not self.torus:
            array = row_major(array)
        for group in (
            [(part,) for part in reversed(parts)]
            if self.torus and len(parts) > 2
            else [parts]
            if parts
            else []
        ):
            array = jax.lax.all_gather(array, group, axis=dim, tiled=True)
        return array

    def gather_function(
        self, shape: Sequence[int], stored: DimAxes | None, target: DimAxes
    ) -> Callable[[jax.Array], jax.Array]:
        """A function that gathers an array.

        It is one all-gather over all parts of an axis; on a torus of three dims, where the TPU
        compiler would make an all-reduce of that, one per part, the minor one first.

        Args:
            stored: sharding of the argument; None, or one that does not refine `target`, leaves the
                method to the compiler.
        """
        rank = len(shape)
        if stored is None or any(
            stored.get(dim, ())[: len(target.get(dim, ()))] != target.get(dim, ())
            or shape[dim] % self.ways(stored.get(dim, ()))
            for dim in range(rank)
        ):
            sharding = NamedSharding(self.mesh, self.spec(target, rank))
            return lambda array: jax.lax.with_sharding_constraint(array, sharding)
        missing = {dim: axes[len(target.get(dim, ())) :] for dim, axes in stored.items()}

        def local(array: jax.Array) -> jax.Array:
            for dim, axes in missing.items():
                array = self.all_gather(array, dim, axes)
            return array

        return self.manual(local, (self.spec(stored, rank),), self.spec(target, rank))


def row_major(array: jax.Array) -> jax.Array:
    """An array with its last dim innermost in memory.

    GPU collectives want their dim outermost. Without this, XLA gives that memory layout to the
    whole stack that a loop reads the array from, or writes it to: a copy of all layers at once.
    """
    return with_layout_constraint(array, ArrayLayout(major_to_minor=tuple(range(array.ndim))))


def regions_of(plan: Plan, mesh: Mesh | AbstractMesh) -> Regions:
    """The manual regions of a plan's program."""
    return Regions(
        mesh=mesh,
        torus=any(link.kind == "torus" for _, links in plan.placement for link in links),
        reduction_dtype=Precision.of(plan).reductions,
    )


# --------------------------------------------------------------------------------------------------
# Matmuls of weights in 8-bit formats.
#
# Operands are scaled so that their largest element is that of the format, and cast
# (arXiv:2209.05433); the matmul accumulates in float32. In the backward pass the cotangent is cast
# to float8_e5m2, which has the range that gradients need, and both gradients are 8-bit matmuls too.
# Scales and casts are those of qwix.

#: Format of cotangents.
COTANGENT_FORMAT = jnp.float8_e5m2
#: (contracted dims, batch dims) of both operands, as `jax.lax.dot_general` has them.
DotDims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def is_eight_bit(dtype: jax.typing.DTypeLike | None) -> TypeGuard[np.dtype]:
    """True if a dtype needs scales."""
    return dtype is not None and FORMATS[jnp.dtype(dtype).name].scaled


def require_qwix() -> None:
    """Checks that qwix is installed, without loading it."""
    if importlib.util.find_spec("qwix") is None:
        raise MissingPackageError(
            "8-bit matmuls need qwix, which is not installed\nTry: pip install"
            " 'shardlib[fp8]'  (or: pip install qwix)"
        )


def eight_bit_matmul(
    numbers: DotDims,
    ranks: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    result: jax.typing.DTypeLike,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """An 8-bit matmul of two arrays, with gradients.

    Args:
        dtype: of the operands.
        result: dtype of the result.
    """

    def forward(left: jax.Array, right: jax.Array) -> jax.Array:
        return _dot(left, right, numbers, dtype, dtype).astype(result)

    run = jax.custom_vjp(forward)

    def backward(
        saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        left, right = saved
        return eight_bit_gradient(numbers, ranks, 0, right, cotangent, dtype).astype(
            left.dtype
        ), eight_bit_gradient(numbers, ranks, 1, left, cotangent, dtype).astype(right.dtype)

    # Not `run`: the remat policy must see what it saves.
    run.defvjp(lambda left, right: (forward(left, right), (left, right)), backward)
    return run


def eight_bit_gradient(
    numbers: DotDims,
    ranks: tuple[int, int],
    position: int,
    operand: jax.Array,
    cotangent: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The gradient of one operand of a product, float32, from the other one and the cotangent of
    the result.

    Args:
        dtype: the 8-bit dtype of the matmul.
    """
    contracted, batch = numbers
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    other, batch_dims = 1 - position, len(batch[0])
    first = batch_dims + (len(free[0]) if other else 0)
    dims: DotDims = (
        (tuple(range(first, first + len(free[other]))), tuple(free[other])),
        (tuple(range(batch_dims)), tuple(batch[other])),
    )
    # Dims of the result: batch dims, those of the operand alone, and the contracted ones in the
    # order of the other operand.
    order = [
        *batch[position],
        *free[position],
        *(dim for _, dim in sorted(zip(contracted[other], contracted[position], strict=True))),
    ]
    return _dot(cotangent, operand, dims, COTANGENT_FORMAT, dtype).transpose(np.argsort(order))


def _dot(
    left: jax.Array,
    right: jax.Array,
    numbers: DotDims,
    left_dtype: jax.typing.DTypeLike,
    right_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    import qwix

    return qwix.dot_general(
        qwix.quantize(left, left_dtype),
        qwix.quantize(right, right_dtype),
        numbers,
        preferred_element_type=jnp.float32,
    )


# --------------------------------------------------------------------------------------------------
# The dtypes in which a step stores, multiplies, reduces and updates.
#
# The loss computes as it is written: parameters that are stored in another dtype are cast to the
# traced one where the loss reads them, in loops slice by slice. The update is computed in the wider
# of the two, so that stored float32 parameters are master weights of a 16-bit model
# (arXiv:1710.03740, section 3.1). Optimizer state is cast around the update.


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes that a plan decides; None for those of the traced model.

    Attributes:
        parameters: of stored parameters.
        matmuls: of the operands of matmuls with layers' weights.
        accumulators: of gradients accumulated over microbatches.
        reductions: communication dtype of gradients.
        moments: of optimizer state with a parameter's shape.
    """

    parameters: np.dtype | None = None
    matmuls: np.dtype | None = None
    accumulators: np.dtype | None = None
    reductions: np.dtype | None = None
    moments: np.dtype | None = None

    @staticmethod
    def of(plan: Plan) -> Precision:
        """The dtypes of a plan."""
        dtypes: Mapping[str, str] = dict(plan.dtypes)

        def dtype(name: str) -> np.dtype | None:
            return jnp.dtype(dtypes[name]) if name in dtypes else None

        return Precision(
            parameters=dtype("param_dtype"),
            matmuls=dtype("matmul_dtype"),
            accumulators=dtype("gradient_dtype"),
            reductions=dtype("reduction_dtype"),
            moments=dtype("moment_dtype"),
        )

    def as_stored(self, params: Tree) -> Tree:
        """Parameters in their stored dtypes: arrays, or abstract ones."""
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, self.parameters)
                if self.parameters is not None and is_real(leaf)
                else leaf
            ),
            params,
        )

    def for_update(self, params: Tree) -> Tree:
        """Abstract parameters in the dtypes of the update, from those of the traced model."""
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, jnp.promote_types(leaf.dtype, self.parameters))
                if self.parameters is not None and is_real(leaf)
                else leaf
            ),
            params,
        )

    def accumulator(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a dtype are accumulated: that of the plan, otherwise
        float32 at least.
        """
        return (
            self.accumulators
            if self.accumulators is not None and jnp.issubdtype(dtype, jnp.floating)
            else jnp.promote_types(dtype, jnp.float32)
        )


def require_matmuls(plan: Plan) -> None:
    """Raises if the matmuls of a plan cannot be run: 8-bit ones need chips with support for them,
    or simulated devices.
    """
    dtype = Precision.of(plan).matmuls
    if not is_eight_bit(dtype):
        return
    chip = (plan.source.topology if plan.source is not None else topology(plan.topology)).chip
    if chip.vendor != "cpu" and not any(name.startswith("float8") for name, _ in chip.flops_per_s):
        raise PinError(
            f"matmul_dtype={dtype.name!r}: the chip {chip.name} has no 8-bit floating-point"
            " matmuls\nTry: matmul_dtype='bfloat16', or chips that have them, such as h100"
        )
    require_qwix()


def is_real(leaf: Tree) -> bool:
    """True if an array has a real floating-point dtype."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def cast_like(tree: Tree, target: Tree) -> Tree:
    """A tree cast to the dtypes of another; leaves with these dtypes are unchanged."""
    return jax.tree.map(
        lambda leaf, model: leaf if leaf.dtype == model.dtype else leaf.astype(model.dtype),
        tree,
        target,
    )


def _cast(leaf: Tree, dtype: Any) -> Any:
    if leaf.dtype == dtype:
        return leaf
    return (
        jax.ShapeDtypeStruct(leaf.shape, dtype)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf.astype(dtype)
    )


def with_stored_dtypes(
    optimizer: optax.GradientTransformation, params: Tree, precision: Precision
) -> optax.GradientTransformation:
    """An optimizer whose state is stored in the dtypes of a plan, and is cast to those of its
    update around every update.

    Args:
        precision: the dtypes; if they change nothing, the optimizer is returned unchanged.
    """
    stored_state = jax.eval_shape(optimizer.init, params)
    computed = jax.eval_shape(optimizer.init, precision.for_update(params))
    if precision.moments is not None:
        shapes = shapes_of(params)
        stored_state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                _cast(leaf, precision.moments)
                if is_real(leaf) and owner_of(path, leaf, shapes) is not None
                else leaf
            ),
            stored_state,
        )
    # leaves, since nodes may have an `==` of their own
    if jax.tree.leaves(stored_state) == jax.tree.leaves(computed):
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return cast_like(inner.init(params), stored_state)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, cast_like(state, computed), params, **extra)
        return updates, cast_like(state, stored_state)

    return optax.GradientTransformationExtraArgs(init, update)
