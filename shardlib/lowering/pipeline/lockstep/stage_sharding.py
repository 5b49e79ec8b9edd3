"""What goes between stages, and the dim of it that the stages shard outside of the layers."""

from __future__ import annotations

import math

import jax

from shardlib.layout import Layout
from shardlib.lowering.pipeline.shared.partition import Cut
from shardlib.planning.plan import Plan


def stage_activations(loss_cut: Cut, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of all that hops: the carry, what travels with it, and a row of every result
    of the layers for every layer.
    """
    avals = [loss_cut.program.avals[number] for number in loss_cut.entering]
    buffers = [
        jax.ShapeDtypeStruct(
            (layers, *loss_cut.program.avals[number].shape[1:]),
            loss_cut.program.avals[number].dtype,
        )
        for number in loss_cut.stacked
    ]
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in [*avals, *buffers])


def dim_of_stages(layout: Layout | None) -> int | None:
    """The dim that the stages cut; None where they cut none."""
    return (
        next((dim for dim, axes in enumerate(layout) if "stage" in axes), None)
        if layout is not None
        else None
    )


def sharded_dim(
    leaf: jax.ShapeDtypeStruct,
    layout: Layout | None,
    outside: Layout | None,
    stages: int,
    plan: Plan,
) -> int | None:
    """The dim that the stages cut outside of the layers: as the layout there has it, or the largest
    that the plan leaves whole and that divides, the last one (features) apart.
    """
    if (outside_dim := dim_of_stages(outside)) is not None:
        return outside_dim
    parts = [
        math.prod(plan.mesh[axis] for axis in layout[dim]) if layout is not None else 1
        for dim in range(len(leaf.shape))
    ]
    fitting = [
        dim
        for dim in range(len(leaf.shape) - 1)
        if parts[dim] == 1 and leaf.shape[dim] % stages == 0
    ]
    return max(fitting, key=lambda dim: (leaf.shape[dim], dim), default=None)
