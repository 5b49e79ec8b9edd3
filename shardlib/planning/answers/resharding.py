"""Who holds which part of an array, and what must be sent when the layout changes?

A layout cuts every dim of an array into equal parts; the place of a device on the mesh says which
part of each dim it holds. Two layouts on two sets of devices are compared device by device: what a
device needs and does not hold, it must receive. A part that no device holds any more is lost, and
must come from a checkpoint.

>>> old = Shards((8,), Layout("data"), MeshShape(data=4), np.arange(4))
>>> new = Shards((8,), Layout("data"), MeshShape(data=2), np.arange(2))
>>> [new.ranges(device) for device in (0, 1)], old.ranges(1)
([((0, 4),), ((4, 8),)], ((2, 4),))
>>> moved_elements(old, new, np.arange(2))
array([2, 4])
>>> lost_elements(old, np.arange(2))
4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.layout import Layout

Ints = NDArray[np.int64]
#: First and end of a part, elements, for every dim.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Shards:
    """An array that is spread over devices.

    Attributes:
        shape: elements per dim.
        layout: mesh axes per dim.
        mesh: sizes of the mesh axes.
        order: number of the device at each place of the mesh, places counted with the last axis
            fastest.
    """

    shape: tuple[int, ...]
    layout: Layout
    mesh: MeshShape
    order: Ints

    def ranges(self, device: int) -> Ranges | None:
        """The part that a device holds; None where it is not on the mesh."""
        (places,) = np.nonzero(self.order == device)
        if not len(places):
            return None
        parts = self._parts()[:, places[0]]
        sizes = self._sizes()
        return tuple(
            (int(part * size), int((part + 1) * size))
            for part, size in zip(parts, sizes, strict=True)
        )

    def starts(self, devices: int) -> tuple[Ints, Ints]:
        """First element per dim and device, and the size of a part per dim."""
        sizes = np.array(self._sizes(), np.int64)
        first = np.full((len(self.shape), devices), -1, np.int64)
        first[:, self.order] = self._parts() * sizes[:, None]
        return first, sizes

    def _sizes(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, self.mesh)

    def _parts(self) -> Ints:
        """Number of the part of each dim, by place: integers of shape (dims, places)."""
        sizes = tuple(self.mesh[axis] for axis in MESH_AXES)
        places = dict(
            zip(MESH_AXES, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True)
        )
        return (
            np.stack([self._part(axes, places) for axes in self.layout])
            if self.layout
            else np.zeros((0, math.prod(sizes)), np.int64)
        )

    def _part(self, axes: tuple[str, ...], places: Mapping[str, NDArray[np.intp]]) -> Ints:
        part = np.zeros(self.mesh.devices, np.int64)
        for axis in axes:  # the major axis first
            part = part * self.mesh[axis] + places[axis]
        return part


def moved_elements(old: Shards, new: Shards, survivors: Ints) -> Ints:
    """Elements that each device must receive to go from one layout to another."""
    reach = int(new.order.max()) + 1
    want, want_sizes = new.starts(reach)
    held, held_sizes = old.starts(max(int(old.order.max()), int(survivors.max(initial=0))) + 1)
    needed = np.zeros(reach, np.int64)
    needed[new.order] = math.prod(want_sizes.tolist())
    known = survivors[:reach]
    mine, theirs = want[:, : len(known)], held[:, known]
    common = np.minimum(mine + want_sizes[:, None], theirs + held_sizes[:, None]) - np.maximum(
        mine, theirs
    )
    overlap = np.prod(np.maximum(common, 0), axis=0)
    on_both = np.isin(np.arange(len(known)), new.order) & np.isin(known, old.order)
    needed[: len(known)] -= np.where(on_both, overlap, 0)
    return needed


def lost_elements(old: Shards, survivors: Ints) -> int:
    """Elements that no surviving device holds."""
    first, sizes = old.starts(max(int(old.order.max()), int(survivors.max(initial=0))) + 1)
    kept = first[:, survivors[np.isin(survivors, old.order)]]
    cells = np.zeros(kept.shape[1], np.int64)
    for start, size, extent in zip(kept, sizes.tolist(), old.shape, strict=True):
        cells = cells * (extent // size) + start // size
    return math.prod(old.shape) - len(np.unique(cells)) * math.prod(sizes.tolist())
