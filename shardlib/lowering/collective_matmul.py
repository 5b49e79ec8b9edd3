"""Collective matmul: collectives over the tensor axis hidden behind the matmuls that they feed.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardlib.annotation.trees import Tree
from shardlib.jax_types import Index
from shardlib.layout import Layout
from shardlib.lowering.collectives import DimAxes, Regions
from shardlib.lowering.contractions import Use, ValueLayouts
from shardlib.lowering.uses import LossEquation, LossFacts, ValueSource
from shardlib.lowering.weights import (
    ContractionDims,
    ManualContraction,
    contraction_dims,
    operand_reduction,
    weight_gather,
)
from shardlib.planner.plan import ParameterLayout
from shardlib.tracing.program import Program
from shardlib.tracing.rewriting import SHARDED_MATMUL, EquationGroup

# --------------------------------------------------------------------------------------------------
# Matmuls of a loss that gather their activation along the sequence, or scatter their result, over
# the tensor axis.
#
# A matmul gathers if tensor shards its weight along columns, its activation along another dim (the
# sequence, as next to norms), and its result no longer along that dim. It scatters if tensor shards
# the contracted dim and the result along such a dim. Matmuls of one activation form a group: it is
# gathered once for all of them.

#: The mesh axis that shards weights in use.
TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class WeightMatmul:
    """A matmul of a weight.

    Attributes:
        use: its use of the weight.
        activation: an identifier of the activation, equal for equal activations.
        source: the source of the activation; None for inputs of the loss.
    """

    use: Use
    activation: tuple[Any, ...]
    source: ValueSource | None

    @property
    def path(self) -> str:
        """The path of the equation."""
        return self.use.equation.path

    @property
    def layout_key(self) -> ValueSource:
        """The key of the activation's layout among those of values."""
        return f"{self.path}/operand", 1 - self.use.position


@dataclass(frozen=True, kw_only=True)
class MatchedMatmul:
    """A matmul that a loop can replace.

    Attributes:
        gathers: whether its activation is gathered; otherwise its result is scattered.
        dims: the correspondence of its dims.
        activation, result: layouts of both.
        sequence_dims: the dim of the activation and that of the result, of which one is sharded.
    """

    matmul: WeightMatmul
    gathers: bool
    dims: ContractionDims
    activation: Layout
    result: Layout
    sequence_dims: tuple[int, int]


def weight_matmuls(loss: LossFacts) -> tuple[WeightMatmul, ...]:
    """The matmuls of weights of a loss, in order."""
    candidates = [
        _matmul(equation)
        for equation in loss.equations
        if equation.equation.name == "dot_general" and equation.equation.call is None
    ]
    return tuple(matmul for matmul in candidates if matmul is not None)


def activation_sources(matmuls: Sequence[WeightMatmul]) -> dict[ValueSource, ValueSource]:
    """Keys of the layouts of activations -> the sources of these."""
    return {matmul.layout_key: matmul.source for matmul in matmuls if matmul.source is not None}


def _matmul(entry: LossEquation) -> WeightMatmul | None:
    equation = entry.equation
    if len(entry.parameter_operands) != 1:
        return None
    ((weight, view),) = entry.parameter_operands
    number = equation.inputs[1 - weight]
    return WeightMatmul(
        use=Use(equation=equation, position=weight, view=view),
        activation=(equation.path.rpartition("/")[0], *_before_casts(entry.program, number)),
        source=entry.sources[1 - weight],
    )


def _before_casts(program: Program, number: int) -> tuple[Any, ...]:
    """An identifier of a value before casts: layers cast their input anew for each matmul."""
    for equation in program.equations:
        if number in equation.outputs and equation.name == "convert_element_type":
            return (*_before_casts(program, equation.inputs[0]), str(program.avals[number].dtype))
    return (number,)


def match_matmul(
    matmul: WeightMatmul, parameter: ParameterLayout, layouts: ValueLayouts, size: int
) -> MatchedMatmul | None:
    """The loop that can replace a matmul under a plan; None if its operands and result are sharded
    differently.
    """
    activation, result = layouts.get(matmul.layout_key), layouts.get((matmul.path, 0))
    if activation is None or result is None:
        return None
    dims = contraction_dims(matmul.use.equation, matmul.use.position)
    sharded = [
        dim
        for dim, parameter_dim in enumerate(matmul.use.view.dims)
        if parameter_dim is not None and parameter.compute[parameter_dim]
    ]
    if (
        len(sharded) != 1
        or set(parameter.compute.axes) != {TENSOR}
        or parameter.compute[matmul.use.view.dims[sharded[0]] or 0] != (TENSOR,)
    ):
        return None
    gathers = sharded[0] in dims.result
    ring_axes = (
        result[dims.result[sharded[0]]]
        if gathers
        else activation[dims.activation[sharded[0]]]
        if sharded[0] in dims.activation
        else ()
    )
    sharded_layout, gathered_layout = (activation, result) if gathers else (result, activation)
    free_axes = {
        (activation_dim, result_dim): (
            sharded_layout[activation_dim if gathers else result_dim],
            gathered_layout[result_dim if gathers else activation_dim],
        )
        for result_dim, activation_dim in dims.free.items()
    }
    sequences = [pair for pair, (axes, full) in free_axes.items() if axes == (*full, TENSOR)]
    if (
        ring_axes != (TENSOR,)
        or len(sequences) != 1
        or any(axes != full for pair, (axes, full) in free_axes.items() if pair not in sequences)
    ):
        return None
    if not _only_sharded(
        activation, dims.free.values(), dims.activation.get(sharded[0])
    ) or not _only_sharded(result, dims.free, dims.result.get(sharded[0])):
        return None
    return (
        MatchedMatmul(
            matmul=matmul,
            gathers=gathers,
            dims=dims,
            activation=activation,
            result=result,
            sequence_dims=sequences[0],
        )
        if matmul.use.other_aval.shape[sequences[0][0]] % size == 0
        else None
    )


def _only_sharded(layout: Layout, own_dims: Any, sharded: int | None) -> bool:
    """True if only its own dims, and the one that the weight is sharded along, are sharded."""
    return not any(
        layout[dim] for dim in range(len(layout)) if dim not in set(own_dims) and dim != sharded
    )


def loop_groups(
    matches: Sequence[MatchedMatmul], candidates: Sequence[WeightMatmul], layouts: ValueLayouts
) -> list[tuple[MatchedMatmul, ...]]:
    """Matmuls that share a loop: those that gather the same activation, unless another operation
    needs it gathered anyway; those that scatter, each on its own.
    """
    paths = {match.matmul.path for match in matches}
    gathered_anyway = {
        matmul.activation
        for matmul in candidates
        if matmul.path not in paths and TENSOR not in layouts.get((matmul.path, 0), Layout()).axes
    }
    groups: dict[Any, list[MatchedMatmul]] = {}
    for match in matches:
        groups.setdefault(
            (match.matmul.activation, match.sequence_dims[0])
            if match.gathers
            else match.matmul.path,
            [],
        ).append(match)
    return [
        tuple(members)
        for members in groups.values()
        if not members[0].gathers or members[0].matmul.activation not in gathered_anyway
    ]


# --------------------------------------------------------------------------------------------------
# Shards of an array passed around the devices of the tensor axis, with a computation on each.
#
# The functions run inside of a region that is manual over the axis. All loops are unrolled, so that
# the compiler sees which messages and which matmuls are independent: the message of the next turn
# is in flight while the shard of this turn is multiplied. Shards are passed in both directions: a
# link of a torus has full bandwidth in each direction at once, and while sums of one direction are
# in flight, products for the other are computed.

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class AxisRing:
    """A mesh axis as a ring.

    Attributes:
        axis: names of the axis in the mesh, the major one first.
        order: index of the device at every position of the ring.
        sequential: whether a matmul waits for the one before it, see `wait_for`.
    """

    axis: tuple[str, ...]
    order: tuple[int, ...]
    sequential: bool = True

    @staticmethod
    def of_axis(
        axis: tuple[str, ...], sizes: tuple[int, ...], *, sequential: bool = True
    ) -> AxisRing:
        """A ring whose neighbours are neighbours along one part of the axis; its two ends only if
        the major part is a ring itself, or has size 2.
        """
        return AxisRing(axis=axis, order=snake(sizes), sequential=sequential)

    @property
    def ways(self) -> int:
        """Number of devices."""
        return len(self.order)

    @property
    def hops(self) -> tuple[int, int]:
        """Numbers of turns in which shards are passed forward and backward."""
        return self.ways // 2, (self.ways - 1) // 2

    def fold(
        self, array: jax.Array, work: Callable[[Result | None, jax.Array, jax.Array], Result]
    ) -> Result:
        """A fold over the shards of all devices, the own one first.

        Args:
            work: (result so far, None at first; index of a device; its shard) -> next result.
        """
        position, (forth, back) = self._position(), self.hops
        result, moving = work(None, self._device(position), array), {1: array, -1: array}
        for turn in range(1, forth + 1):
            for direction in (1, -1) if turn <= back else (1,):
                moving[direction], result = self.wait_for(
                    self._received(moving[direction], direction), result
                )
                result = work(result, self._device(position - direction * turn), moving[direction])
        return result

    def reduce_scatter(
        self, arrays_for: Callable[[jax.Array], Tree], product: Callable[[Tree], jax.Array]
    ) -> jax.Array:
        """The sum over all devices of their products for this one.

        Args:
            arrays_for: index of a device -> arrays.
            product: the arrays for a device -> this device's term of that device's sum.
        """
        position, (forth, back) = self._position(), self.hops
        turns = [
            (distance, direction)
            for distance in range(forth, 0, -1)
            for direction in (1, -1)
            if direction > 0 or distance <= back
        ]
        sums: dict[int, Any] = {1: None, -1: None}
        products = self._products(
            [
                arrays_for(self._device(position + direction * distance))
                for distance, direction in [*turns, (0, 1)]
            ],
            product,
        )
        for (_, direction), partial in zip(turns, products, strict=False):
            sums[direction] = self._received(_plus(sums[direction], partial), direction)
        return _plus(sums[-1], _plus(sums[1], next(products)))

    def wait_for(self, arrays: Tree, ready: Tree) -> tuple[Tree, Tree]:
        """Both arguments unchanged; with `sequential`, computations from the first wait for the
        second.

        XLA's compiler for GPUs would otherwise merge matmuls of one weight into a single one
        (openxla/xla `xla/hlo/transforms/simplifiers/dot_merger.cc`), which waits for the last
        message. The compiler for TPUs merges none, and fuses sums into matmuls if nothing is
        between the two.
        """
        return jax.lax.optimization_barrier((arrays, ready)) if self.sequential else (arrays, ready)

    def _products(
        self, operands: Sequence[Tree], product: Callable[[Tree], jax.Array]
    ) -> Iterator[jax.Array]:
        result = product(operands[0])
        for arrays in operands[1:]:
            arrays, result = self.wait_for(arrays, result)
            yield result
            result = product(arrays)
        yield result

    def _position(self) -> jax.Array:
        """The position of this device on the ring."""
        return jnp.asarray(np.argsort(self.order), jnp.int32)[jax.lax.axis_index(self.axis)]

    def _device(self, position: jax.Array) -> jax.Array:
        """The device at a position, modulo the size of the ring."""
        return jnp.asarray(self.order, jnp.int32)[position % self.ways]

    def _received(self, array: jax.Array, offset: int) -> jax.Array:
        """The array of the neighbour from which arrays come that are passed in a direction."""
        return jax.lax.ppermute(
            array,
            self.axis,
            [
                (device, self.order[(position + offset) % self.ways])
                for position, device in enumerate(self.order)
            ],
        )


def _plus(total: jax.Array | None, part: jax.Array) -> jax.Array:
    return part if total is None else total + part


def snake(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major indices of the cells of a grid, in an order in which neighbours differ by one
    step along one dim (a reflected Gray code).

    >>> snake((2, 2, 2)), snake((2, 3)), snake((4,))
    ((0, 1, 3, 2, 6, 7, 5, 4), (0, 1, 2, 5, 4, 3), (0, 1, 2, 3))
    """
    order = (0,)
    inside = 1
    for size in reversed(sizes):
        order = tuple(
            outer * inside + number
            for outer in range(size)
            for number in (order[::-1] if outer % 2 else order)
        )
        inside *= size
    return order


# --------------------------------------------------------------------------------------------------
# The computation of one device, if the sequence is gathered for its matmuls, or their results are
# scattered.
#
# The functions run inside of a region that is manual over all axes; arrays are one device's shards.
# The gradient of a matmul that gathers is one that scatters, and vice versa; the gradient of a
# weight is accumulated over shards in float32. A matmul waits for the one before it where that
# hides more communication (`AxisRing.wait_for`).


@dataclass(frozen=True, kw_only=True)
class SequenceMatmul:
    """A matmul in which one dim of both activation and result is the sequence.

    Attributes:
        contraction: the matmul in a manual region.
        activation_dim, result_dim: the sequence dim of each.
    """

    contraction: ManualContraction
    activation_dim: int
    result_dim: int


def gather_forward(
    products: Sequence[SequenceMatmul],
    ring: AxisRing,
    activation: jax.Array,
    weights: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Products of an activation that is sharded along the sequence."""

    def work(results: Any, device: Any, shard: Any) -> list[Any]:
        return [
            write_shard(
                results and results[k],
                product.contraction.run(shard, weight),
                product.result_dim,
                device,
                ring.ways,
            )
            for k, (product, weight) in enumerate(zip(products, weights, strict=True))
        ]

    return tuple(ring.fold(activation, work))


def gather_backward(
    products: Sequence[SequenceMatmul],
    ring: AxisRing,
    activation: jax.Array,
    weights: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Gradients of `gather_forward`: of the device's own shard of the activation, and of the
    weights from this device's examples.
    """

    def cotangent_shards(device: Index) -> list[jax.Array]:
        return [
            shard_of(cotangent, product.result_dim, device, ring.ways)
            for product, cotangent in zip(products, cotangents, strict=True)
        ]

    def input_gradient(shards: list[jax.Array]) -> jax.Array:
        total: Any = None
        for product, weight, shard in zip(products, weights, shards, strict=True):
            product_gradient = product.contraction.activation_gradient(activation, weight, shard)
            total = product_gradient if total is None else total + product_gradient
        return total

    def work(sums: Any, device: Any, shard: Any) -> list[Any]:
        return [
            accumulate(
                sums and sums[k],
                product.contraction.partial_sums(
                    shard, shard_of(cotangent, product.result_dim, device, ring.ways), weight.dtype
                ),
            )
            for k, (product, weight, cotangent) in enumerate(
                zip(products, weights, cotangents, strict=True)
            )
        ]

    sums = ring.fold(activation, work)
    return ring.reduce_scatter(cotangent_shards, input_gradient), tuple(
        total.astype(weight.dtype) for total, weight in zip(sums, weights, strict=True)
    )


def scatter_forward(
    product: SequenceMatmul, ring: AxisRing, activation: jax.Array, weight: jax.Array
) -> jax.Array:
    """A product that is a sum over devices, reduce-scattered along the sequence."""
    return ring.reduce_scatter(
        lambda device: shard_of(activation, product.activation_dim, device, ring.ways),
        lambda shard: product.contraction.run(shard, weight),
    )


def scatter_backward(
    product: SequenceMatmul,
    ring: AxisRing,
    activation: jax.Array,
    weight: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `scatter_forward`: of the activation, and of the weight from this device's
    examples.
    """
    shard_shape = jax.eval_shape(
        lambda: shard_of(activation, product.activation_dim, jnp.int32(0), ring.ways)
    )

    def work(totals: Any, device: Any, shard: Any) -> tuple[Any, Any]:
        activation_gradient, total = totals or (None, None)
        activation_gradient = write_shard(
            activation_gradient,
            product.contraction.activation_gradient(shard_shape, weight, shard),
            product.activation_dim,
            device,
            ring.ways,
        )
        return activation_gradient, accumulate(
            total,
            product.contraction.partial_sums(
                shard_of(activation, product.activation_dim, device, ring.ways), shard, weight.dtype
            ),
        )

    activation_gradient, total = ring.fold(cotangent, work)
    return activation_gradient, total.astype(weight.dtype)


def accumulate(total: jax.Array | None, part: jax.Array) -> jax.Array:
    """A sum of parts of a gradient, in float32 at least.

    Args:
        total: the sum so far; None at the start.
    """
    part = part.astype(jnp.promote_types(part.dtype, jnp.float32))
    return part if total is None else total + part


def write_shard(
    array: jax.Array | None, shard: jax.Array, dim: int, device: Index, size: int
) -> jax.Array:
    """The array with the shard of a device written to its position.

    Args:
        array: the array; None for a new array of zeros.
    """
    target: jax.Array = (
        jax.lax.empty(
            (*shard.shape[:dim], size * shard.shape[dim], *shard.shape[dim + 1 :]), shard.dtype
        )
        if array is None
        else array
    )
    return jax.lax.dynamic_update_slice_in_dim(target, shard, device * shard.shape[dim], axis=dim)


def shard_of(array: jax.Array, dim: int, device: Index, ways: int) -> jax.Array:
    """The shard of a device."""
    size = array.shape[dim] // ways
    return jax.lax.dynamic_slice_in_dim(array, device * size, size, axis=dim)


# --------------------------------------------------------------------------------------------------
# The program that replaces matmuls that gather the sequence, or scatter their result along it.
#
# One program per group of matmuls of one activation: instead of an all-gather before them, shards
# are passed around the tensor axis and each is multiplied by all weights while the next is in
# flight; instead of a reduce-scatter after a matmul, sums are passed around while the next terms
# are computed. The backward pass consists of the same loops. Weights that are stored sharded are
# gathered, and their gradients reduced over the batch, as everywhere (`lowering/weights.py`).


def ring_loops(
    candidates: Sequence[WeightMatmul],
    parameters: Callable[[WeightMatmul], ParameterLayout],
    layouts: ValueLayouts,
    regions: Regions,
) -> dict[str, EquationGroup]:
    """Replacements of matmuls, by path of each."""
    size = regions.ways((TENSOR,))
    if size == 1:
        return {}
    matches = [
        match
        for matmul in candidates
        if (match := match_matmul(matmul, parameters(matmul), layouts, size)) is not None
    ]
    ring = AxisRing.of_axis(
        regions.physical_axes((TENSOR,)),
        tuple(regions.mesh.shape[part] for part in regions.physical_axes((TENSOR,))),
        sequential=not regions.torus,
    )
    by_path: dict[str, EquationGroup] = {}
    for members in loop_groups(matches, candidates, layouts):
        paths = tuple(member.matmul.path for member in members)
        loop = MatmulLoop(
            ring=ring,
            regions=regions,
            members=tuple(
                _member(member, parameters(member.matmul), regions) for member in members
            ),
            gathers=members[0].gathers,
            activation_spec=regions.spec(
                dict(enumerate(members[0].activation)), len(members[0].activation)
            ),
        )
        by_path |= dict.fromkeys(paths, EquationGroup(paths=paths, run=loop.run))
    return by_path


@dataclass(frozen=True, kw_only=True)
class LoopMember:
    """A matmul in a loop.

    Attributes:
        product: the computation of one device.
        weight_position: of the weight among the operands.
        gather: the weight in its stored sharding -> in its compute sharding.
        weight_spec: compute sharding of the weight.
        result_spec: sharding of the result.
    """

    product: SequenceMatmul
    weight_position: int
    gather: Callable[[jax.Array], jax.Array]
    weight_spec: jax.sharding.PartitionSpec
    result_spec: jax.sharding.PartitionSpec


@dataclass(frozen=True, kw_only=True)
class MatmulLoop:
    """A loop over the devices of the tensor axis.

    Attributes:
        members: the matmuls; a single one if it scatters.
        gathers: whether it gathers the activation; otherwise it scatters the result.
        activation_spec: sharding of the activation.
    """

    ring: AxisRing
    regions: Regions
    members: tuple[LoopMember, ...]
    gathers: bool
    activation_spec: jax.sharding.PartitionSpec

    def run(self, operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """The results of all matmuls, from the operands of each."""
        activation = operands[0][1 - self.members[0].weight_position]
        results = self._differentiable(
            activation,
            *(
                arrays[member.weight_position]
                for member, arrays in zip(self.members, operands, strict=True)
            ),
        )
        return [checkpoint_name(result, SHARDED_MATMUL) for result in results]

    @property
    def _differentiable(self) -> Callable[..., tuple[Any, ...]]:
        run = jax.custom_vjp(self._forward)
        run.defvjp(lambda *operands: (self._forward(*operands), operands), self._backward)
        return run

    def _gathered(self, weights: Sequence[jax.Array]) -> list[jax.Array]:
        return [member.gather(weight) for member, weight in zip(self.members, weights, strict=True)]

    def _forward(self, activation: Any, *weights: Any) -> tuple[Any, ...]:
        products = [member.product for member in self.members]

        def local(activation: Any, *weights: Any) -> tuple[Any, ...]:
            if self.gathers:
                return gather_forward(products, self.ring, activation, weights)
            return (scatter_forward(products[0], self.ring, activation, weights[0]),)

        specs = (self.activation_spec, *(member.weight_spec for member in self.members))
        results = tuple(member.result_spec for member in self.members)
        return self.regions.manual(local, specs, results)(activation, *self._gathered(weights))

    def _backward(self, saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, *weights = saved
        products, count = [member.product for member in self.members], len(self.members)

        def local(activation: Any, *arrays: Any) -> tuple[Any, ...]:
            weights, cotangents = arrays[:count], arrays[count:]
            if self.gathers:
                activation_gradient, sums = gather_backward(
                    products, self.ring, activation, weights, cotangents
                )
            else:
                activation_gradient, weight_sums = scatter_backward(
                    products[0], self.ring, activation, weights[0], cotangents[0]
                )
                sums = (weight_sums,)
            return activation_gradient, *(
                product.contraction.reduction.apply(partial, self.regions)
                for product, partial in zip(products, sums, strict=True)
            )

        specs = (
            self.activation_spec,
            *(member.weight_spec for member in self.members),
            *(member.result_spec for member in self.members),
        )
        gradient_specs = (
            self.activation_spec,
            *(product.contraction.gradient_spec for product in products),
        )
        return self.regions.manual(local, specs, gradient_specs)(
            activation, *self._gathered(weights), *cotangents
        )


def _member(match: MatchedMatmul, parameter: ParameterLayout, regions: Regions) -> LoopMember:
    use = match.matmul.use
    dim_axes: DimAxes = {
        dim: (TENSOR,)
        for dim, parameter_dim in enumerate(use.view.dims)
        if parameter_dim is not None and parameter.compute[parameter_dim]
    }
    partial = tuple(axis for dim in match.dims.free for axis in match.result[dim] if axis != TENSOR)
    specs = (
        regions.spec(dict(enumerate(match.activation)), len(match.activation)),
        regions.spec(dict(enumerate(match.result)), len(match.result)),
    )
    contraction = ManualContraction(
        use=use,
        reduction=operand_reduction(use, parameter.gradient, partial, regions, dim_axes),
        weight_axes=dim_axes,
        partial_axes=partial,
        operand_specs=specs,
        regions=regions,
    )
    return LoopMember(
        product=SequenceMatmul(
            contraction=contraction,
            activation_dim=match.sequence_dims[0],
            result_dim=match.sequence_dims[1],
        ),
        weight_position=use.position,
        gather=weight_gather(use, parameter, regions),
        weight_spec=regions.spec(dim_axes, len(use.shape)),
        result_spec=specs[1],
    )
