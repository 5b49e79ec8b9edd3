"""Layouts of an optimizer's matrix updates, for the price, the plan's collectives and the lowering.

Matrices with the same update and the same sharding are one group. With `owned`, every matrix has
one device that updates it: shards of all groups go to their owners in one all-to-all, and come back
in another. Each owner has the same number of a group's matrices, and the remaining ones go to those
that have the fewest FLOPs, the largest matrices first. With `gathered`, each device has all
matrices; with `sharded` the partitioner shards the products.

>>> from shardlib.graph import Contraction, UpdateArray
>>> array = UpdateArray(dtype="float32", shape=(8, 4), replicated=False)
>>> update = MatrixUpdate(
...     path="w", shape=(12, 8, 4), stack=(0,), reads=(array,), writes=(array,),
...     contractions=(Contraction(flops=6e3, dtype="float32"),),
... )
>>> groups = update_groups([update], {"w": [(), ("fsdp",)]}, {"fsdp": 4, "data": 2}, "owned")
>>> groups[0].rounds, groups[0].extra.tolist()
(1, [[True, True, True, True], [False, False, False, False]])
>>> for exchange in exchanges(groups):
...     print(*exchange)
all-to-all ('fsdp',) 256
all-to-all ('fsdp',) 256
all-gather ('data',) 512
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlib.graph import MatrixUpdate, UpdateArray

#: Cause of the collectives of matrix updates, in plans.
CAUSE = "matrices of the optimizer"
#: Mesh axes.
Axes = tuple[str, ...]
#: FLOPs of a matrix beyond an even share of all, about 10 ms. Beyond that the partitioner shards
#: its products.
MAX_IDLE_FLOPS = 1e12


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateGroup:
    """Parameters whose matrices have the same update and the same sharding.

    Attributes:
        updates: of each parameter.
        spec: mesh axes of more than one device that shard each dim.
        sizes: devices along every mesh axis of more than one.
        layout: "owned", "gathered" or "sharded".
        extra: whether a device updates one matrix more than `rounds`, array [`replicated`,
            `exchanged`]; [1, 1] where all devices update all matrices.
    """

    updates: tuple[MatrixUpdate, ...]
    spec: tuple[Axes, ...]
    sizes: Mapping[str, int]
    layout: str
    extra: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 1), bool))

    @property
    def stack(self) -> tuple[int, ...]:
        """Dims of the parameters along which matrices are stacked."""
        return self.updates[0].stack

    @cached_property
    def stack_axes(self) -> Axes:
        """The mesh axes that shard the stacks as stored."""
        return tuple(axis for dim in self.stack for axis in self.spec[dim])

    @cached_property
    def exchanged(self) -> Axes:
        """The mesh axes that shard the matrices."""
        used = {axis for axes in self.matrix_spec for axis in axes}
        return tuple(axis for axis in self.sizes if axis in used)

    @cached_property
    def replicated(self) -> Axes:
        """The mesh axes over which the matrices are replicated."""
        used = {*self.exchanged, *self.stack_axes}
        return tuple(axis for axis in self.sizes if axis not in used)

    @property
    def matrix_spec(self) -> tuple[Axes, ...]:
        """The mesh axes of every dim of a matrix."""
        return tuple(axes for dim, axes in enumerate(self.spec) if dim not in self.stack)

    def ways(self, *axes: Axes) -> int:
        """Number of devices along some mesh axes."""
        return math.prod(self.sizes[axis] for group in axes for axis in group)

    def counts(self) -> list[int]:
        """Matrices of each parameter that devices with the same part of the stacks have."""
        return [update.matrices // self.ways(self.stack_axes) for update in self.updates]

    @property
    def divided(self) -> tuple[Axes, Axes]:
        """The mesh axes that divide the matrices among their owners, those of `extra`."""
        return (self.replicated, self.exchanged) if self.layout == "owned" else ((), ())

    @property
    def rounds(self) -> int:
        """Matrices that every device updates."""
        return sum(self.counts()) // self.extra.size

    @cached_property
    def owned(self) -> NDArray[np.int64]:
        """The matrices of every device, array [`replicated`, `exchanged`, matrices]; -1 for
        none.
        """
        even = self.rounds * self.extra.size
        numbers = np.arange(even).reshape(*self.extra.shape, self.rounds)
        if not self.extra.any():
            return numbers
        last = np.where(self.extra, even - 1 + self.extra.cumsum().reshape(self.extra.shape), -1)
        return np.concatenate([numbers, last[..., None]], axis=2)

    @property
    def flops(self) -> float:
        """Floating-point operations of an update of one matrix."""
        return self.updates[0].flops / self.updates[0].matrices

    @property
    def share(self) -> float:
        """Floating-point operations of a device, if all had as many."""
        return self.flops * sum(self.counts()) / self.ways(self.replicated, self.exchanged)

    @property
    def shards_read(self) -> dict[int, UpdateArray]:
        """The sharded arrays that an update reads, by number."""
        reads = self.updates[0].reads
        return {number: array for number, array in enumerate(reads) if not array.replicated}

    @property
    def written(self) -> dict[int, UpdateArray]:
        """The arrays that an update leaves, by number."""
        return dict(enumerate(self.updates[0].writes))

    def on_mesh(self, values: NDArray[Any]) -> NDArray[Any]:
        """An array like `extra` with one dim per mesh axis, of 1 for those of the stacks."""
        axes = (*self.replicated, *self.exchanged, *self.stack_axes)
        sizes = [1 if axis in self.stack_axes else self.sizes[axis] for axis in axes]
        return values.reshape(sizes).transpose([axes.index(axis) for axis in self.sizes])

    def with_extra(self, loads: NDArray[np.float64]) -> UpdateGroup:
        """The group with its remaining matrices on the devices with the least of `loads`."""
        axes = (*self.replicated, *self.exchanged)
        stacks = tuple(list(self.sizes).index(axis) for axis in self.stack_axes)
        in_order = sorted(axes, key=list(self.sizes).index)
        by_owner = loads.max(axis=stacks).transpose([in_order.index(axis) for axis in axes])
        extra = np.zeros((self.ways(self.replicated), self.ways(self.exchanged)), bool)
        order = np.argsort(by_owner, axis=None, kind="stable")
        extra.flat[order[: sum(self.counts()) % extra.size]] = True
        return replace(self, extra=extra)


def update_groups(
    updates: Sequence[MatrixUpdate],
    specs: Mapping[str, Sequence[Axes]],
    sizes: Mapping[str, int],
    layout: str,
) -> tuple[UpdateGroup, ...]:
    """The groups of an optimizer's matrix updates; those that the partitioner shards have the
    layout "sharded".

    Args:
        specs: mesh axes of every dim of a parameter's optimizer state; dims at the end may be left
            out.
        sizes: devices along every mesh axis.
        layout: "owned", "gathered" or "sharded".
    """
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    grouped: dict[tuple[str, tuple[int, ...], tuple[Axes, ...]], list[MatrixUpdate]]
    grouped = defaultdict(list)
    for update in updates:
        listed = list(specs[update.path])
        dims = [*listed, *[()] * (len(update.shape) - len(listed))]
        spec = tuple(tuple(axis for axis in axes if axis in sizes) for axes in dims)
        grouped[update.alike, update.stack, spec].append(update)
    groups = [
        UpdateGroup(updates=tuple(group), spec=spec, sizes=sizes, layout=layout)
        for (_, _, spec), group in grouped.items()
    ]
    if layout == "owned":
        share = sum(group.share for group in groups)
        for number, group in sorted(enumerate(groups), key=lambda pair: -pair[1].flops):
            if group.flops - share > MAX_IDLE_FLOPS:
                share -= group.share
                groups[number] = replace(group, layout="sharded")
    return dealt(groups)


def dealt(groups: Sequence[UpdateGroup]) -> tuple[UpdateGroup, ...]:
    """The groups with an owner of every matrix, if they are to be owned."""
    groups = list(groups)
    loads = np.zeros(tuple(groups[0].sizes.values()) if groups else ())
    for number in sorted(range(len(groups)), key=lambda number: -groups[number].flops):
        if groups[number].layout == "owned":
            group = groups[number] = groups[number].with_extra(loads)
            loads = loads + group.on_mesh(group.flops * group.extra)
    return tuple(groups)


def busiest(groups: Sequence[UpdateGroup], costs: Sequence[float]) -> float:
    """Cost of all updates on the device that has the most.

    Args:
        costs: of one matrix of each group.
    """
    return float(
        np.max(
            sum(
                group.on_mesh(cost * (group.rounds + group.extra))
                if group.layout == "owned"
                else np.array(cost * group.rounds)
                for group, cost in zip(groups, costs, strict=True)
                if group.layout != "sharded"
            )
        )
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """Shards of one shape and dtype that move at once: as many for every device of `exchanged`.

    Attributes:
        exchanged: the mesh axes whose devices have the shards; () for whole arrays.
        replicated: the mesh axes that divide the matrices beside them.
        array: one of the arrays.
        members: the group and the number of each.
        owned: of each, array [`replicated`, `exchanged`, matrices] like `UpdateGroup.owned`.
    """

    exchanged: Axes
    replicated: Axes
    array: UpdateArray
    members: tuple[tuple[int, int], ...]
    owned: tuple[NDArray[np.int64], ...]

    @cached_property
    def size(self) -> int:
        """Matrices of a device, as many as the one with the most of them has."""
        return int(np.sum([(owned >= 0).sum(axis=2) for owned in self.owned], axis=0).max())

    @property
    def bytes(self) -> int:
        """Bytes of what a device receives."""
        return self.size * self.array.bytes

    @cached_property
    def slots(self) -> list[NDArray[np.int64]]:
        """Positions of every member's matrices among those of the device; `size` for none."""
        joined = np.concatenate(self.owned, axis=2) >= 0
        positions = np.where(joined, joined.cumsum(axis=2) - 1, self.size)
        return np.split(positions, np.cumsum([owned.shape[2] for owned in self.owned])[:-1], axis=2)


def buffers(
    groups: Sequence[UpdateGroup], arrays: Sequence[Mapping[int, UpdateArray]]
) -> list[Buffer]:
    """The buffers that arrays of every group move in.

    Args:
        arrays: by their numbers in `MatrixUpdate.reads` or `writes`.
    """
    listed: dict[tuple[Axes, Axes, tuple[Axes, ...], UpdateArray], list[tuple[int, int]]]
    listed = defaultdict(list)
    for number, group in enumerate(groups):
        replicas, shards = group.divided
        for i, array in arrays[number].items():
            if array.replicated:
                listed[(), (*replicas, *shards), (), array].append((number, i))
            else:
                listed[group.exchanged, replicas, group.matrix_spec, array].append((number, i))
    return [
        Buffer(
            exchanged=exchanged,
            replicated=replicated,
            array=array,
            members=tuple(members),
            owned=tuple(
                owned.reshape(-1, 1, owned.shape[2]) if array.replicated else owned
                for owned in (groups[number].owned for number, _ in members)
            ),
        )
        for (exchanged, replicated, _, array), members in listed.items()
    ]


def exchanges(groups: Sequence[UpdateGroup]) -> Iterator[tuple[str, Axes, float]]:
    """(kind, mesh axes, bytes of its result per device) of every collective of the groups."""
    groups = [group for group in groups if group.layout != "sharded"]
    owned = any(group.layout == "owned" for group in groups)
    for buffer in buffers(groups, [group.shards_read for group in groups]):
        if buffer.exchanged and owned:
            yield "all-to-all", buffer.exchanged, buffer.bytes
        elif buffer.exchanged:
            yield "all-gather", buffer.exchanged, buffer.bytes
    for buffer in buffers(groups, [group.written for group in groups]) if owned else ():
        if buffer.exchanged:
            yield "all-to-all", buffer.exchanged, buffer.bytes
        if buffer.replicated:
            yield "all-gather", buffer.replicated, buffer.bytes * groups[0].ways(buffer.replicated)
    for group in groups:
        size = sum(array.bytes for array in group.written.values() if array.replicated)
        if group.stack_axes and size:
            count = sum(group.counts()) * group.ways(group.stack_axes)
            yield "all-gather", group.stack_axes, size * count
