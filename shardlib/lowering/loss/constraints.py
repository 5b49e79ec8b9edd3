"""Values of a loss are pinned to layouts, inside and outside of manual regions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.errors import LayoutError
from shardlib.layout import Layout
from shardlib.lowering.mesh.pinning import held, returning
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.planning.plan import Plan


def laid_out(
    value: jax.Array, gathered: bool, use: NamedSharding, back: NamedSharding
) -> jax.Array:
    """A parameter whose gradient comes back laid out for the optimizer; gathered at once where it
    is needed whole.
    """
    same = returning(back)(value)
    return held(same, use) if gathered else same


def constrained(
    value: jax.Array,
    layout: Layout,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    path: str,
    *,
    loose: bool = False,
) -> jax.Array:
    """A value pinned to a layout; loosely, only along the dims that it shards."""
    try:
        layout.local_shape(value.shape, plan.mesh)
    except LayoutError as error:
        raise LayoutError(
            f"the plan places {layout} on the value at equation {path}: {error}"
        ) from error
    sharding = named_sharding(mesh, layout)
    if loose:
        sharding = NamedSharding(
            mesh,
            PartitionSpec(
                *(PartitionSpec.UNCONSTRAINED if dim is None else dim for dim in sharding.spec)
            ),
        )
    return held(value, sharding)


def manual_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The axes that are manual in the region around."""
    return frozenset(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    )


def whole(value: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
    """A value that the automatic axes of a region do not shard."""
    return (
        jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))
        if jnp.ndim(value)
        else value
    )


def within(mesh: Mesh | AbstractMesh, sharding: NamedSharding) -> NamedSharding:
    """A sharding in a region where some axes of the mesh are manual: there, they shard nothing."""
    manual = manual_axes(mesh)
    if not manual:
        return sharding

    def left(dim: Any) -> Any:
        return (
            dim
            if dim is None or dim is PartitionSpec.UNCONSTRAINED
            else tuple(
                axis for axis in ((dim,) if isinstance(dim, str) else dim) if axis not in manual
            )
            or None
        )

    return NamedSharding(mesh, PartitionSpec(*map(left, sharding.spec)))


def one_layer(stacked: NamedSharding) -> NamedSharding:
    """The sharding of one slice along the leading dim."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))
