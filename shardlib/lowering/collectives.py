"""Collectives of manual regions: axes and shardings, exchanges of partial sums, products in 8 bits,
dtypes of a step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.errors import MissingPackageError, PinError
from shardlib.jax_types import Function, Value
from shardlib.lowering.mesh import owned, parts_of, shapes_of
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan

# --------------------------------------------------------------------------------------------------
# Exchanges of partial sums of gradients: values and dtype that devices send, and residuals that
# they keep for the next step.
#
# An exchange is a function of one device's partial sums and of the collectives that reduce them.
# The one of all plans today sends them in a dtype:
#
# InDtype(bfloat16) gradient = collectives(round(partial))
#
# and one with error feedback (arXiv:1901.09847) keeps what it did not send, which is added to the
# partial sums of the next step:
#
# sent = round(partial) gradient = collectives(sent) kept = partial - sent

#: Reduces one device's share, inside a manual region, in the dtype that it has: reduce-scatters
#: over the mesh axes that shard the gradient, all-reduces over the others.
Collectives = Callable[[jax.Array], jax.Array]


class GradientExchange(Protocol):
    """Exchange of the partial sums of a gradient, inside a manual region."""

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype in which partial sums are sent; None for their own."""
        ...

    @property
    def keeps(self) -> bool:
        """True if every device keeps something of its partial sums for the next step."""
        ...

    def __call__(
        self, partial: jax.Array, collectives: Collectives
    ) -> tuple[jax.Array, jax.Array | None]:
        """Reduces partial sums.

        Returns:
            The gradient, in the dtype of the partial sums, and what the device keeps, of their
            shape and dtype; None where it keeps nothing.
        """
        ...


@dataclass(frozen=True)
class InDtype:
    """Partial sums are sent in a dtype, and nothing is kept.

    Attributes:
        dtype: it; None for the dtype that they have.
    """

    dtype: np.dtype | None = None

    @property
    def keeps(self) -> bool:
        """Nothing is kept."""
        return False

    def __call__(self, partial: jax.Array, collectives: Collectives) -> tuple[jax.Array, None]:
        """See `GradientExchange`."""
        dtype = partial.dtype
        sent = (
            partial.astype(self.dtype)
            if self.dtype is not None and jnp.issubdtype(dtype, jnp.floating)
            else partial
        )
        return collectives(sent).astype(dtype), None


#: Partial sums are sent as they are.
PLAIN = InDtype()

#: Mesh axes per dim; dims that are not sharded may be left out.
Cuts = dict[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The mesh and the backend that the reduction of gradients runs on.

    Attributes:
        mesh: the mesh of the program.
        torus: whether some of its links form a torus.
        exchange: how partial sums of gradients are exchanged.
    """

    mesh: Mesh | AbstractMesh
    torus: bool
    exchange: GradientExchange = PLAIN

    def parts(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The names that mesh axes have in the mesh."""
        return parts_of(self.mesh, axes)

    def ways(self, axes: Sequence[str]) -> int:
        """Number of pieces of a dim that is sharded over axes."""
        size = 1
        for part in self.parts(axes):
            size *= self.mesh.shape[part]
        return size

    def spec(self, cuts: Cuts, rank: int) -> PartitionSpec:
        """Returns how each dim is sharded, as JAX says it."""
        return PartitionSpec(*(self.parts(cuts.get(dim, ())) or None for dim in range(rank)))

    def manual(
        self,
        function: Function,
        arguments: tuple[PartitionSpec, ...],
        result: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Function:
        """A function of what one device holds as a function of whole arrays; axes that are manual
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
            in_specs=tuple(self._with_single(spec, automatic) for spec in arguments),
            out_specs=(
                self._with_single(result, automatic)
                if isinstance(result, PartitionSpec)
                else tuple(self._with_single(spec, automatic) for spec in result)
            ),
            axis_names=automatic,
            check_vma=False,
        )

    def _with_single(self, spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
        """A spec whose first dim is also sharded over those axes of one device that it leaves out.

        JAX reduces the gradient of what is not sharded over an axis along it, and the compiler for
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

    def gathered(self, array: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
        """A device's shard of an array as the whole, along a dim that is sharded over axes; inside
        of a manual region. See `gather`.
        """
        parts = self.parts(axes)
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

    def gather(
        self, shape: Sequence[int], pieces: Cuts | None, cuts: Cuts
    ) -> Callable[[jax.Array], jax.Array]:
        """A function that gathers an array.

        One all-gather over all parts of an axis; on a torus of three dims, where the TPU compiler
        makes an all-reduce of that, one part after another, the minor one first.

        Args:
            pieces: how the array comes; None, or cuts that do not refine `cuts`, leave the way to
                the compiler.
        """
        rank = len(shape)
        if pieces is None or any(
            pieces.get(dim, ())[: len(cuts.get(dim, ()))] != cuts.get(dim, ())
            or shape[dim] % self.ways(pieces.get(dim, ()))
            for dim in range(rank)
        ):
            sharding = NamedSharding(self.mesh, self.spec(cuts, rank))
            return lambda array: jax.lax.with_sharding_constraint(array, sharding)
        missing = {dim: axes[len(cuts.get(dim, ())) :] for dim, axes in pieces.items()}

        def local(array: jax.Array) -> jax.Array:
            for dim, axes in missing.items():
                array = self.gathered(array, dim, axes)
            return array

        return self.manual(local, (self.spec(pieces, rank),), self.spec(cuts, rank))


def row_major(array: jax.Array) -> jax.Array:
    """An array with its last dim innermost in memory.

    Collectives of GPUs want the dim that they work on outermost. Left alone, XLA lays out the whole
    stack that a loop takes the array from, or puts it into, in that order: a copy of all layers at
    once.
    """
    return with_layout_constraint(array, ArrayLayout(major_to_minor=tuple(range(array.ndim))))


def machine_of(
    plan: Plan, mesh: Mesh | AbstractMesh, exchange: GradientExchange | None = None
) -> Machine:
    """The machine that a plan's program runs on; by default gradients are sent in their dtype."""
    return Machine(
        mesh=mesh,
        torus=any(link.kind == "torus" for _, links in plan.placement for link in links),
        exchange=exchange or PLAIN,
    )


# --------------------------------------------------------------------------------------------------
# Products of weights in formats of 8 bits.
#
# Operands are divided by their largest element, over that of the format, and cast
# (arXiv:2209.05433); the product adds up in float32. Going back, the cotangent is cast to
# float8_e5m2, which has the range that gradients need, and both gradients are products of 8 bits
# too. Scales and casts are those of qwix.

#: Format of cotangents.
BACK = jnp.float8_e5m2
#: (contracted dims, batch dims) of both operands, as `jax.lax.dot_general` has them.
Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def is_eight_bit(dtype: jax.typing.DTypeLike | None) -> TypeGuard[np.dtype]:
    """Returns whether a dtype needs scales."""
    return dtype is not None and jnp.dtype(dtype).itemsize == 1


def require_qwix() -> None:
    """Checks that the library of products is installed, without loading it."""
    if importlib.util.find_spec("qwix") is None:
        raise MissingPackageError(
            "products in 8 bits are those of qwix, which is not installed\nTry: pip install"
            " 'shardlib[fp8]'  (or: pip install qwix)"
        )


def product(
    numbers: Numbers,
    ranks: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    result: jax.typing.DTypeLike,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A product of two arrays in 8 bits, with gradients.

    Args:
        dtype: of the operands.
        result: dtype of the result.
    """

    def made(left: jax.Array, right: jax.Array) -> jax.Array:
        return _dot(left, right, numbers, dtype, dtype).astype(result)

    run = jax.custom_vjp(made)

    def backward(
        saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        left, right = saved
        return gradient(numbers, ranks, 0, right, cotangent, dtype).astype(left.dtype), gradient(
            numbers, ranks, 1, left, cotangent, dtype
        ).astype(right.dtype)

    # Not `run`: what a policy of rematerialisation saves it must see.
    run.defvjp(lambda left, right: (made(left, right), (left, right)), backward)
    return run


def gradient(
    numbers: Numbers,
    ranks: tuple[int, int],
    side_of_result: int,
    operand: jax.Array,
    cotangent: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The gradient of one operand of a product, float32, from the other one and the cotangent of
    the result.

    Args:
        dtype: of 8 bits, that the product is made in.
    """
    contracted, batch = numbers
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    opposite, along = 1 - side_of_result, len(batch[0])
    first = along + (len(free[0]) if opposite else 0)
    back: Numbers = (
        (tuple(range(first, first + len(free[opposite]))), tuple(free[opposite])),
        (tuple(range(along)), tuple(batch[opposite])),
    )
    # Dims of the result: those that go along, those of the operand alone, and the contracted ones
    # in the order of the other operand.
    order = [
        *batch[side_of_result],
        *free[side_of_result],
        *(
            dim
            for _, dim in sorted(zip(contracted[opposite], contracted[side_of_result], strict=True))
        ),
    ]
    return _dot(cotangent, operand, back, BACK, dtype).transpose(np.argsort(order))


def _dot(
    left: jax.Array,
    right: jax.Array,
    numbers: Numbers,
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
# The loss computes as it is written: stored parameters in another dtype are cast to the one that
# it was traced with where it takes them, in loops slice by slice. The update is computed in the
# wider of the two, so that float32 as stored are master weights of a model in 16 bits
# (arXiv:1710.03740, section 3.1). Optimizer state is cast around the update.


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes that a plan decides for; None where they are those of the traced model.

    Attributes:
        rest: of parameters between steps.
        products: of the operands of products of layers' weights.
        kept: of gradients that are added up over microbatches.
        wire: of communicated gradients.
        moments: of optimizer state with a parameter's shape.
    """

    rest: np.dtype | None = None
    products: np.dtype | None = None
    kept: np.dtype | None = None
    wire: np.dtype | None = None
    moments: np.dtype | None = None

    @staticmethod
    def of(plan: Plan) -> Precision:
        """The dtypes of a plan."""
        words: Mapping[str, str] = dict(plan.dtypes)

        def dtype(word: str) -> np.dtype | None:
            return jnp.dtype(words[word]) if word in words else None

        return Precision(
            rest=dtype("param_dtype"),
            products=dtype("matmul_dtype"),
            kept=dtype("gradient_dtype"),
            wire=dtype("reduction_dtype"),
            moments=dtype("moment_dtype"),
        )

    def resting(self, params: Tree) -> Tree:
        """Parameters as they rest: arrays, or abstract ones."""
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, self.rest) if self.rest is not None and is_real(leaf) else leaf
            ),
            params,
        )

    def updated(self, params: Tree) -> Tree:
        """Abstract parameters in the dtypes that the update is computed in, for those of the traced
        model.
        """
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, jnp.promote_types(leaf.dtype, self.rest))
                if self.rest is not None and is_real(leaf)
                else leaf
            ),
            params,
        )

    def sums(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a dtype are added up: as the plan says, otherwise float32
        at least.
        """
        return (
            self.kept
            if self.kept is not None and jnp.issubdtype(dtype, jnp.floating)
            else jnp.promote_types(dtype, jnp.float32)
        )


def require_products(plan: Plan) -> None:
    """Checks that the products of a plan can be made: those in 8 bits on chips that have them, or
    on simulated devices.
    """
    dtype = Precision.of(plan).products
    if not is_eight_bit(dtype):
        return
    chip = (plan.source.topology if plan.source is not None else topology(plan.topology)).chip
    if chip.vendor != "cpu" and not any(name.startswith("float8") for name, _ in chip.flops_per_s):
        raise PinError(
            f"matmul_dtype={dtype.name!r}: the chip {chip.name} has no products in 8-bit floating"
            " point\nTry: matmul_dtype='bfloat16', or chips that have them, such as h100"
        )
    require_qwix()


def is_real(leaf: Tree) -> bool:
    """Returns whether an array holds real floating-point numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def like(tree: Tree, target: Tree) -> Tree:
    """A tree with the dtypes of another; leaves that have them already are passed on."""
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


def stored(
    optimizer: optax.GradientTransformation, params: Tree, precision: Precision
) -> optax.GradientTransformation:
    """An optimizer whose state rests in the dtypes of a plan, and is cast to those of its update
    around every update.

    Args:
        precision: the dtypes; where they change nothing, the optimizer is returned as it is.
    """
    at_rest = jax.eval_shape(optimizer.init, params)
    computed = jax.eval_shape(optimizer.init, precision.updated(params))
    if precision.moments is not None:
        shapes = shapes_of(params)
        at_rest = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                _cast(leaf, precision.moments)
                if is_real(leaf) and owned(path, leaf, shapes) is not None
                else leaf
            ),
            at_rest,
        )
    if jax.tree.leaves(at_rest) == jax.tree.leaves(computed):  # nodes may have an `==` of their own
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return like(inner.init(params), at_rest)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, like(state, computed), params, **extra)
        return updates, like(state, at_rest)

    return optax.GradientTransformationExtraArgs(init, update)


# --------------------------------------------------------------------------------------------------
# A manual region that all devices along some axes compute alike, whose gradients need not be
# summed.
#
# JAX takes what such a region reads whole for what every device adds to: the gradient is divided
# by the number of devices and all-reduced, though each has all of it. Here each device has its
# copy as a row of its own, `[devices, ...]`, inside of the region; the rows are made and taken
# without a word to the others, forward and backward.


def alike(
    machine: Machine,
    function: Function,
    arguments: Sequence[PartitionSpec],
    result: PartitionSpec,
) -> Function:
    """`Machine.manual` of a function of which devices along the axes that its result is not sharded
    over compute the same of the same arrays.
    """
    named = {name for spec in (*arguments, result) for name in _names(spec)}
    axes = tuple(
        name
        for name, kind in zip(machine.mesh.axis_names, machine.mesh.axis_types, strict=True)
        if kind != AxisType.Manual and machine.mesh.shape[name] > 1 and name not in named
    )
    if not axes:
        return machine.manual(function, tuple(arguments), result)

    def made(*arrays: Value) -> Value:
        differentiable = [_differentiable(array) for array in arrays]

        def local(*shards: Value) -> Value:
            return function(
                *(
                    shard[0] if row else shard
                    for shard, row in zip(shards, differentiable, strict=True)
                )
            )[None]

        region = machine.manual(
            local,
            tuple(
                PartitionSpec(axes, *spec) if row else spec
                for spec, row in zip(arguments, differentiable, strict=True)
            ),
            PartitionSpec(axes, *result),
        )
        rows = [
            _rows(machine, axes, spec)(array) if row else array
            for array, spec, row in zip(arrays, arguments, differentiable, strict=True)
        ]
        return _row(machine, axes, result)(region(*rows))

    return made


def _names(spec: PartitionSpec) -> set[str]:
    return {name for dim in spec for name in ([dim] if isinstance(dim, str) else dim or ())}


def _differentiable(array: Value) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _rows(machine: Machine, axes: tuple[str, ...], spec: PartitionSpec) -> Function:
    """Each device's copy of an array as a row of its own; backward, the row that it has."""
    return _turned(*_ways(machine, axes, spec))


def _row(machine: Machine, axes: tuple[str, ...], spec: PartitionSpec) -> Function:
    """The array whose copies are the rows of devices; backward, a row for each."""
    return _turned(*reversed(_ways(machine, axes, spec)))


def _ways(
    machine: Machine, axes: tuple[str, ...], spec: PartitionSpec
) -> tuple[Function, Function]:
    rows = PartitionSpec(axes, *spec)
    return (
        machine.manual(lambda array: array[None], (spec,), rows),
        machine.manual(lambda copies: copies[0], (rows,), spec),
    )


def _turned(there: Function, back: Function) -> Function:
    """A function with another one as its derivative, backward."""
    turned = jax.custom_vjp(there)
    turned.defvjp(lambda array: (there(array), None), lambda _, cotangent: (back(cotangent),))
    return turned
