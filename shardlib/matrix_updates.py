"""Layouts of an optimizer's matrix updates, for the price, the plan's collectives and the lowering.

Matrices with the same update and the same sharding are one group. With `stacked`, all-to-alls give
each device whole matrices out of the stack; with `gathered`, each device has all of them; with
`sharded` the partitioner shards the products.

>>> from shardlib.graph import Contraction
>>> update = MatrixUpdate(
...     path="w", shape=(6, 8, 4), stack=(0,), read_bytes=768, written_bytes=768, whole_bytes=0,
...     contractions=(Contraction(flops=6e3, dtype="float32"),),
... )
>>> (group,) = update_groups([update], {"w": [(), ("fsdp",)]}, {"fsdp": 4, "data": 2}, "stacked")
>>> group.matrices, group.padded, group.exchanged, group.replicated
(6, 8, ((0, ('fsdp',)),), ('data',))
>>> for exchange in group.exchanges():
...     print(*exchange)
all-to-all ('fsdp',) 256.0
all-gather ('data',) 256.0
all-to-all ('fsdp',) 256.0
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardlib.graph import MatrixUpdate

#: Cause of the collectives of matrix updates, in plans.
CAUSE = "matrices of the optimizer"
#: One number, or those of several candidates.
Number = TypeVar("Number", float, NDArray[np.float64])
#: Mesh axes.
Axes = tuple[str, ...]
#: FLOPs per update that a device may compute beyond its even share, where there are fewer whole
#: matrices than devices: about 10 ms. Beyond that the partitioner shards the products.
MAX_IDLE_FLOPS = 1e12


def idle_flops(matrices: Number, devices: Number, flops: float) -> Number:
    """FLOPs that the busiest device computes beyond an even share.

    Args:
        flops: of one matrix.
    """
    share = matrices / devices
    return flops * (-(-share // 1) - share)


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateGroup:
    """Parameters whose matrices have the same update and the same sharding.

    Attributes:
        updates: of each parameter.
        spec: mesh axes of more than one device that shard each dim.
        sizes: devices along every mesh axis.
    """

    updates: tuple[MatrixUpdate, ...]
    spec: tuple[Axes, ...]
    sizes: Mapping[str, int]
    layout: str

    @property
    def stack(self) -> tuple[int, ...]:
        """Dims of the parameters along which matrices are stacked."""
        return self.updates[0].stack

    @cached_property
    def stack_axes(self) -> Axes:
        """The mesh axes that shard the stacks as stored."""
        return tuple(axis for dim in self.stack for axis in self.spec[dim])

    @cached_property
    def exchanged(self) -> tuple[tuple[int, Axes], ...]:
        """(dim of a matrix, its mesh axes) of every sharded dim."""
        dims = [axes for dim, axes in enumerate(self.spec) if dim not in self.stack]
        return tuple((dim, axes) for dim, axes in enumerate(dims) if axes)

    @cached_property
    def replicated(self) -> Axes:
        """The mesh axes over which the matrices are replicated."""
        used = {axis for axes in self.spec for axis in axes}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in used)

    @cached_property
    def parts(self) -> tuple[Axes, ...]:
        """The mesh axes among which the matrices are divided, in order."""
        if self.layout == "gathered":
            return ()
        return tuple(axes for axes in (*(a for _, a in self.exchanged), self.replicated) if axes)

    def ways(self, *axes: Axes) -> int:
        """Number of devices along some mesh axes."""
        return math.prod(self.sizes[axis] for group in axes for axis in group)

    def counts(self) -> list[int]:
        """Matrices of each parameter that devices with the same part of the stacks have."""
        return [update.matrices // self.ways(self.stack_axes) for update in self.updates]

    @cached_property
    def matrices(self) -> int:
        """Matrices of all parameters that devices with the same part of the stacks have."""
        return sum(self.counts())

    @cached_property
    def padded(self) -> int:
        """The same, padded to a multiple of the devices."""
        ways = self.ways(*self.parts)
        return -(-self.matrices // ways) * ways

    @property
    def is_partitioned(self) -> bool:
        """True if the partitioner shards the products."""
        if self.layout != "stacked":
            return self.layout == "sharded"
        flops = self.updates[0].flops / self.updates[0].matrices
        return bool(idle_flops(self.matrices, self.ways(*self.parts), flops) > MAX_IDLE_FLOPS)

    def exchanges(self) -> Iterator[tuple[str, Axes, float]]:
        """(kind, mesh axes, bytes of its result per device) of every collective."""
        if self.is_partitioned:
            return
        padding = self.padded / self.matrices
        read, written, other = (
            sum(sizes) * padding / self.ways(self.stack_axes)
            for sizes in zip(
                *((u.read_bytes, u.written_bytes, u.whole_bytes) for u in self.updates),
                strict=True,
            )
        )
        sharded = self.ways(*(axes for _, axes in self.exchanged))
        if self.layout == "gathered":
            gathered = read / sharded
            for _, axes in self.exchanged:
                gathered *= self.ways(axes)
                yield "all-gather", axes, gathered
        else:
            for _, axes in self.exchanged:
                yield "all-to-all", axes, read / sharded
            if self.replicated:
                yield "all-gather", self.replicated, written / sharded
            for _, axes in reversed(self.exchanged):
                yield "all-to-all", axes, written / sharded
        part = other / self.ways(*self.parts)
        for axes in (*reversed(self.parts), *((self.stack_axes,) if self.stack_axes else ())):
            part *= self.ways(axes)
            if other:
                yield "all-gather", axes, part


def update_groups(
    updates: Sequence[MatrixUpdate],
    specs: Mapping[str, Sequence[Axes]],
    sizes: Mapping[str, int],
    layout: str,
) -> tuple[UpdateGroup, ...]:
    """The groups of an optimizer's matrix updates.

    Args:
        specs: mesh axes of every dim of a parameter's optimizer state; dims at the end may be left
            out.
        sizes: devices along every mesh axis.
        layout: "sharded", "stacked" or "gathered".
    """
    grouped: dict[tuple[str, tuple[int, ...], tuple[Axes, ...]], list[MatrixUpdate]]
    grouped = defaultdict(list)
    for update in updates:
        listed = list(specs[update.path])
        dims = [*listed, *[()] * (len(update.shape) - len(listed))]
        spec = tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in dims)
        grouped[update.alike, update.stack, spec].append(update)
    return tuple(
        UpdateGroup(updates=tuple(group), spec=spec, sizes=sizes, layout=layout)
        for (_, _, spec), group in grouped.items()
    )
