"""Mesh axes, meshes and layouts: how a value is sharded over the mesh.

A layout has, per dim of an array, the mesh axes that shard it, the major one first. In the scaling
book's notation (jax-ml/scaling-book, `sharding.md`), A[I_X, J] is sharded over X along I and
unsharded along J.

>>> layout = Layout(("data", "fsdp"), (), "tensor")
>>> layout.local_shape((16, 5, 8), MeshShape(data=2, fsdp=2, tensor=4))
(4, 5, 2)
>>> str(layout)
'[data·fsdp, -, tensor]'

A *logical axis* is a model's name for a dimension ("embed"); a *mesh axis* is a direction of the
device grid ("tensor"). `AXES` lists the mesh axes, from the one that tolerates the slowest links to
the one that needs the fastest, with what each shards, its collectives and its links. Lists such as
the axes that split the batch are derived from it:

>>> BATCH_AXES, STORED_AXES
(('data', 'fsdp', 'expert'), ('fsdp', 'expert', 'context'))
>>> mesh = MeshShape(data=2, tensor=4)
>>> mesh.devices, mesh["tensor"], mesh["stage"]
(8, 4, 1)
>>> str(mesh)
'data=2 x tensor=4'

One communication step between devices, predicted or found in compiled code: the same type.

>>> step = Collective(kind="all-gather", axes=("fsdp",), bytes=1 << 20, count=32, cause="mlp")
>>> step.total_bytes
33554432
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from shardlib.errors import LayoutError, PinError, raise_all


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis.

    Attributes:
        name: its name in meshes, pins and layouts.
        aliases: its names in other systems.
        shards: what is sharded over it, as text.
        splits: the part of the input that is split over it: the "batch", the "sequence", or
            "nothing". Gradients are partial sums over the axes that split something.
        stores: True if parameters, gradients and optimizer state are stored sharded over it (ZeRO 1
            to 3).
        computes: True if arrays other than the batch are sharded over it in compute.
        collectives: kinds of collectives (`KINDS`) that run along it alone, by
            role in a step: "block" (compute waits for it), "context" (along the sequence), "keys",
            "ring" or "exchange" (of an attention kernel: keys and values are all-gathered, or
            travel around a ring, in one collective each; or heads are exchanged), "stage" (between
            stages) and "ends" (if all stages compute embedding and head: to the first stage and
            from the last) and "deal" (layers, which are stored in order, to stages of several
            chunks). Those of gradients and of stored parameters run over several axes, and follow
            from `splits` and `stores`.
        waits: True if compute waits for most of them; otherwise they move parameters and gradients,
            and hide behind the compute of other layers.
        links: its default position on the links: 0 for the slowest, those between slices or hosts,
            and more for faster ones.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shards: str
    splits: Literal["batch", "sequence", "nothing"]
    stores: bool
    computes: bool
    collectives: Mapping[str, tuple[str, ...]]
    waits: bool
    links: int


#: Kinds of collectives that reshard a value along an axis.
_OF_VALUES: tuple[str, ...] = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")

ISLAND = Axis(
    name="island",
    aliases=("diloco",),
    shards="the batch, between meetings",
    splits="nothing",
    stores=False,
    computes=False,
    collectives={},
    waits=False,
    links=-1,
)
STAGE = Axis(
    name="stage",
    aliases=("pp", "pipeline"),
    shards="layers",
    splits="nothing",
    stores=False,
    computes=False,
    collectives={
        "stage": ("collective-permute",),
        "ends": ("all-gather", "reduce-scatter"),
        "deal": ("all-to-all", "all-gather"),
    },
    waits=True,
    links=0,
)
DATA = Axis(
    name="data",
    aliases=("dp", "replica"),
    shards="the batch",
    splits="batch",
    stores=False,
    computes=False,
    collectives={},
    waits=False,
    links=1,
)
FSDP = Axis(
    name="fsdp",
    shards="the batch, and stored parameters",
    splits="batch",
    stores=True,
    computes=False,
    collectives={},
    waits=False,
    links=2,
)
EXPERT = Axis(
    name="expert",
    aliases=("ep",),
    shards="the batch, experts, and other stored parameters",
    splits="batch",
    stores=True,
    computes=True,
    collectives={"block": ("all-to-all",)},
    waits=True,
    links=3,
)
CONTEXT = Axis(
    name="context",
    aliases=("cp", "sp"),
    shards="the sequence, and stored parameters",
    splits="sequence",
    stores=True,
    computes=True,
    collectives={
        "context": _OF_VALUES,
        "keys": _OF_VALUES,
        "ring": ("collective-permute",),
        "exchange": ("all-to-all",),
    },
    waits=True,
    links=4,
)
TENSOR = Axis(
    name="tensor",
    aliases=("tp", "model"),
    shards="contractions: heads, mlp, vocab",
    splits="nothing",
    stores=False,
    computes=True,
    collectives={"block": _OF_VALUES},
    waits=True,
    links=5,
)
_ALL = (ISLAND, STAGE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)
#: Mesh axes by name, from the outermost (slowest links) to the innermost (fastest links) of the
#: device order.
AXES: Mapping[str, Axis] = {axis.name: axis for axis in sorted(_ALL, key=lambda axis: axis.links)}
MESH_AXES: tuple[str, ...] = tuple(AXES)
#: Axes over which a plan divides the devices of an island; the number of islands is pinned,
#: together with an exchange.
INNER_AXES: tuple[str, ...] = tuple(axis for axis in MESH_AXES if axis != ISLAND.name)
#: Axes that split the batch.
BATCH_AXES: tuple[str, ...] = tuple(a.name for a in AXES.values() if a.splits == "batch")
#: Axes whose devices process different tokens, so that gradients are partial sums over them.
TOKEN_AXES: tuple[str, ...] = tuple(a.name for a in AXES.values() if a.splits != "nothing")
#: Axes that parameters, gradients and optimizer state are stored sharded over, the major one first.
#: Without that, parameters would be replicated over the context axis and, unless it shards the
#: experts of a weight, over the expert axis.
STORED_AXES: tuple[str, ...] = tuple(a.name for a in AXES.values() if a.stores)
#: Axes with replicas of the same stored shards, though their devices process different tokens.
REPLICA_AXES: tuple[str, ...] = tuple(axis for axis in TOKEN_AXES if not AXES[axis].stores)
#: Axes that shard something other than the batch in compute.
COMPUTE_AXES: tuple[str, ...] = tuple(a.name for a in AXES.values() if a.computes)
#: Axes whose collectives move parameters and gradients, which nothing in the same layer waits for.
HIDEABLE_AXES: tuple[str, ...] = tuple(a.name for a in AXES.values() if not a.waits)

#: Names of the same axes in other systems.
MESH_AXIS_ALIASES: Mapping[str, str] = {
    alias: axis.name for axis in AXES.values() for alias in axis.aliases
}

#: A logical name per dim of an array; None for unnamed dims.
LogicalAxes = tuple[str | None, ...]


def mesh_axis(name: str) -> str:
    """The canonical mesh axis for a name or alias."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PinError(f"{name!r} is not a mesh axis; mesh axes are {', '.join(INNER_AXES)}")
    canonical = MESH_AXIS_ALIASES.get(name, name)
    if canonical not in MESH_AXES:
        near = difflib.get_close_matches(name, MESH_AXES, n=1)
        raise PinError(
            f"{name!r} is not a mesh axis; {f'did you mean {near[0]!r}? ' if near else ''}mesh axes"
            f" are {', '.join(INNER_AXES)}"
        )
    return canonical


class MeshShape(Mapping[str, int]):
    """Sizes of the mesh axes; the default size is 1. Immutable, hashable, equal by value.

    Iteration covers the axes larger than 1, outermost first; indexing works for all axes.

    Attributes:
        sizes: sizes by name, or (name, size) pairs; names may be aliases ("dp").
        axes: sizes as keywords, in addition.

    Raises:
        PinError: a name is not a mesh axis, or names one twice, or a size is not a positive
            integer; all wrong sizes are listed.
    """

    __slots__ = ("_sizes",)
    _sizes: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | Iterable[tuple[str, int]] = (), /, **axes: int):
        given: dict[str, int] = {}
        failures: list[str] = []
        for name, size in [*dict(sizes).items(), *axes.items()]:
            canonical = mesh_axis(name)
            if canonical in given:
                failures.append(f"{name!r} names the mesh axis {canonical!r} a second time")
            said: object = size
            counts = not isinstance(said, bool) and isinstance(said, Integral)
            given[canonical] = int(size) if counts else 0  # NumPy's are integers, too
            if given[canonical] < 1:
                failures.append(
                    f"mesh axis {name!r} has size {size!r}; sizes are integers of at least 1"
                )
        if failures:
            raise_all(PinError, "the mesh is not usable", failures)
        object.__setattr__(self, "_sizes", tuple(given.get(axis, 1) for axis in MESH_AXES))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("MeshShape is immutable")

    def __getitem__(self, axis: str) -> int:
        return self._sizes[MESH_AXES.index(axis)] if axis in MESH_AXES else self._unknown(axis)

    def _unknown(self, axis: str) -> int:
        raise KeyError(axis)

    def __contains__(self, axis: object) -> bool:
        return axis in MESH_AXES and self[str(axis)] > 1

    def __iter__(self) -> Iterator[str]:
        return (axis for axis, size in zip(MESH_AXES, self._sizes, strict=True) if size > 1)

    def __len__(self) -> int:
        return sum(size > 1 for size in self._sizes)

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self._sizes == other._sizes

    def __reduce__(self) -> tuple[type[MeshShape], tuple[dict[str, int]]]:
        return MeshShape, (dict(self),)

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self._sizes)

    @property
    def of_one_island(self) -> MeshShape:
        """The mesh of one of several islands."""
        return MeshShape({axis: size for axis, size in self.items() if axis != ISLAND.name})

    def ways(self, axes: Iterable[str]) -> int:
        """Number of shards of a dim that is sharded over `axes`.

        Args:
            axes: names of mesh axes.

        Returns:
            The product of their sizes; 1 for none.
        """
        return math.prod(self[axis] for axis in axes)

    def in_order(self, first: Iterable[str]) -> tuple[str, ...]:
        """The axes larger than 1, with some of them before all others.

        >>> MeshShape(stage=2, data=2, tensor=2).in_order(["tensor", "fsdp", "stage"])
        ('tensor', 'stage', 'data')

        Args:
            first: names of mesh axes in their order; those of size 1 are left out.
        """
        return tuple(axis for axis in dict.fromkeys((*first, *MESH_AXES)) if axis in self)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={self[axis]}" for axis in self) or "one device"

    def __repr__(self) -> str:
        return f"MeshShape({', '.join(f'{axis}={self[axis]}' for axis in self)})"


class Layout(tuple[tuple[str, ...], ...]):
    """The mesh axes that shard each dim, major first; a frozen tuple of tuples.

    Attributes:
        dims: per dim of the array, a mesh axis, several of them, or None or () for an unsharded
            dim.

    Raises:
        LayoutError: an axis is unknown or shards two dims.
    """

    __slots__ = ()

    def __new__(cls, *dims: str | Iterable[str] | None) -> Layout:
        cut = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        used = [axis for dim in cut for axis in dim]
        unknown = sorted(set(used) - set(INNER_AXES))
        if unknown:
            raise LayoutError(
                f"layout {cut} names {', '.join(unknown)}; mesh axes are {', '.join(INNER_AXES)}"
            )
        if len(set(used)) < len(used):
            raise LayoutError(
                f"layout {cut} uses a mesh axis twice; each axis shards at most one dim of a value"
            )
        return super().__new__(cls, cut)

    def __getnewargs__(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self)

    @classmethod
    def replicated(cls, rank: int) -> Layout:
        """The layout of a replicated array.

        Args:
            rank: number of dims.

        Returns:
            () for every dim.
        """
        return cls(*((),) * rank)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard some dim."""
        return frozenset(axis for dim in self for axis in dim)

    def parts(self, mesh: MeshShape) -> tuple[int, ...]:
        """Number of shards along each dim.

        Args:
            mesh: sizes of the mesh axes.

        Returns:
            One number per dim; 1 for an unsharded dim.
        """
        return tuple(mesh.ways(dim) for dim in self)

    def ways(self, mesh: MeshShape) -> int:
        """Number of distinct shards of the whole value.

        Args:
            mesh: sizes of the mesh axes.

        Returns:
            The product of `parts`; fewer than the devices if shards are replicated.
        """
        return math.prod(self.parts(mesh))

    def local_shape(self, shape: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """The shape of a shard.

        Args:
            shape: elements per dim of the whole array.
            mesh: sizes of the mesh axes.

        Returns:
            Elements per dim of one device's shard.

        Raises:
            LayoutError: the rank differs or a dim does not divide.
        """
        if len(shape) != len(self):
            raise LayoutError(
                f"layout {self} has {len(self)} dims, the array {tuple(shape)} has {len(shape)}"
            )
        parts = self.parts(mesh)
        bad = [i for i, (size, n) in enumerate(zip(shape, parts, strict=True)) if size % n]
        if bad:
            i = bad[0]
            raise LayoutError(
                f"dim {i} of {tuple(shape)} has size {shape[i]}, which {parts[i]} parts"
                f" ({'·'.join(self[i])}) do not divide"
            )
        return tuple(size // n for size, n in zip(shape, parts, strict=True))

    def local_bytes(self, shape: Sequence[int], itemsize: int, mesh: MeshShape) -> int:
        """The bytes of a shard.

        Args:
            shape: elements per dim of the whole array.
            itemsize: bytes per element.
            mesh: sizes of the mesh axes.

        Returns:
            Bytes of one device's shard.

        Raises:
            LayoutError: as `local_shape`.
        """
        return math.prod(self.local_shape(shape, mesh)) * itemsize

    def __str__(self) -> str:
        return "[" + ", ".join("·".join(dim) or "-" for dim in self) + "]"

    def __repr__(self) -> str:
        return f"Layout{tuple(self)!r}"

    def to_json(self) -> list[list[str]]:
        """The layout as plain lists."""
        return [list(dim) for dim in self]


# --------------------------------------------------------------------------------------------------
# Collectives.

#: What XLA calls the collectives that shardlib plans and reads.
KINDS: tuple[str, ...] = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective over a group of devices.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that the group spans, in the order of `MESH_AXES`.
        bytes: bytes that a device holds of the result: the gathered array, the reduced array, the
            shard, the message.
        count: executions in one training step; of a meeting of islands, in one meeting.
        every: steps from one meeting of islands to the next, for what belongs to meetings; 0 for
            what belongs to every step.
        seconds: predicted time of these executions, whether hidden behind compute or not; 0 when
            not predicted.
        cause: the parameter or operation that needs it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1
    seconds: float = 0.0
    cause: str = ""
    every: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert all(axis in MESH_AXES for axis in self.axes), self.axes
        assert self.bytes >= 0 and self.count >= 0, (self.bytes, self.count)
        assert self.every >= 0, self.every

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions in one step, or in one meeting."""
        return self.bytes * self.count

    def to_json(self) -> dict[str, object]:
        """The collective as plain data."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes": self.bytes,
            "count": self.count,
            "seconds": self.seconds,
            "cause": self.cause,
            **({"every": self.every} if self.every else {}),
        }
