"""A manual region that all devices along some axes compute alike, whose gradients need no sum.

JAX takes what such a region reads whole for what every device adds to: the gradient is divided by
the number of devices and all-reduced, though each has all of it. Here each device has its copy as a
row of its own, `[devices, ...]`, inside of the region; the rows are made and taken without a word
to the others, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardlib.jax_types import Function, Value
from shardlib.lowering.mesh.collectives import Machine


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
