"""An operation on a weight, taken apart: how its operands are sharded where every device makes its
own partial sums of the weight's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from shardlib.jax_types import Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.large_cotangents import outgrows
from shardlib.lowering.weights.reduction import Reduction
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.program import Equation

#: Mesh axes that shard weights in use; the others shard the batch.
WEIGHTS: tuple[str, ...] = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class Apart:
    """An operation on a weight, taken apart.

    Attributes:
        use: the operation.
        plan: the reduction of its gradient.
        held: how the weight is sharded in use.
        partial: mesh axes that hold partial sums.
        arguments: how activation and cotangent are cut where partial sums are made.
        kept: how the gradient is sharded in the end.
        local_shape: shape of the weight in use on one device.
    """

    use: Use
    plan: Reduction
    held: Cuts
    partial: tuple[str, ...]
    arguments: tuple[PartitionSpec, PartitionSpec]
    kept: PartitionSpec
    local_shape: tuple[int, ...]

    def moved(self, cotangent: Value) -> Value:
        """The cotangent of the result as it goes to the devices that make partial sums of it."""
        return cotangent

    def marks(self, machine: Machine) -> tuple[PartitionSpec, ...]:
        """How the marks of partial sums are sharded that are made before the gradient of the
        activation is handed on (`large_cotangents.py`); none where they may wait: compilers for
        TPUs leave none waiting, and where tensor shards the weight, partial sums are made while
        devices exchange the gradient of the activation.
        """
        wait = machine.torus or any(self.held.values()) or not outgrows(self.use)
        return () if wait else (PartitionSpec(machine.parts(self.partial)),)


@dataclass(frozen=True, kw_only=True)
class OperandCuts:
    """How the operands of a weight's gradient are sharded inside the region.

    Attributes:
        activation: cuts of the activation.
        result: cuts of the cotangent of the result.
        partial: mesh axes that shard what is summed over.
    """

    activation: Cuts
    result: Cuts
    partial: tuple[str, ...]


def held_in_use(use: Use, parameter: ParameterLayout) -> Cuts | None:
    """How a weight in use is sharded; None where the batch is sharded along one of its dims, or a
    dim of the parameter is none of the operand's.
    """
    weight_cuts: Cuts = {
        dim: parameter.compute[source]
        for dim, source in enumerate(use.view.dims)
        if source is not None and parameter.compute[source]
    }
    axes = {axis for cut in weight_cuts.values() for axis in cut}
    return weight_cuts if axes == set(parameter.compute.axes) and axes <= set(WEIGHTS) else None


def operand_cuts(use: Use, result: Layout, weight_cuts: Cuts) -> OperandCuts | None:
    """Cuts that agree: dims of the weight as it is in use, dims of the activation alone as the
    result has them; None where the batch is not sharded.
    """
    dims = dims_of(use.equation, use.operand)
    taken = {axis for cut in weight_cuts.values() for axis in cut}
    own_cuts = {dim: tuple(axis for axis in result[dim] if axis not in taken) for dim in dims.own}
    partial = tuple(axis for dim in dims.own for axis in own_cuts[dim])
    if not any(axis not in WEIGHTS for axis in partial) or any(
        axis not in WEIGHTS
        for dim in range(len(result))
        if dim not in dims.own
        for axis in result[dim]
    ):
        return None
    activation = {
        **{dims.own[dim]: cut for dim, cut in own_cuts.items()},
        **{to: weight_cuts[dim] for dim, to in dims.activation.items() if dim in weight_cuts},
    }
    return OperandCuts(
        activation=activation,
        result={
            **own_cuts,
            **{to: weight_cuts[dim] for dim, to in dims.result.items() if dim in weight_cuts},
        },
        partial=partial,
    )


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Which dims of a contraction are one.

    Attributes:
        own: result dim -> activation dim, of those that the weight does not have.
        activation: weight dim -> activation dim.
        result: weight dim -> result dim.
    """

    own: dict[int, int]
    activation: dict[int, int]
    result: dict[int, int]


def dims_of(equation: Equation, weight: int) -> Dims:
    """The dims that a matmul or convolution matches, for the operand that is the weight."""
    numbers = equation.params["dimension_numbers"]
    if equation.name == "conv_general_dilated":
        ungrouped = (
            equation.params["batch_group_count"] == 1
            and equation.params["feature_group_count"] == 1
            and weight == 1
        )
        own_dims = {numbers.out_spec[0]: numbers.lhs_spec[0]} if ungrouped else {}
        return Dims(
            own=own_dims,
            activation={numbers.rhs_spec[1]: numbers.lhs_spec[1]},
            result={numbers.rhs_spec[0]: numbers.out_spec[1]},
        )
    contracted, batch = numbers
    ranks = [variable.aval.ndim for variable in equation.eqn.invars]
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    places = {0: len(batch[0]), 1: len(batch[0]) + len(free[0])}
    activation = 1 - weight
    return Dims(
        own={places[activation] + i: dim for i, dim in enumerate(free[activation])},
        activation={
            **dict(zip(contracted[weight], contracted[activation], strict=True)),
            **dict(zip(batch[weight], batch[activation], strict=True)),
        },
        result={
            **{dim: places[weight] + i for i, dim in enumerate(free[weight])},
            **{dim: i for i, dim in enumerate(batch[weight])},
        },
    )
