"""Convolutions in groups, of which sums over rows are taken one device at a time.

Left to automatic partitioning, the gradient of such a kernel is wrong: XLA adds the partial sums of
all devices up, those of devices that have the same rows, too. With rows sharded over data in a mesh
of data=4 x tensor=2, the gradient of a depthwise kernel that tensor does not shard is doubled
(jaxlib 0.10.2 and 0.12.0.1, in plain JAX). So these sums stand in a manual region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.jax_types import EqnParam
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.contractions import Contraction, Operands, Pins
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind


@dataclass(frozen=True, kw_only=True)
class InGroups:
    """A contraction that is a convolution in groups.

    Attributes:
        contraction: it, as it is partitioned automatically.
        equation: it, as the model has it.
        pins: its layouts.
        changed: parameters of the primitive that are others than in the model.
    """

    contraction: Contraction
    equation: Equation
    pins: Pins
    changed: dict[str, EqnParam]

    def run(self, operands: Sequence[jax.Array], /) -> jax.Array:
        """The operation. In groups of the batch it is a gradient that the user's step has inside:
        the features that it sums over are rows.
        """
        numbers, groups = self._numbers, self.equation.params["batch_group_count"]
        rows = _axes(self.pins.operands[0], numbers.lhs_spec[1])
        if groups == 1 or not rows:
            return self.contraction.run(operands)
        channels = self._channels(groups)

        def local(left: jax.Array, right: jax.Array) -> jax.Array:
            count = groups // self._ways(channels)
            results = bind(self.equation, (left, right), batch_group_count=count, **self.changed)
            return jax.lax.psum(results[0], rows)

        left, right = operands
        sharded = (
            _spec(left.ndim, {numbers.lhs_spec[0]: channels, numbers.lhs_spec[1]: rows}),
            _spec(right.ndim, {numbers.rhs_spec[0]: channels, numbers.rhs_spec[1]: rows}),
        )
        result_spec = _spec(left.ndim, {numbers.out_spec[1]: channels})
        return self._machine.manual(local, sharded, result_spec)(left, right)

    def slope(
        self,
        position: int,
        operands: Operands,
        cotangent: jax.Array,
        like: jax.ShapeDtypeStruct,
        /,
    ) -> jax.Array:
        """See `Contraction`."""
        numbers, groups = self._numbers, self.equation.params["feature_group_count"]
        rows, left = _axes(self.pins.operands[0], numbers.lhs_spec[0]), operands[0]
        if position == 0 or left is None or groups == 1 or not rows:
            return self.contraction.slope(position, operands, cotangent, like)
        channels = self._channels(groups)
        shards, out = self._ways(channels), numbers.rhs_spec[0]
        shape = tuple(size // shards if dim == out else size for dim, size in enumerate(like.shape))

        def local(left: jax.Array, cotangent: jax.Array) -> jax.Array:
            def linear(kernel: jax.Array) -> jax.Array:
                count = groups // shards
                return bind(
                    self.equation, (left, kernel), feature_group_count=count, **self.changed
                )[0]

            aval = jax.ShapeDtypeStruct(shape, like.dtype)
            return jax.lax.psum(jax.linear_transpose(linear, aval)(cotangent)[0], rows)

        sharded = (
            _spec(left.ndim, {numbers.lhs_spec[0]: rows, numbers.lhs_spec[1]: channels}),
            _spec(left.ndim, {numbers.out_spec[0]: rows, numbers.out_spec[1]: channels}),
        )
        result_spec = _spec(left.ndim, {out: channels})
        return self._machine.manual(local, sharded, result_spec)(left, cotangent)

    def sums_in(self, wide: object, read: object, /) -> bool:
        """See `Contraction`: gradients of convolutions are summed in their own dtype."""
        return False

    def summed(
        self, position: int, operands: Operands, cotangent: jax.Array, shape: tuple[int, ...], /
    ) -> jax.Array:
        """See `Contraction`."""
        return self.slope(
            position, operands, cotangent, jax.ShapeDtypeStruct(shape, cotangent.dtype)
        )

    @property
    def _numbers(self) -> jax.lax.ConvDimensionNumbers:
        return self.equation.params["dimension_numbers"]

    @property
    def _machine(self) -> Machine:
        return Machine(mesh=self.pins.result.mesh, torus=False)

    def _channels(self, groups: int) -> tuple[str, ...]:
        """Mesh axes over which devices have whole groups of their own."""
        axes = _axes(self.pins.result, self._numbers.out_spec[1])
        return axes if groups % self._ways(axes) == 0 else ()

    def _ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.pins.result.mesh.shape[axis] for axis in axes)


def by_groups(
    contraction: Contraction, equation: Equation, pins: Pins, **changed: EqnParam
) -> Contraction:
    """A contraction with its sums over rows apart, where it is a convolution in groups; others as
    they are.
    """
    if equation.name != "conv_general_dilated" or pins.result.mesh.size == 1:
        return contraction
    counts = equation.params["feature_group_count"], equation.params["batch_group_count"]
    if max(counts) == 1:
        return contraction
    return InGroups(contraction=contraction, equation=equation, pins=pins, changed=changed)


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Mesh axes that shard a dim."""
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(rank: int, axes: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) or None for dim in range(rank)))
