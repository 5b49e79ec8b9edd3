"""The outer step of islands: exchange of parameters, outer gradients, and the update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree, path_text
from shardlib.islands.exchanges import BLOCK, DiLoCo, Gossip, Meets, blocks, padded, spaces
from shardlib.islands.outer import narrow, outer_update, widen
from shardlib.islands.planning import fragments_of
from shardlib.jax_types import Value
from shardlib.layout import ISLAND
from shardlib.lowering.mesh import constrain as mesh_held
from shardlib.lowering.program import Program, shardings_of
from shardlib.processes.progress import Progress

# --------------------------------------------------------------------------------------------------
# Layers of a fragment: some rows of the first dim of a stack of layers, on each device its own.

#: An array for each parameter.
Arrays = list[jax.Array]
#: Rows of the first dim on a device: (first, step between them); None for all.
Rows = tuple[int, int] | None


def taken(
    mesh: Mesh | AbstractMesh,
    arrays: Sequence[jax.Array],
    shardings: Sequence[NamedSharding],
    rows: Sequence[Rows],
) -> list[jax.Array]:
    """The rows of arrays."""
    return [
        array
        if slice_of_rows is None
        else _per_device(mesh, partial(_rows, slice_of_rows), sharding, array)
        for array, sharding, slice_of_rows in zip(arrays, shardings, rows, strict=True)
    ]


def put(
    mesh: Mesh | AbstractMesh,
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    shardings: Sequence[NamedSharding],
    rows: Sequence[Rows],
) -> list[jax.Array]:
    """Arrays with new rows."""
    return [
        after
        if slice_of_rows is None
        else _per_device(mesh, partial(_with_rows, slice_of_rows), sharding, array, after)
        for array, after, sharding, slice_of_rows in zip(arrays, new, shardings, rows, strict=True)
    ]


def _per_device(
    mesh: Mesh | AbstractMesh,
    function: Callable[..., Value],
    sharding: NamedSharding,
    *arrays: jax.Array,
) -> jax.Array:
    """A function of what each device holds of arrays that are sharded alike."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(sharding.spec,) * len(arrays),
        out_specs=sharding.spec,
        check_vma=False,
    )(*arrays)


def rows_of(rows: Sequence[Rows], arrays: Sequence[Value]) -> list[Value]:
    """On one device: the rows of what it holds."""
    return [_rows(slice_of_rows, array) for slice_of_rows, array in zip(rows, arrays, strict=True)]


def with_rows(rows: Sequence[Rows], arrays: Sequence[Value], new: Sequence[Value]) -> list[Value]:
    """On one device: what it holds, with new rows."""
    return [_with_rows(*arguments) for arguments in zip(rows, arrays, new, strict=True)]


def _rows(rows: Rows, array: Value) -> Value:
    return array if rows is None else array[rows[0] :: rows[1]]


def _with_rows(rows: Rows, array: Value, new: Value) -> Value:
    return new if rows is None else array.at[rows[0] :: rows[1]].set(new)


# --------------------------------------------------------------------------------------------------
# Means over islands, in the dtype that crosses.
#
# A narrower dtype than float32 is summed in float32: each island gets its part of the numbers of
# all (all-to-all), and the means of the parts of all (all-gather). Numbers and their scales cross
# as integers of their bits, which no compiler widens.


def means(arrays: Sequence[Value], wire: str, islands: int) -> list[Value]:
    """The means over islands of what one device of each holds, in a region that is manual over all
    mesh axes.

    In float32 each array is reduced by itself, flat: a TPU pads the last two dims of an array to
    whole tiles, and sends them so.
    """
    if wire == "float32":
        return [
            jax.lax.pmean(array.reshape(-1), ISLAND.name).reshape(array.shape) for array in arrays
        ]
    rows = joined(arrays, wire, islands)
    received = jax.lax.all_to_all(packed(rows, wire), ISLAND.name, 0, 0, tiled=True)
    mean = jnp.mean(unpacked(received, wire), axis=0, keepdims=True)
    gathered = jax.lax.all_gather(packed(mean, wire), ISLAND.name, axis=0, tiled=True)
    return split(unpacked(gathered, wire), arrays, wire)


def joined(arrays: Sequence[Value], wire: str, islands: int, block: int = BLOCK) -> Value:
    """Arrays one after the other, each in whole blocks, as rows for every island."""
    sizes = [math.prod(array.shape) for array in arrays]
    room = spaces(wire, sizes, block)
    padding = padded(wire, sizes, islands, block) - sum(room)
    flat = [
        jnp.pad(array.reshape(-1), (0, space - size))
        for array, size, space in zip(arrays, sizes, room, strict=True)
    ]
    return jnp.concatenate([*flat, jnp.zeros(padding, jnp.float32)]).reshape(islands, -1)


def split(rows: Value, like: Sequence[Value], wire: str, block: int = BLOCK) -> list[Value]:
    """The arrays of what `joined` gave."""
    flat, arrays, start = rows.reshape(-1), list[Value](), 0
    sizes = [math.prod(shape_source.shape) for shape_source in like]
    for shape_source, size, space in zip(like, sizes, spaces(wire, sizes, block), strict=True):
        arrays.append(flat[start : start + size].reshape(shape_source.shape))
        start += space
    return arrays


def packed(rows: Value, wire: str, block: int = BLOCK) -> Value:
    """Rows of numbers as integers that cross: of each row the numbers, then their scales."""
    bits, scales = narrow(rows, wire, block)
    if scales is None:
        return bits
    scale_bits = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(rows.shape[0], -1)
    return jnp.concatenate([bits, scale_bits], axis=1)


def unpacked(rows: Value, wire: str, block: int = BLOCK) -> Value:
    """The float32 numbers of what `packed` gave."""
    if not blocks(wire):
        return widen(rows, None, wire)
    each = block if wire == "int8" else block // 2
    groups = rows.shape[1] // (each + 4)
    bits, scales = rows[:, : groups * each], rows[:, groups * each :]
    scales = jax.lax.bitcast_convert_type(scales.reshape(-1, groups, 4), jnp.float32)
    return widen(bits, scales, wire, block)


# --------------------------------------------------------------------------------------------------
# The outer update on one device, with its shard of each parameter.
#
# Each update takes the device's shards of its island's parameters, float32, and those of what is
# outer, and gives both afterwards.

#: Shards of one device: of parameters, of outer parameters and of their momentum.
Shards = list[Value]
#: (parameters, outer parameters, momentum) -> the same afterwards; where nothing is outer the
#: latter are empty.
Update = Callable[[Shards, Shards, Shards], tuple[Shards, Shards, Shards]]


def update_of(exchange: Meets, meeting: int) -> Update:
    """Returns what a device does at a meeting."""
    if isinstance(exchange, Gossip):
        return partial(_averaged, exchange, meeting)
    return partial(_outer_step, exchange)


def _outer_step(
    exchange: DiLoCo, thetas: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards, Shards]:
    """The outer update (arXiv:2311.08105, algorithm 1): all islands go on from its parameters."""
    differences = [theta - local for theta, local in zip(outer, thetas, strict=True)]
    gradients = means(differences, exchange.wire, exchange.islands)
    outer, momentum = outer_updates(exchange, gradients, outer, momentum)
    return outer, outer, momentum


def outer_updates(
    exchange: DiLoCo, gradients: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards]:
    """Outer parameters and momentum after an update of each parameter."""
    updates = [
        outer_update(exchange, *shards) for shards in zip(gradients, outer, momentum, strict=True)
    ]
    return [theta for theta, _ in updates], [v for _, v in updates]


def _averaged(
    exchange: Gossip, meeting: int, thetas: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards, Shards]:
    """The mean of what an island has and of what it hears."""
    distances = exchange.distances(meeting)
    heard = [
        [_from(theta, distance, exchange.islands) for theta in thetas] for distance in distances
    ]
    return (
        [average([local, *others]) for local, *others in zip(thetas, *heard, strict=True)],
        outer,
        momentum,
    )


def _from(array: Value, distance: int, islands: int) -> Value:
    """The array of the island so far before this one, flat on the way."""
    pairs = [(k, (k + distance) % islands) for k in range(islands)]
    return jax.lax.ppermute(array.reshape(-1), ISLAND.name, pairs).reshape(array.shape)


def average(arrays: Sequence[Value]) -> Value:
    """The mean of arrays, added up in their order."""
    return sum(arrays[1:], arrays[0]) / len(arrays)


# --------------------------------------------------------------------------------------------------
# Arrays of islands as one array over the devices of all, and back; no byte is copied.
#
# Along their first dim the arrays stand one after the other, island by island: a dim of d rows
# becomes one of K d, sharded over the islands outside of what shards it already. A device holds
# the same bytes either way. Arrays without dims are given one first.


def mesh_of_all(meshes: Sequence[Mesh]) -> Mesh:
    """The mesh of all islands: those of the islands, one after the other."""
    devices, first = np.stack([mesh.devices for mesh in meshes]), meshes[0]
    names = (ISLAND.name, *first.axis_names)
    return Mesh(devices, names, axis_types=(AxisType.Auto, *first.axis_types))


def stacked_sharding(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns how the stacked array of all islands is sharded."""
    first, *others = sharding.spec or (None,)
    inner = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return NamedSharding(mesh, PartitionSpec((ISLAND.name, *inner), *others))


def stacked_shape(shape: Sequence[int], islands: int) -> tuple[int, ...]:
    """The shape of the stacked array."""
    first, *others = shape or (1,)
    return islands * first, *others


def stacked(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """The arrays of all islands as one."""
    parts = [array if array.ndim else array.reshape(1) for array in arrays]
    first = parts[0].sharding
    assert isinstance(first, NamedSharding)
    spec = stacked_sharding(first, mesh).spec
    return jax.make_array_from_single_device_arrays(
        stacked_shape(parts[0].shape, len(parts)),
        NamedSharding(mesh, spec, memory_kind=first.memory_kind),
        [shard.data for array in parts for shard in array.addressable_shards],
    )


def alike(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """The arrays of all islands, which are the same, as one."""
    first = arrays[0].sharding
    assert isinstance(first, NamedSharding)
    return jax.make_array_from_single_device_arrays(
        arrays[0].shape,
        NamedSharding(mesh, first.spec, memory_kind=first.memory_kind),
        [shard.data for array in arrays for shard in array.addressable_shards],
    )


def unstacked(array: jax.Array, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The array of each island of a stacked one."""
    return [_of_island(array, leaf) for leaf in like]


def local(
    array: jax.Array, sharding: NamedSharding, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """The array of one island out of one over the devices of all.

    Args:
        shape: on the island; by default that of all, where it is the same on all.
    """
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        array.shape if shape is None else shape,
        sharding,
        [by_device[device] for device in mesh.devices.flat if device in by_device],
    )


def _of_island(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding: Any = like.sharding
    if like.shape:
        return local(array, sharding, like.shape)
    return local(array, NamedSharding(sharding.mesh, PartitionSpec()), (1,)).reshape(())


# --------------------------------------------------------------------------------------------------
# A compiled program that runs between steps.


@dataclass(frozen=True, kw_only=True, eq=False)
class BetweenSteps(ABC):
    """A program between steps: over the devices of all islands, or over those of one.

    Attributes:
        mesh: of its devices, which need not be here.
    """

    #: Which of its arguments are donated.
    donated: ClassVar[tuple[int, ...]] = ()

    mesh: Mesh | AbstractMesh

    @abstractmethod
    def arguments(self) -> tuple[list[Tree], ...]:
        """Abstract arguments, each leaf with its sharding."""

    @abstractmethod
    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results; of those that are donated what takes their place."""

    @abstractmethod
    def function(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """The program, traceable."""

    def lower(self) -> jax.stages.Lowered:
        """The program lowered for its mesh."""
        arguments = self.arguments()
        return jax.jit(
            self.function,
            donate_argnums=self.donated,
            in_shardings=shardings_of(arguments),
            out_shardings=shardings_of(self.results()),
        ).lower(*arguments)

    def __call__(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """Runs it; see `function`."""
        return self._compiled(*arguments)

    def prepare(self) -> None:
        """Compiles it, if that has not been done."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        with Progress("compiling the meeting of islands"):
            return self.lower().compile()


# --------------------------------------------------------------------------------------------------
# The meeting of islands as a compiled program over the devices of all.
#
#     in use           parameters as they are stored, those of all islands stacked
#     rows of a stack  the layers of the fragment, each device its own
#     sharded          as optimizer state is: an island's devices exchange a shard each
#     update           what crosses, and what is made of it (the outer update)
#     back             gathered where stored parameters are less sharded; the layers put into their
#                      stack


@dataclass(frozen=True, kw_only=True)
class SharedParameter:
    """A parameter that islands meet about.

    Attributes:
        place: among the trained parameters.
        leaf: of one island, abstract, with the sharding that it rests in.
        state: sharding of its optimizer state on one island.
        rows: of it, on each device.
    """

    place: int
    leaf: jax.ShapeDtypeStruct
    state: NamedSharding
    rows: Rows = None

    def of(self, rows: Rows) -> SharedParameter:
        """The same about some rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class FragmentCall(BetweenSteps):
    """A program between steps about the parameters of a fragment.

    Attributes:
        exchange: how islands meet.
        about: the parameters.
    """

    exchange: Meets
    about: Sequence[SharedParameter]

    @property
    def rows(self) -> list[Rows]:
        """Of each parameter, on every device."""
        return [parameter.rows for parameter in self.about]

    @cached_property
    def stored(self) -> list[NamedSharding]:
        """Shardings of the parameters as they are stored."""
        return [self.over(parameter.leaf.sharding) for parameter in self.about]

    @cached_property
    def states(self) -> list[NamedSharding]:
        """Shardings of the parameters, as optimizer state is."""
        return [self.over(parameter.state) for parameter in self.about]

    @cached_property
    def outer(self) -> list[NamedSharding]:
        """Shardings of what is outer, alike on all islands; empty where nothing is."""
        return [
            NamedSharding(self.mesh, parameter.state.spec)
            for parameter in self.about
            if self.exchange.keeps
        ]

    def over(self, sharding: Any) -> NamedSharding:
        """Returns how an array of one island is sharded over the devices of this program."""
        return NamedSharding(self.mesh, sharding.spec)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array of one island over the devices of this program."""
        return shape

    def thetas(self) -> list[Tree]:
        """Abstract parameters."""
        return [
            jax.ShapeDtypeStruct(
                self.shape(parameter.leaf.shape), parameter.leaf.dtype, sharding=sharding
            )
            for parameter, sharding in zip(self.about, self.stored, strict=True)
        ]

    def wide(self) -> list[Tree]:
        """Abstract float32 arrays of what is outer."""
        return [
            jax.ShapeDtypeStruct(parameter.leaf.shape, jnp.float32, sharding=sharding)
            for parameter, sharding in zip(self.about, self.outer, strict=False)
        ]

    def sharded(self, thetas: Arrays) -> Arrays:
        """The rows of parameters, sharded as optimizer state is."""
        rows = taken(self.mesh, thetas, self.stored, self.rows)
        return [mesh_held(theta, state) for theta, state in zip(rows, self.states, strict=True)]


class OuterUpdate(FragmentCall):
    """The outer update: (parameters, outer parameters, momentum, *what was sent) -> the first three
    afterwards.
    """

    donated = (0, 1, 2)

    def arguments(self) -> tuple[list[Tree], ...]:
        """Abstract arguments; nothing is outer where the exchange keeps nothing."""
        return self.thetas(), self.wide(), self.wide()

    def results(self) -> tuple[list[Tree], ...]:
        """Abstract results: what takes the place of the first three."""
        return self.arguments()[:3]

    def function(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """The program, traceable."""
        thetas, outer, momentum, *sent = arguments
        alike = [sharding.spec for sharding in self.outer]
        specs = ([sharding.spec for sharding in self.states], alike, alike)
        rows = PartitionSpec(tuple(self.mesh.axis_names))
        after, outer, momentum = jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=(*specs, *([rows] * len(arrays) for arrays in sent)),
            out_specs=specs,
            check_vma=False,
        )(self.sharded(thetas), outer, momentum, *sent)
        back = [mesh_held(theta, to) for theta, to in zip(after, self.stored, strict=True)]
        return put(self.mesh, thetas, back, self.stored, self.rows), outer, momentum

    def _on_device(
        self, thetas: Shards, outer: Shards, momentum: Shards, *sent: Shards
    ) -> tuple[Shards, Shards, Shards]:
        rows = self.rows if self.exchange.keeps else []
        after, theta, v = self.updated(thetas, rows_of(rows, outer), rows_of(rows, momentum), *sent)
        return after, with_rows(rows, outer, theta), with_rows(rows, momentum, v)

    @abstractmethod
    def updated(
        self, thetas: Shards, outer: Shards, momentum: Shards, *sent: Shards
    ) -> tuple[Shards, Shards, Shards]:
        """The update on one device, of the rows of the fragment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting(OuterUpdate):
    """The outer step of islands as one program over the devices of all; parameters of all islands
    are stacked.

    Attributes:
        number: which of the meetings of the exchange.
    """

    number: int

    def over(self, sharding: Any) -> NamedSharding:
        """Stacked over the islands."""
        return stacked_sharding(sharding, self.mesh)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Stacked over the islands."""
        return stacked_shape(shape, self.exchange.islands)

    def updated(
        self, thetas: Shards, outer: Shards, momentum: Shards, *sent: Shards
    ) -> tuple[Shards, Shards, Shards]:
        """The meeting on one device."""
        local = [
            theta.astype(jnp.float32).reshape(theta.shape if parameter.leaf.ndim else ())
            for parameter, theta in zip(self.about, thetas, strict=True)
        ]
        after, outer, momentum = update_of(self.exchange, self.number)(local, outer, momentum)
        back = [
            new.astype(theta.dtype).reshape(theta.shape)
            for new, theta in zip(after, thetas, strict=True)
        ]
        return back, outer, momentum


# --------------------------------------------------------------------------------------------------
# The meetings of islands, as their plan has them.


def meetings_of(
    exchange: Meets, program: Program, mesh: Mesh | AbstractMesh
) -> tuple[Meeting, ...]:
    """All meetings that differ."""
    return tuple(
        Meeting(exchange=exchange, number=number, mesh=mesh, about=parameters)
        for number, parameters in enumerate(shared_of(exchange, program))
    )


def shared_of(exchange: Meets, program: Program) -> list[list[SharedParameter]]:
    """The parameters of each meeting."""
    trained = program.model.partition.trained(program.state.params)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    states = jax.tree.leaves(program.parts.param_shardings.state)
    shared = {
        path_text(path): SharedParameter(place=place, leaf=leaf, state=state)
        for place, ((path, leaf), state) in enumerate(zip(leaves, states, strict=True))
    }
    plan = program.plan
    return [
        [shared[part.parameter.path].of(part.rows) for part in fragment]
        for fragment in fragments_of(plan.parameters, plan.mesh, exchange)
    ]


def replaced(arrays: list[jax.Array], places: list[int], new: list[jax.Array]) -> list[jax.Array]:
    """Arrays with others in some places."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(place, array) for place, array in enumerate(arrays)]
