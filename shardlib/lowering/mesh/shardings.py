"""Where does every array of the training state live, in JAX's words?

Every leaf gets an explicit sharding: parameters and their optimizer state from the plan, everything
else whole on every device. Nothing is left to propagation, which under Auto axes would put
`optimizer.init` on one device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.model import Model
from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import MeshShape
from shardlib.errors import BatchError, LayoutError, raise_all
from shardlib.graph.problem import STATE
from shardlib.jax_types import KeyPath
from shardlib.layout import Layout
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.mesh.owners import owned, shapes_of
from shardlib.planning.plan import ParameterLayout, Plan
from shardlib.report import Finding


def named_sharding(mesh: Mesh | AbstractMesh, layout: Layout) -> NamedSharding:
    """The JAX sharding of a layout."""
    cuts = (parts_of(mesh, dim) for dim in layout)
    return NamedSharding(
        mesh,
        PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in cuts)),
    )


@dataclass(frozen=True, kw_only=True)
class ParameterShardings:
    """Four shardings for each parameter, as trees like the params.

    Attributes:
        compute: in use.
        rest: between steps.
        gradient: its gradient, as the optimizer reads it.
        state: its optimizer state, and its update.
    """

    compute: Tree
    rest: Tree
    gradient: Tree
    state: Tree

    def of(self, partition: Partition) -> ParameterShardings:
        """Those of the trained parameters alone."""
        return ParameterShardings(
            **{name: partition.trained(tree) for name, tree in vars(self).items()}
        )


def parameter_shardings(plan: Plan, model: Model, mesh: Mesh | AbstractMesh) -> ParameterShardings:
    """The shardings of a model's parameters under a plan."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model.params)
    planned = {
        parameter.path: parameter for parameter in plan.parameters if parameter.role != "updated"
    }
    shapes = {path_text(path): leaf.shape for path, leaf in leaves}
    trained = dict(zip(shapes, model.partition.flags, strict=True))
    failures = [
        f"{path} is in the plan, not in the model" for path in planned if path not in shapes
    ]
    failures += [
        f"{path} is in the model, not in the plan" for path in shapes if path not in planned
    ]
    failures += [
        f"{path} has shape {shape}, the plan says {planned[path].shape}"
        for path, shape in shapes.items()
        if path in planned and planned[path].shape != tuple(shape)
    ]
    failures += [
        f"{path} is {'trained' if flag else 'frozen'} in the model, not in the plan"
        for path, flag in trained.items()
        if path in planned and planned[path].trained != flag
    ]
    if failures:
        raise_all(
            LayoutError,
            f"the plan is for another model than {model.name!r}",
            failures,
            hint="plan again for this model, and with the same wrt",
        )
    failures = [
        f"{parameter.path}: {problem}"
        for parameter in plan.parameters
        for problem in _misfits(parameter, plan.mesh)
    ]
    if failures:
        raise_all(
            LayoutError,
            f"layouts of the plan do not fit the mesh {plan.mesh}",
            failures,
            hint="choose mesh sizes that divide the dims, or leave the rule for these names out",
        )

    def tree(which: str) -> Tree:
        return structure.unflatten(
            [named_sharding(mesh, getattr(planned[path], which)) for path in shapes]
        )

    return ParameterShardings(
        compute=tree("compute"), rest=tree("rest"), gradient=tree("gradient"), state=tree("state")
    )


def state_shardings(plan: Plan, state: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """The sharding of every array of model state: what the loss updates as the plan says,
    everything else replicated. Stages replicate all of it.
    """
    planned = (
        {parameter.path: parameter for parameter in plan.parameters if parameter.role == "updated"}
        if plan.mesh["stage"] == 1
        else {}
    )

    def cut(path: KeyPath, leaf: Tree) -> NamedSharding:
        parameter = planned.get(f"{STATE}.{path_text(path)}")
        return named_sharding(
            mesh,
            Layout()
            if parameter is None or parameter.shape != tuple(leaf.shape)
            else parameter.rest,
        )

    return jax.tree_util.tree_map_with_path(cut, state)


def _misfits(parameter: ParameterLayout, mesh: MeshShape) -> list[str]:
    problems: dict[str, None] = {}
    for layout in (parameter.compute, parameter.rest, parameter.gradient, parameter.state):
        try:
            layout.local_shape(parameter.shape, mesh)
        except LayoutError as error:
            problems[str(error)] = None
    return list(problems)


def optimizer_shardings(
    opt_state: Tree, params: Tree, shardings: Tree, mesh: Mesh | AbstractMesh
) -> tuple[Tree, tuple[Finding, ...]]:
    """The sharding of every leaf of an optimizer's state.

    A leaf belongs to the parameter whose path ends its own path and whose shape it has; it is
    sharded like that parameter's state. Every other leaf (counts, factored moments) is whole on
    every device.
    """
    shapes = shapes_of(params)
    cuts = dict(zip(shapes, jax.tree.leaves(shardings), strict=True))
    replicated = named_sharding(mesh, Layout())
    unowned: list[str] = []

    def cut(path: KeyPath, leaf: Tree) -> NamedSharding:
        owner = owned(path, leaf, shapes)
        if owner is None and leaf.size > 1:
            unowned.append(f"{path_text(path)} {leaf.shape}")
        return replicated if owner is None else cuts[owner]

    tree = jax.tree_util.tree_map_with_path(cut, opt_state)
    finding = Finding(
        code="optimizer-state-whole",
        severity="info",
        where=", ".join(unowned[:8]),
        message=(
            f"{len(unowned)} arrays of the optimizer state have no parameter's shape and are whole"
            " on every device."
        ),
    )
    return tree, (finding,) if unowned else ()


def batch_path(path: KeyPath) -> str:
    """How plans and errors call an array of the batch: "batch.tokens", or "batch" where it is one
    array.
    """
    return ".".join(filter(None, ("batch", path_text(path))))


def batch_shardings(plan: Plan, batch: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """The sharding of every array of the batch, as a tree like it."""
    layouts = dict(plan.batch_layouts)
    failures: list[str] = []

    def cut(path: KeyPath, leaf: Tree) -> NamedSharding:
        text = batch_path(path)
        layout = layouts.get(text)
        if layout is None:
            failures.append(
                f"{text} is not in the plan; it has {', '.join(layouts) or 'no batch arrays'}"
            )
            return named_sharding(mesh, Layout())
        try:
            layout.local_shape(leaf.shape, plan.mesh)
        except LayoutError as error:
            failures.append(f"{text}: {error}")
        return named_sharding(mesh, layout)

    tree = jax.tree_util.tree_map_with_path(cut, batch)
    if failures:
        raise_all(BatchError, f"the batch does not fit the plan on the mesh {plan.mesh}", failures)
    return tree


def without_axes(parameter: ParameterLayout, axes: Collection[str]) -> ParameterLayout:
    """The layouts of a parameter where some mesh axes shard nothing: in a region that is manual
    over them, or on the devices of one stage.
    """

    def left(layout: Layout) -> Layout:
        return Layout(*(tuple(axis for axis in dim if axis not in axes) for dim in layout))

    return replace(
        parameter,
        compute=left(parameter.compute),
        rest=left(parameter.rest),
        gradient=left(parameter.gradient),
        state=left(parameter.state),
    )


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
    """Abstract arrays that carry their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def batch_dims(axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, int | None]:
    """For each array of the batch, the dim called "batch"; None where it has none."""
    return {
        path: names.index("batch") if "batch" in names else None for path, names in axes.items()
    }


def parameter_order(plan: Plan, params: Tree) -> list[int]:
    """For every leaf of the params the position of its layout in the plan."""
    position = {parameter.path: i for i, parameter in enumerate(plan.parameters)}
    return [position[path_text(path)] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
