"""The layouts of a plan as JAX's shardings over a mesh of the user's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardlib.errors import ArgumentError, LayoutError, raise_all
from shardlib.layout import Layout
from shardlib.planning.plan import Plan

#: A `jax.sharding.NamedSharding`.
NamedSharding = Any


class AxisSizes(Protocol):
    """What is read of a `jax.sharding.Mesh` or an abstract one."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of every axis by its name."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanShardings:
    """The shardings of a plan, by path.

    Attributes:
        parameters: of every parameter as it is stored.
        compute: of every parameter while it is used.
        gradients: of the gradient of every trained parameter.
        optimizer: of the optimizer state of every trained parameter, of the arrays that have its
            shape; all others are replicated.
        batch: of every array of the batch; "batch" where it is one array, otherwise "batch.x".
    """

    parameters: Mapping[str, NamedSharding]
    compute: Mapping[str, NamedSharding]
    gradients: Mapping[str, NamedSharding]
    optimizer: Mapping[str, NamedSharding]
    batch: Mapping[str, NamedSharding]


def plan_shardings(plan: Plan, mesh: AxisSizes) -> PlanShardings:
    """The shardings of a plan over a mesh that has its axes."""
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise ArgumentError(
            f"mesh is {type(mesh).__name__}; it is a jax.sharding.Mesh\nTry:"
            " plan.shardings(jax.make_mesh((4, 2), ('fsdp', 'tensor')))"
        )
    here = dict(mesh.shape)
    wrong = [
        f"{axis} is {size} in the plan and {here.get(axis, 'missing')} in the mesh"
        for axis, size in plan.mesh.items()
        if size > 1 and here.get(axis) != size
    ]
    if wrong:
        sizes = {axis: size for axis, size in plan.mesh.items() if size > 1}
        raise_all(
            LayoutError,
            f"the mesh {here} is not that of the plan, {plan.mesh}",
            wrong,
            hint=f"jax.make_mesh({tuple(sizes.values())}, {tuple(sizes)})",
        )
    sharding: Any = sys.modules["jax"].sharding  # who has a mesh has loaded JAX; planning has not

    def over(layout: Layout) -> NamedSharding:
        dims = [tuple(axis for axis in dim if plan.mesh[axis] > 1) for dim in layout]
        spec = (None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*spec))

    every = [one for one in plan.parameters if one.role != "updated"]
    trained = [one for one in every if one.trained]
    return PlanShardings(
        parameters={one.path: over(one.rest) for one in every},
        compute={one.path: over(one.compute) for one in every},
        gradients={one.path: over(one.gradient) for one in trained},
        optimizer={one.path: over(one.state) for one in trained},
        batch={path: over(layout) for path, layout in plan.batch_layouts},
    )
