"""The device mesh, shardings of parameters and state on it, and memory kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.names import Model
from shardlib.annotation.trees import Partition, Tree, path_text
from shardlib.errors import BatchError, LayoutError, ShardlibError, TopologyError, raise_all
from shardlib.findings import Finding, diagnostic
from shardlib.graph import STATE
from shardlib.jax_types import KeyPath
from shardlib.layout import INNER_AXES, Layout, MeshShape
from shardlib.machines.topology import device_order
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.processes.machine import let_collectives_wait
from shardlib.processes.values import idle_processes, processes_text

# --------------------------------------------------------------------------------------------------
# Findings about the devices that a program runs on.

#: JAX platform names of the vendors of chips.
PLATFORMS = {"google": ("tpu",), "nvidia": ("gpu", "cuda"), "cpu": ("cpu",)}


@diagnostic
def idle_devices(
    shape: MeshShape, total: int, processes: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """A finding if JAX sees more devices than a mesh uses, or if whole processes own none of
    them.

    Args:
        total: number of devices that JAX sees.
        processes: indices of processes without a device of the mesh.
    """
    idle = total - shape.devices
    if not idle and not processes:
        return ()
    if not idle:
        return (
            Finding(
                code="idle-devices",
                severity="info",
                where=str(shape),
                message=(
                    f"{processes_text(processes)} own{'s' * (len(processes) == 1)} no device of the"
                    " mesh, and wait with the others in every step."
                ),
                hint="plan for a topology of all devices",
            ),
        )
    return (
        Finding(
            code="idle-devices",
            severity="warning",
            where=str(shape),
            message=(
                f"the plan uses {shape.devices} of the {total} devices that JAX sees; {idle}"
                f" stay idle{', all of ' + processes_text(processes) if processes else ''}."
            ),
            hint="plan for a topology of all devices",
        ),
    )


@diagnostic
def other_machine(topology: str | None, platform: str) -> tuple[Finding, ...]:
    """A finding if a program runs on devices of a kind that it was not planned for.

    Args:
        topology: spelling of the plan's topology; None if unknown.
    """
    try:
        chip = None if topology is None else parse_topology(topology).chip
    except ShardlibError:  # a user-defined topology
        return ()
    if chip is None or platform in PLATFORMS[chip.vendor]:
        return ()
    return (
        Finding(
            code="other-machine",
            severity="info",
            where=topology or "",
            message=(
                f"the plan is for {chip.name} and the program runs on {platform} devices: predicted"
                " times and memory are not those of this machine"
            ),
            hint="a topology of the devices that JAX sees, unless this is a rehearsal",
        ),
    )


# --------------------------------------------------------------------------------------------------
# The order of devices in the mesh.
#
# The mesh has all six axes, including those of size 1, all of them Auto: the compiler propagates
# layouts from the constraints of the plan. An axis that spans several dims of a torus is
# represented by its physical parts, "fsdp_0" and "fsdp_1", since a reduce-scatter on a torus is
# along one dim at a time (`lowering/weights.py`); `physical_axes` gives the names.
#
# The device order follows the hardware, by `shardlib.machines.topology.device_order`, in planning,
# verification and here: TPU devices are found by their coordinates, others by their index in JAX's
# order, in which neighbours share the fastest link. A plan may assign its axes to links in another
# order than they have in the mesh (`axis_order`).

T = TypeVar("T")

#: Mesh axis -> sizes of its physical parts, the major one first.
Parts = Mapping[str, tuple[int, ...]]


def physical_parts(plan: Plan) -> Parts:
    """The axes of a plan that span several dims, some of them dims of a torus."""
    return {
        axis: tuple(link.ways for link in links)
        for axis, links in plan.placement
        if len(links) > 1 and any(link.kind == "torus" for link in links)
    }


def axis_names(shape: MeshShape, parts: Parts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the axes of a program's mesh.

    >>> axis_names(MeshShape(fsdp=256), {"fsdp": (16, 16)})
    (('stage', 'data', 'fsdp_0', 'fsdp_1', 'expert', 'context', 'tensor'), (1, 1, 16, 16, 1, 1, 1))

    Args:
        shape: sizes of the mesh axes.
        parts: sizes of the physical parts of an axis, by its name.
    """
    pairs = [
        (f"{axis}_{i}", size) for axis in INNER_AXES for i, size in enumerate(parts.get(axis, ()))
    ]
    undivided = {axis: ((axis, shape[axis]),) for axis in INNER_AXES if axis not in parts}
    ordered = [
        pair
        for axis in INNER_AXES
        for pair in undivided.get(axis, tuple(p for p in pairs if p[0].rpartition("_")[0] == axis))
    ]
    return tuple(name for name, _ in ordered), tuple(size for _, size in ordered)


def physical_axes(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> tuple[str, ...]:
    """The names of mesh axes in a program's mesh: unchanged, or those of their physical parts, the
    major one first.
    """
    return tuple(
        name
        for axis in axes
        for name in mesh.axis_names
        if name == axis or name.rpartition("_")[0] == axis
    )


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The mesh of a plan without devices."""
    names, sizes = axis_names(plan.mesh, physical_parts(plan))
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def device_mesh(
    shape: MeshShape,
    devices: Sequence[jax.Device] | None = None,
    *,
    topology: str | None = None,
    axis_order: tuple[str, ...] = (),
    parts: Parts | None = None,
) -> tuple[Mesh, tuple[Finding, ...]]:
    """Builds the JAX mesh of a plan.

    Args:
        devices: exactly the devices to use; by default the first ones that JAX sees.
        topology, axis_order, parts: of the plan; `parts` are its `physical_parts`.
    """
    let_collectives_wait()
    available = list(jax.devices() if devices is None else devices)
    if devices is not None and len(available) != shape.devices:
        raise TopologyError(
            f"the mesh {shape} has {shape.devices} devices, argument `devices` gives"
            f" {len(available)}\nTry: pass exactly the devices that the mesh uses"
        )
    if len(available) < shape.devices:
        raise TopologyError(
            f"the mesh {shape} needs {shape.devices} devices, JAX sees {len(available)}"
            f" ({available[0].platform})\n"
            f"Try: simulate them on the CPU: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={shape.devices}"
            " in the environment, or "
            f'jax.config.update("jax_num_cpu_devices", {shape.devices}) before JAX is first used'
        )
    names, sizes = axis_names(shape, parts or {})
    in_mesh_order = _devices_in_mesh_order(shape, available, topology, axis_order)
    findings = (
        *idle_devices(shape, len(available), idle_processes(in_mesh_order.flat)),
        *other_machine(topology, available[0].platform),
    )
    return Mesh(
        in_mesh_order.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names)
    ), findings


def _devices_in_mesh_order(
    shape: MeshShape, devices: list[jax.Device], topology: str | None, axis_order: tuple[str, ...]
) -> np.ndarray:
    """The devices in mesh order: TPU devices by their coordinates, others by their index."""
    first = np.array(devices[: shape.devices], dtype=object)
    if len(first) == 1:
        return first
    if getattr(devices[0], "coords", None) is None:
        indices = _device_indices(shape, topology, axis_order)
        if indices is None:
            return first
        all_devices = np.array(devices, dtype=object)
        return (
            all_devices[indices]
            if indices.max() < len(devices)
            else first[np.argsort(np.argsort(indices))]  # the caller has chosen the devices
        )
    by_coordinates = {tpu_coordinates(device): device for device in devices}
    coordinates = [] if topology is None else mesh_coordinates(shape, topology, axis_order)
    if coordinates and all(position in by_coordinates for position in coordinates):
        return np.array([by_coordinates[position] for position in coordinates], dtype=object)
    return _grid(tuple(shape[axis] for axis in INNER_AXES), list(first)).reshape(-1)


def _device_indices(
    shape: MeshShape, topology: str | None, axis_order: tuple[str, ...]
) -> np.ndarray | None:
    """Indices of the devices of a mesh, in mesh order; None if the topology is unknown."""
    try:
        parsed = None if topology is None else parse_topology(topology)
    except ShardlibError:
        return None
    indices = None if parsed is None else device_order(shape, parsed, axis_order)
    return None if indices is None else indices.reshape(-1)


def tpu_coordinates(device: jax.Device) -> tuple[int, ...]:
    """(slice, coordinates, core on chip) of a TPU device."""
    return (getattr(device, "slice_index", 0), *device.coords, device.core_on_chip)


def mesh_coordinates(
    shape: MeshShape, topology: str, axis_order: tuple[str, ...] = ()
) -> list[tuple[int, ...]]:
    """Coordinates of devices in mesh order; empty if the topology is unknown or not a TPU's."""
    try:
        parsed = parse_topology(topology)
    except ShardlibError:
        return []
    indices = device_order(shape, parsed, axis_order)
    torus = [i for i, tier in enumerate(parsed.tiers) if tier.kind == "torus"]
    if indices is None or len(torus) != 1:
        return []
    dims = parsed.tiers[torus[0]].shape
    slices = math.prod(tier.devices for tier in parsed.tiers[: torus[0]])
    cores = math.prod(tier.devices for tier in parsed.tiers[torus[0] + 1 :])
    coordinates = np.unravel_index(
        indices.reshape(-1), (slices, *dims, *(1,) * (3 - len(dims)), cores)
    )
    return [tuple(map(int, device)) for device in zip(*coordinates, strict=True)]


def _grid(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """The order that JAX gives TPU devices of an unknown topology."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    across = _across_slices(sizes, slices)
    within = tuple(size // outer for size, outer in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def _across_slices(sizes: tuple[int, ...], slices: int) -> tuple[int, ...]:
    """Number of slices along each mesh axis: the outermost axes span slices.

    >>> _across_slices((1, 2, 8, 1, 1, 4), 4)
    (1, 2, 2, 1, 1, 1)
    """
    across: list[int] = []
    remaining = slices
    for size in sizes:
        across.append(math.gcd(size, remaining))
        remaining //= across[-1]
    if remaining > 1:
        raise TopologyError(
            f"mesh sizes {dict(zip(INNER_AXES, sizes, strict=True))} do not spread over {slices}"
            " slices\nTry: give the data or stage axis a multiple of the number of slices"
        )
    return tuple(across)


# --------------------------------------------------------------------------------------------------
# Host memory.

#: Memory kind of host memory that devices access directly.
HOST = "pinned_host"


# --------------------------------------------------------------------------------------------------
# The parameter that an array of optimizer state belongs to.


def owner_of(path: KeyPath, leaf: Tree, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter that an array of optimizer state belongs to: its path is a suffix of the
    array's, and it has the array's shape. None if there is none.
    """
    keys = path_text(path).split(".")
    names = (".".join(keys[start:]) for start in range(len(keys)))  # the longest suffix first
    return next((name for name in names if shapes.get(name) == tuple(leaf.shape)), None)


def shapes_of(params: Tree) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, by path."""
    return {
        path_text(path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


# --------------------------------------------------------------------------------------------------
# Sharding constraints on values of a traced function; none on one device.


def constrain(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value constrained to a layout, inside a traced function; unchanged on a single device."""
    if sharding.mesh.size == 1 and sharding.memory_kind != HOST:
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


def constrain_tree(tree: Tree, shardings: Tree) -> Tree:
    """Constrains the layout of every leaf, inside a traced function."""
    return jax.tree.map(constrain, tree, shardings)


def resharded(tree: Tree, before: Tree, after: Tree) -> Tree:
    """Constrains the leaves whose layouts change; the others have their layouts already."""
    return jax.tree.map(
        lambda leaf, old, new: leaf if old == new else constrain(leaf, new), tree, before, after
    )


def with_gradient_sharding(gradient: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The identity, with a layout for its gradient: that of a parameter as the optimizer reads it,
    so that the compiler can reduce-scatter it.
    """
    if gradient.mesh.size == 1:
        return lambda leaf: leaf

    @jax.custom_vjp
    def identity(leaf: jax.Array) -> jax.Array:
        return leaf

    identity.defvjp(
        lambda leaf: (leaf, None),
        lambda _, cotangent: (jax.lax.with_sharding_constraint(cotangent, gradient),),
    )
    return identity


# --------------------------------------------------------------------------------------------------
# Shardings of every array of the training state.
#
# Every leaf gets an explicit sharding: parameters and their optimizer state from the plan,
# everything else replicated. Nothing is left to propagation, which under Auto axes would put the
# results of `optimizer.init` on one device.


def named_sharding(mesh: Mesh | AbstractMesh, layout: Layout) -> NamedSharding:
    """The JAX sharding of a layout."""
    axes = (physical_axes(mesh, dim) for dim in layout)
    return NamedSharding(
        mesh,
        PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes)),
    )


@dataclass(frozen=True, kw_only=True)
class ParameterShardings:
    """Four shardings for each parameter, as trees like the params.

    Attributes:
        compute: of the parameter in use.
        stored: of the stored parameter.
        gradient: of its gradient, as the optimizer reads it.
        state: of its optimizer state, and its update.
    """

    compute: Tree
    stored: Tree
    gradient: Tree
    state: Tree

    def trained_only(self, partition: Partition) -> ParameterShardings:
        """The shardings of the trained parameters alone."""
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
            f"the plan is for a different model from {model.name!r}",
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

    def tree(field: str) -> Tree:
        return structure.unflatten(
            [named_sharding(mesh, getattr(planned[path], field)) for path in shapes]
        )

    return ParameterShardings(
        compute=tree("compute"), stored=tree("rest"), gradient=tree("gradient"), state=tree("state")
    )


def state_shardings(plan: Plan, state: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """The sharding of every array of model state: from the plan if the loss updates it, otherwise
    replicated. Always replicated over stages.
    """
    planned = (
        {parameter.path: parameter for parameter in plan.parameters if parameter.role == "updated"}
        if plan.mesh["stage"] == 1
        else {}
    )

    def sharding_of(path: KeyPath, leaf: Tree) -> NamedSharding:
        parameter = planned.get(f"{STATE}.{path_text(path)}")
        return named_sharding(
            mesh,
            Layout()
            if parameter is None or parameter.shape != tuple(leaf.shape)
            else parameter.rest,
        )

    return jax.tree_util.tree_map_with_path(sharding_of, state)


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

    A leaf belongs to the parameter whose path is a suffix of its own path and whose shape it has;
    it is sharded like that parameter's state. Every other leaf (counts, factored moments) is
    replicated.
    """
    shapes = shapes_of(params)
    by_parameter = dict(zip(shapes, jax.tree.leaves(shardings), strict=True))
    replicated = named_sharding(mesh, Layout())
    unowned: list[str] = []

    def sharding_of(path: KeyPath, leaf: Tree) -> NamedSharding:
        owner = owner_of(path, leaf, shapes)
        if owner is None and leaf.size > 1:
            unowned.append(f"{path_text(path)} {leaf.shape}")
        return replicated if owner is None else by_parameter[owner]

    tree = jax.tree_util.tree_map_with_path(sharding_of, opt_state)
    finding = Finding(
        code="optimizer-state-whole",
        severity="info",
        where=", ".join(unowned[:8]),
        message=(
            f"{len(unowned)} arrays of the optimizer state have no parameter's shape and are"
            " replicated."
        ),
    )
    return tree, (finding,) if unowned else ()


def batch_path(path: KeyPath) -> str:
    """The name of an array of the batch in plans and errors: "batch.tokens", or "batch" if the
    batch is a single array.
    """
    return ".".join(filter(None, ("batch", path_text(path))))


def batch_shardings(plan: Plan, batch: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """The sharding of every array of the batch, as a tree like it."""
    layouts = dict(plan.batch_layouts)
    failures: list[str] = []

    def sharding_of(path: KeyPath, leaf: Tree) -> NamedSharding:
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

    tree = jax.tree_util.tree_map_with_path(sharding_of, batch)
    if failures:
        raise_all(BatchError, f"the batch does not fit the plan on the mesh {plan.mesh}", failures)
    return tree


def without_axes(parameter: ParameterLayout, axes: Collection[str]) -> ParameterLayout:
    """The layouts of a parameter with some mesh axes removed: in a region that is manual over them,
    or on the devices of one stage.
    """

    def without(layout: Layout) -> Layout:
        return Layout(*(tuple(axis for axis in dim if axis not in axes) for dim in layout))

    return replace(
        parameter,
        compute=without(parameter.compute),
        rest=without(parameter.rest),
        gradient=without(parameter.gradient),
        state=without(parameter.state),
    )


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
    """Abstract arrays that carry their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def batch_dims(axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, int | None]:
    """For each array of the batch, its dim named "batch", or None."""
    return {
        path: names.index("batch") if "batch" in names else None for path, names in axes.items()
    }


def plan_indices(plan: Plan, params: Tree) -> list[int]:
    """For every leaf of the params, the index of its layouts in the plan."""
    position = {parameter.path: i for i, parameter in enumerate(plan.parameters)}
    return [position[path_text(path)] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
