"""How do pieces of an array go around the devices of the tensor axis, while something is done with each?

The functions run inside of a region that is manual over the axis. All loops are written out, so that a compiler sees which messages and which products do not depend on each other: the message of the
next turn is on its way while the piece of this turn is multiplied (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023).
Pieces go both ways around: a link of a torus carries as much in either direction at once, and while sums of one direction are on their way, products for the other are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A mesh axis as a ring.

    Attributes:
        axis: names of the axis in the mesh, the major one first.
        order: number of the device at every place of the ring.
    """

    axis: tuple[str, ...]
    order: tuple[int, ...]

    @staticmethod
    def along(axis: tuple[str, ...], sizes: tuple[int, ...]) -> Ring:
        """A ring on which neighbours are neighbours along one part of the axis; of the ends only where the major part is a ring itself, or of two.

        Args:
            axis: names of the parts, the major one first.
            sizes: devices along each.
        """
        return Ring(axis=axis, order=snake(sizes))

    @property
    def ways(self) -> int:
        """Number of devices."""
        return len(self.order)

    @property
    def hops(self) -> tuple[int, int]:
        """Turns in which pieces go forwards, and in which they go backwards."""
        return self.ways // 2, (self.ways - 1) // 2

    def pieces(self, array: Any) -> Iterator[tuple[Any, Any]]:
        """(number of the device that it comes from, its piece) of all devices, the own one first."""
        place = self._place()
        forwards = backwards = array
        yield self._device(place), array
        for turn in range(1, self.hops[0] + 1):
            forwards = self._passed(forwards, 1)
            yield self._device(place - turn), forwards
            if turn <= self.hops[1]:
                backwards = self._passed(backwards, -1)
                yield self._device(place + turn), backwards

    def summed(self, given: Callable[[Any], Any], product: Callable[[Any], Any]) -> Any:
        """The sum over all devices of what they have for this one.

        Args:
            given: number of a device -> arrays.
            product: the arrays for a device -> what this device adds to the sum of that one.
        """
        place, (forth, back) = self._place(), self.hops
        turns = [(left, way) for left in range(forth, 0, -1) for way in (1, -1) if way > 0 or left <= back]
        sums: dict[int, Any] = {1: None, -1: None}
        products = in_turn([given(self._device(place + way * left)) for left, way in [*turns, (0, 1)]], product)
        for (_, way), made in zip(turns, products, strict=False):
            sums[way] = self._passed(_plus(sums[way], made), way)
        return _plus(sums[-1], _plus(sums[1], next(products)))

    def _place(self) -> Any:
        """The place of this device."""
        return jnp.asarray(np.argsort(self.order), jnp.int32)[jax.lax.axis_index(self.axis)]

    def _device(self, place: Any) -> Any:
        """The device at a place, counted around."""
        return jnp.asarray(self.order, jnp.int32)[place % self.ways]

    def _passed(self, array: Any, far: int) -> Any:
        """What the neighbour has."""
        return jax.lax.ppermute(array, self.axis, [(device, self.order[(place + far) % self.ways]) for place, device in enumerate(self.order)])


def in_turn(given: Sequence[Any], product: Callable[[Any], Any]) -> Iterator[Any]:
    """Products one after the other: none begins before the one before it is done.

    XLA would otherwise join matmuls of one weight to a single one (openxla/xla `xla/service/gpu/transforms/dot_merger.cc`), which waits for the last message.
    """
    made = product(given[0])
    for arrays in given[1:]:
        arrays, made = jax.lax.optimization_barrier((arrays, made))
        yield made
        made = product(arrays)
    yield made


def _plus(total: Any, part: Any) -> Any:
    return part if total is None else total + part


def snake(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of the places of a grid, row-major, in an order in which neighbours differ by one step along one dim (a reflected Gray code).

    >>> snake((2, 2, 2)), snake((2, 3)), snake((4,))
    ((0, 1, 3, 2, 6, 7, 5, 4), (0, 1, 2, 5, 4, 3), (0, 1, 2, 3))
    """
    order = (0,)
    inside = 1
    for size in reversed(sizes):
        order = tuple(outer * inside + number for outer in range(size) for number in (order[::-1] if outer % 2 else order))
        inside *= size
    return order
