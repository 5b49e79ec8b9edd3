"""Mesh axes, meshes, layouts and rules: how a value is sharded over the mesh.

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

A `Collective` is one communication step between devices, predicted or found in compiled code.

>>> step = Collective(kind="all-gather", axes=("fsdp",), bytes=1 << 20, count=32, cause="mlp")
>>> step.total_bytes
33554432

`Rules` map logical axes to mesh axes, by one semantics for every front end. They are a priority
list: they are tried from the first to the last; a rule takes effect on the first dim of that name
which is still undecided, if none of its mesh axes is used in the value yet. A rule to None decides
"not sharded" and closes the name for later rules. This is the semantics of Flax Linen
(`flax.linen.logical_to_mesh_axes`), applied to every model; the spelling of Flax and of MaxText is
accepted.

>>> rules = Rules.parse([("batch", ["data", "fsdp"]), ("mlp", "tensor"), ("seq", "tensor")])
>>> mesh = MeshShape(data=2, fsdp=2, tensor=2)
>>> str(rules.resolve(("batch", "seq", "mlp"), (8, 8, 8), mesh).layout)
'[data·fsdp, -, tensor]'
>>> str(rules.resolve(("batch", "seq", "embed"), (8, 8, 8), mesh).layout)
'[data·fsdp, tensor, -]'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, cast

import numpy as np

from shardlib.compact import plain_fields
from shardlib.errors import LayoutError, PinError, RuleError, raise_all


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
            "ring" or "head_exchange" (of an attention kernel: keys and values are all-gathered, or
            travel around a ring, in one collective each; or heads are exchanged), "stage" (between
            stages) and "ends" (if all stages compute embedding and head: to the first stage and
            from the last) and "regroup" (layers, which are stored in order, to stages of several
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
        "regroup": ("all-to-all", "all-gather"),
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
        "head_exchange": ("all-to-all",),
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
        data = plain_fields(self)
        if not self.every:
            del data["every"]
        return data


# --------------------------------------------------------------------------------------------------
# Rules from logical axes to mesh axes.


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A rule that matched a dim and could not be honoured there.

    Attributes:
        logical: the logical axis.
        axes: the mesh axes that the rule asked for.
        dim: which dim of the value it matched.
        reason: "indivisible" or "in use".
    """

    logical: str
    axes: tuple[str, ...]
    dim: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A layout and the rules that had to be passed over to reach it."""

    layout: Layout
    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class Rules:
    """A priority list of (logical axis, mesh axes); mesh axes () decide "not sharded".

    Attributes:
        entries: (logical axis, mesh axes) pairs, the first to be tried first; `parse` reads other
            spellings and checks them.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, rules: Rules | Mapping[str, object] | Iterable[Sequence[object]]) -> Rules:
        """Reads rules in Flax's spelling (pairs) or MaxText's (pairs with lists, repeated names as
        fallbacks).

        Args:
            rules: pairs (logical axis, mesh axis, several of them, or None), or a mapping of the
                same; aliases of mesh axes are understood. `Rules` are given back as they are.

        Returns:
            The rules, with the canonical names of mesh axes.

        Raises:
            RuleError: an entry is not a pair, or names something that is not a mesh axis; all of
                them are listed.
        """
        if isinstance(rules, Rules):
            return rules
        given: Any = rules
        if isinstance(given, str) or not np.iterable(given):
            raise RuleError(
                f"sharding rules are {rules!r}; they are a list of pairs (logical axis, mesh axes)"
            )
        entries: list[tuple[str, tuple[str, ...]]] = []
        failures: list[str] = []
        given = cast("Iterable[Any]", rules.items() if isinstance(rules, Mapping) else rules)
        for entry in given:
            if not _is_pair(entry):
                failures.append(f"{entry!r} is not a pair (logical axis, mesh axes)")
                continue
            logical, target = entry
            names: Any = () if target is None else (target,) if isinstance(target, str) else target
            if not _is_words(names):
                failures.append(
                    f"{logical!r}: {target!r} is not a mesh axis, list of mesh axes or None"
                )
                continue
            axes = tuple(MESH_AXIS_ALIASES.get(str(name), str(name)) for name in names)
            unknown = [
                str(name) for name, axis in zip(names, axes, strict=True) if axis not in INNER_AXES
            ]
            if unknown:
                failures.append(
                    f"{logical!r} -> {', '.join(map(repr, unknown))} is not a mesh axis"
                )
            elif len(set(axes)) < len(axes):
                failures.append(
                    f"{logical!r} -> {', '.join(map(repr, axes))} uses a mesh axis twice"
                )
            else:
                entries.append((str(logical), axes))
        if failures:
            raise_all(
                RuleError,
                "sharding rules are not usable",
                failures,
                hint=f"mesh axes are {', '.join(INNER_AXES)}",
            )
        return cls(tuple(entries))

    @property
    def names(self) -> frozenset[str]:
        """Every logical axis that some rule mentions."""
        return frozenset(name for name, _ in self.entries)

    def axes_of(self, logical: str) -> tuple[str, ...]:
        """Mesh axes of the first rule for a logical axis; () when there is none.

        Args:
            logical: name of a logical axis.

        Returns:
            Names of mesh axes, the major one first.
        """
        return next((axes for name, axes in self.entries if name == logical), ())

    def __add__(self, other: Rules) -> Rules:
        return Rules(self.entries + other.entries)

    def resolve(self, names: LogicalAxes, shape: Sequence[int], mesh: MeshShape) -> Resolved:
        """Decides the layout of one value.

        Mesh axes of size 1 are left out of the layout. A rule whose mesh axes do not divide the dim
        is passed over and listed in `skips`: the caller makes it an error (a user's pin) or a
        finding (the planner's choice).

        Args:
            names: logical axis per dim; None where the dim has no name.
            shape: size per dim, elements.
            mesh: sizes of the mesh axes.

        Returns:
            The layout, and the rules that were passed over.

        Raises:
            RuleError: `names` and `shape` differ in length.
        """
        if len(names) != len(shape):
            raise RuleError(
                f"{len(names)} logical axes {names} for an array of {len(shape)} dims"
                f" {tuple(shape)}"
            )
        decided: dict[int, tuple[str, ...]] = {}
        used: set[str] = set()
        skips: list[Skip] = []
        for logical, rule_axes in self.entries:
            axes = tuple(axis for axis in rule_axes if axis in mesh)
            for dim, name in enumerate(names):
                if name != logical or dim in decided:
                    continue
                if used & set(axes):
                    skips.append(Skip(logical=logical, axes=axes, dim=dim, reason="in use"))
                elif shape[dim] % mesh.ways(axes):
                    skips.append(Skip(logical=logical, axes=axes, dim=dim, reason="indivisible"))
                elif axes or not rule_axes:
                    decided[dim] = axes
                    used |= set(axes)
                    if axes:
                        break
        return Resolved(
            layout=Layout(*(decided.get(dim, ()) for dim in range(len(shape)))), skips=tuple(skips)
        )

    def to_json(self) -> list[list[object]]:
        """The rules as plain lists, in Flax's spelling."""
        return [[name, list(axes)] for name, axes in self.entries]

    def __str__(self) -> str:
        return ", ".join(f"{name} -> {'·'.join(axes) or '-'}" for name, axes in self.entries)


def _is_words(value: Any) -> bool:
    if not isinstance(value, Sequence):
        return False
    return all(isinstance(word, str) for word in cast("Sequence[object]", value))


def _is_pair(entry: Any) -> bool:
    """Returns whether an entry looks like (logical axis, mesh axes)."""
    return (
        isinstance(entry, Sequence)
        and not isinstance(entry, str)
        and len(entry) == 2  # pyright: ignore[reportUnknownArgumentType]
        and isinstance(entry[0], str)
    )
