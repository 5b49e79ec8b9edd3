"""Meshes with their places on the links and numbers of microbatches, as arrays: what pricing does
for many candidates at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.axes import BATCH_AXES, MESH_AXES, MeshShape
from shardlib.cost.machine.collective_tables import Links, links
from shardlib.cost.terms.local_sizes import Shapes, distinct_rows
from shardlib.hardware.placement import Placement
from shardlib.hardware.topology import Topology

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Meshes with microbatch counts, as arrays of equal length.

    Attributes:
        sizes: size of every mesh axis per candidate.
        micro: microbatches per candidate.
        links: costs of collectives per candidate.
        shapes: the distinct shapes among them.
        shape: number of the shape of each candidate.
    """

    sizes: Mapping[str, Array]
    micro: Array
    links: Links
    shapes: Shapes
    shape: Array

    def __len__(self) -> int:
        return len(self.micro)

    @property
    def stage(self) -> Array:
        """Stages per candidate."""
        return self.sizes["stage"]

    @property
    def fsdp(self) -> Array:
        """Size of the fsdp axis per candidate."""
        return self.sizes["fsdp"]

    @property
    def context(self) -> Array:
        """Size of the context axis per candidate."""
        return self.sizes["context"]

    def ways(self, axes: Iterable[str]) -> Array:
        """Number of shards of a dim that is sharded over some axes, per candidate."""
        return math.prod((self.sizes[axis] for axis in axes), start=np.ones_like(self.micro))

    def take(self, which: Array) -> Candidates:
        """Some of the candidates; the shapes are those of all."""
        return Candidates(
            sizes={axis: size[which] for axis, size in self.sizes.items()},
            micro=self.micro[which],
            links=self.links.take(which),
            shapes=self.shapes,
            shape=self.shape[which],
        )


def distinct(sizes: dict[str, Array]) -> tuple[Shapes, Array]:
    """The distinct shapes among candidates, and the number of the shape of each."""
    degree = math.prod((sizes[axis] for axis in BATCH_AXES), start=sizes["micro"])
    first, which = distinct_rows(
        [degree, *(sizes[axis] for axis in ("context", "tensor", "expert", "fsdp"))]
    )
    return (
        Shapes(
            batch=degree,
            context=sizes["context"],
            tensor=sizes["tensor"],
            expert=sizes["expert"],
            fsdp=sizes["fsdp"],
        ).take(first),
        which,
    )


def candidates(
    places: Sequence[tuple[MeshShape, Placement]], micro: Sequence[int], topology: Topology
) -> Candidates:
    """Builds the arrays for placed meshes with microbatches on a topology."""
    distinct_places: dict[int, int] = {}
    order = [
        distinct_places.setdefault(id(placement), len(distinct_places)) for _, placement in places
    ]
    unique = list({id(placement): placement for _, placement in places}.values())
    sizes = {
        axis: np.array([mesh[axis] for mesh, _ in places], dtype=np.int64) for axis in MESH_AXES
    }
    numbers = np.array(micro, dtype=np.int64)
    shapes, shape = distinct({**sizes, "micro": numbers})
    return Candidates(
        sizes=sizes,
        micro=numbers,
        links=links(unique, topology).take(np.array(order, dtype=np.int64)),
        shapes=shapes,
        shape=shape,
    )
