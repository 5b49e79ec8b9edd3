"""How the mesh axes lie on the tiers of links.

The devices of a topology are numbered through its tiers; a mesh axis takes a part of one or several
dims. `Span` is one such part: `ways` positions of a dim, `stride` apart. An axis is the mixed-radix
product of its spans, the first the major one.

>>> from shardlib.hardware.topology import topology
>>> spans = place(MeshShape(data=8, tensor=16), topology("16*h100:8"))
>>> spans["tensor"]
(Span(tier=0, dim=0, ways=2, stride=1), Span(tier=1, dim=0, ways=8, stride=1))
>>> spans["data"]
(Span(tier=0, dim=0, ways=8, stride=2),)

Axes are served from the innermost (tensor) outwards, and take from the innermost tier what they
share with it (the greatest common divisor), the rest from the next tier. On a torus an axis prefers
whole dims, since half a ring is only a line; among equal choices it takes the fastest for a gather,
then the last dims. This is what
`jax.experimental.mesh_utils.create_device_mesh(allow_split_physical_axes=True)` does by
hand-written preference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology


@dataclass(frozen=True)
class Span:
    """A part of one dim of one tier that a mesh axis takes.

    Attributes:
        tier: index into `Topology.tiers`.
        dim: index into the tier's shape.
        ways: positions along the dim, at least 2.
        stride: distance between neighbouring positions, in positions of the dim; the axes inside
            share it.
    """

    tier: int
    dim: int
    ways: int
    stride: int = 1


Placement = Mapping[str, tuple[Span, ...]]


@lru_cache(maxsize=1 << 16)
def place(mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()) -> Placement | None:
    """Lays the axes of a mesh on the tiers of a topology.

    A mesh smaller than the topology takes the innermost devices. The result is shared between
    callers and immutable.

    Args:
        order: mesh axes from the one that takes the outermost links to the one that takes the
            innermost; by default as in `MESH_AXES`.

    Returns:
        The spans of every axis larger than 1, major span first; None when the mesh has more devices
    """
    used = used_shapes(mesh.devices, topology)
    if used is None:
        return None
    left, spans = used, dict[str, tuple[Span, ...]]()
    for axis in reversed(order or MESH_AXES):
        if mesh[axis] > 1:
            spans[axis], left = _take(mesh[axis], topology, used, left)
    return MappingProxyType({axis: spans[axis] for axis in mesh})


def orders(mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Orders in which the axes of a mesh can take the links: the usual one, and those in which one
    axis takes the innermost or the outermost links.

    The usual one comes first, as `()`; the others are as `place` takes them.

    >>> orders(MeshShape(data=2, tensor=4))
    ((), ('tensor', 'data'))
    """
    axes = tuple(mesh)
    candidates: dict[tuple[str, ...], None] = {axes: None}
    for axis in axes:
        others = tuple(a for a in axes if a != axis)
        candidates |= {(*others, axis): None, (axis, *others): None}
    return ((), *(order for order in candidates if order != axes))


@lru_cache(maxsize=1 << 14)
def placements(
    mesh: MeshShape, topology: Topology
) -> tuple[tuple[tuple[str, ...], Placement], ...]:
    """The places of a mesh on a topology that differ in what collectives cost, as (order,
    placement), the usual one first; empty where it does not fit. Of orders that cost the same it is
    the first in the alphabet.

    How far apart the devices of a group are matters on a torus alone: a switch or a network takes
    the same time whoever lies between them.
    """
    distinct: dict[object, tuple[tuple[str, ...], Placement]] = {}
    flat = len(topology.tiers) == 1 and len(topology.tiers[0].shape) == 1
    is_torus = [tier.kind == "torus" for tier in topology.tiers]
    for order in orders(mesh)[:1] if flat else sorted(orders(mesh)):
        placement = place(mesh, topology, order)
        if placement is None:
            return ()
        lies = tuple(
            (axis, *((s.tier, s.dim, s.ways, s.stride if is_torus[s.tier] else 1) for s in spans))
            for axis, spans in placement.items()
        )
        distinct.setdefault(lies, (order, placement))
    return tuple(distinct.values())


def device_order(
    mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> NDArray[np.int64] | None:
    """Numbers of the devices at each place of the mesh; None where `place` gives None."""
    spans = place(mesh, topology, order)
    if spans is None:
        return None
    strides = _number_strides(topology)
    numbers = np.zeros((), np.int64)
    for axis in MESH_AXES:
        along = np.zeros(1, np.int64)
        for span in spans.get(axis, ()):
            step = np.arange(span.ways, dtype=np.int64) * span.stride * strides[span.tier][span.dim]
            along = np.add.outer(along, step).reshape(-1)
        numbers = np.add.outer(numbers, along)
    return numbers


def _number_strides(topology: Topology) -> list[list[int]]:
    """How far the device number moves with each position of each dim."""
    strides: list[list[int]] = []
    step = 1
    for tier in reversed(topology.tiers):
        row: list[int] = []
        for size in reversed(tier.shape):
            row.insert(0, step)
            step *= size
        strides.insert(0, row)
    return strides


@lru_cache(maxsize=4096)
def used_shapes(devices: int, topology: Topology) -> tuple[tuple[int, ...], ...] | None:
    """The sub-block of every tier that a mesh of so many devices uses, as full inside as can be;
    None where no sub-block has that many.
    """
    if devices > topology.devices:
        return None
    if devices == topology.devices:
        return tuple(tier.shape for tier in topology.tiers)
    return _fill(devices, topology.tiers)


def _fill(devices: int, tiers: tuple[Tier, ...]) -> tuple[tuple[int, ...], ...] | None:
    if not tiers:
        return () if devices == 1 else None
    inner = tiers[-1]
    for part in reversed(divisors(devices, inner.devices)):
        blocks = list(_factorings(part, inner.shape))
        outer = _fill(devices // part, tiers[:-1]) if blocks else None
        if outer is not None:
            return (
                *outer,
                min(blocks, key=lambda block: _preference(block, block, (1,) * len(block), inner)),
            )
    return None


def divisors(number: int, limit: int | None = None) -> list[int]:
    """All divisors up to `limit`, ascending. Of what has no bound, such as a batch, only small ones
    are of use, and to look for all takes the root of the number.

    >>> divisors(12), divisors(10**12, most=10)
    ([1, 2, 3, 4, 6, 12], [1, 2, 4, 5, 8, 10])

    Args:
        number: at least 1.
        limit: None for the number itself.
    """
    limit = number if limit is None else limit
    small = [n for n in range(1, min(math.isqrt(number), limit) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small if number // n <= limit)})


def _factorings(number: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as a product with one factor at most as large as each entry of
    `limits`.
    """
    if len(limits) == 1:
        if number <= limits[0]:
            yield (number,)
        return
    for first in (d for d in range(1, min(number, limits[0]) + 1) if number % d == 0):
        for factors in _factorings(number // first, limits[1:]):
            yield (first, *factors)


@lru_cache(maxsize=1 << 14)
def _take(
    degree: int,
    topology: Topology,
    used: tuple[tuple[int, ...], ...],
    left: tuple[tuple[int, ...], ...],
) -> tuple[tuple[Span, ...], tuple[tuple[int, ...], ...]]:
    """Takes `degree` positions from what is left of each tier, innermost tier first: the spans, and
    what is left then.
    """
    spans: list[Span] = []
    then = list(left)
    for i in reversed(range(len(left))):
        share = math.gcd(degree, math.prod(left[i]))
        if share == 1:
            continue
        stride = tuple(u // size for u, size in zip(used[i], left[i], strict=True))
        parts = _split(share, left[i], stride, topology.tiers[i])
        spans[:0] = [Span(i, dim, part, stride[dim]) for dim, part in enumerate(parts) if part > 1]
        then[i] = tuple(size // part for size, part in zip(left[i], parts, strict=True))
        degree //= share
    assert degree == 1, "the used devices are a multiple of every axis, prime by prime"
    return tuple(spans), tuple(then)


@lru_cache(maxsize=1 << 14)
def _split(
    share: int, left: tuple[int, ...], stride: tuple[int, ...], tier: Tier
) -> tuple[int, ...]:
    """The part of each dim that an axis takes of one tier."""
    if len(left) == 1:
        return (share,)
    options = itertools.product(
        *([d for d in range(1, size + 1) if size % d == 0 and share % d == 0] for size in left)
    )
    exact = [option for option in options if math.prod(option) == share]
    return min(exact, key=lambda option: _preference(option, left, stride, tier))


def _preference(
    parts: tuple[int, ...], left: tuple[int, ...], stride: tuple[int, ...], tier: Tier
) -> tuple[object, ...]:
    """Sorts choices: fewest dims taken in part, then the fastest gather, then the last dims."""
    in_part = sum(1 for part, size in zip(parts, tier.shape, strict=True) if 1 < part < size)
    rate = sum(
        (1 + (tier.wrap[d] and part * stride[d] == tier.shape[d])) / stride[d]
        for d, part in enumerate(parts)
        if part > 1
    )
    leftover = tuple(size // part for part, size in zip(parts, left, strict=True))
    return in_part, -rate, tuple(-n for n in leftover)
