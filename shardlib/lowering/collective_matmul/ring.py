"""How do pieces of an array go around the devices of the tensor axis, while something is done with
each?

The functions run inside of a region that is manual over the axis. All loops are written out, so
that a compiler sees which messages and which products do not depend on each other: the message of
the next turn is on its way while the piece of this turn is multiplied (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023). Pieces go both ways around: a link of a torus carries as much in either direction at once,
and while sums of one direction are on their way, products for the other are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A mesh axis as a ring.

    Attributes:
        axis: names of the axis in the mesh, the major one first.
        order: number of the device at every place of the ring.
        in_turn: whether a matmul waits for the one before it, see `after`.
    """

    axis: tuple[str, ...]
    order: tuple[int, ...]
    in_turn: bool = True

    @staticmethod
    def along(axis: tuple[str, ...], sizes: tuple[int, ...], *, in_turn: bool = True) -> Ring:
        """A ring on which neighbours are neighbours along one part of the axis; of the ends only
        where the major part is a ring itself, or of two.
        """
        return Ring(axis=axis, order=snake(sizes), in_turn=in_turn)

    @property
    def ways(self) -> int:
        """Number of devices."""
        return len(self.order)

    @property
    def hops(self) -> tuple[int, int]:
        """Turns in which pieces go forwards, and in which they go backwards."""
        return self.ways // 2, (self.ways - 1) // 2

    def folded(
        self, array: jax.Array, work: Callable[[Made | None, jax.Array, jax.Array], Made]
    ) -> Made:
        """What is made of the pieces of all devices, one after the other, the own one first.

        Args:
            work: (what is made so far, None at first; number of a device; its piece) -> what is
                made then.
        """
        place, (forth, back) = self._place(), self.hops
        result, coming = work(None, self._device(place), array), {1: array, -1: array}
        for turn in range(1, forth + 1):
            for direction in (1, -1) if turn <= back else (1,):
                coming[direction], result = self.after(
                    self._passed(coming[direction], direction), result
                )
                result = work(result, self._device(place - direction * turn), coming[direction])
        return result

    def summed(
        self, arrays_for: Callable[[jax.Array], Tree], product: Callable[[Tree], jax.Array]
    ) -> jax.Array:
        """The sum over all devices of what they have for this one.

        Args:
            arrays_for: number of a device -> arrays.
            product: the arrays for a device -> what this device adds to the sum of that one.
        """
        place, (forth, back) = self._place(), self.hops
        turns = [
            (left, direction)
            for left in range(forth, 0, -1)
            for direction in (1, -1)
            if direction > 0 or left <= back
        ]
        sums: dict[int, Any] = {1: None, -1: None}
        products = self._products(
            [
                arrays_for(self._device(place + direction * left))
                for left, direction in [*turns, (0, 1)]
            ],
            product,
        )
        for (_, direction), partial in zip(turns, products, strict=False):
            sums[direction] = self._passed(_plus(sums[direction], partial), direction)
        return _plus(sums[-1], _plus(sums[1], next(products)))

    def after(self, arrays: Tree, ready: Tree) -> tuple[Tree, Tree]:
        """Both as they are; what is computed from the first waits for the second, where matmuls
        come in turn.

        XLA's compiler for GPUs would otherwise join matmuls of one weight to a single one
        (openxla/xla `xla/hlo/transforms/simplifiers/dot_merger.cc`), which waits for the last
        message. That for TPUs joins none, and adds sums inside of matmuls where nothing stands
        between the two.
        """
        return jax.lax.optimization_barrier((arrays, ready)) if self.in_turn else (arrays, ready)

    def _products(
        self, operands: Sequence[Tree], product: Callable[[Tree], jax.Array]
    ) -> Iterator[jax.Array]:
        result = product(operands[0])
        for arrays in operands[1:]:
            arrays, result = self.after(arrays, result)
            yield result
            result = product(arrays)
        yield result

    def _place(self) -> jax.Array:
        """The place of this device."""
        return jnp.asarray(np.argsort(self.order), jnp.int32)[jax.lax.axis_index(self.axis)]

    def _device(self, place: jax.Array) -> jax.Array:
        """The device at a place, counted around."""
        return jnp.asarray(self.order, jnp.int32)[place % self.ways]

    def _passed(self, array: jax.Array, far: int) -> jax.Array:
        """What the neighbour has."""
        return jax.lax.ppermute(
            array,
            self.axis,
            [
                (device, self.order[(place + far) % self.ways])
                for place, device in enumerate(self.order)
            ],
        )


def _plus(total: jax.Array | None, part: jax.Array) -> jax.Array:
    return part if total is None else total + part


def snake(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of the places of a grid, row-major, in an order in which neighbours differ by one
    step along one dim (a reflected Gray code).

    >>> snake((2, 2, 2)), snake((2, 3)), snake((4,))
    ((0, 1, 3, 2, 6, 7, 5, 4), (0, 1, 2, 5, 4, 3), (0, 1, 2, 3))
    """
    order = (0,)
    inside = 1
    for size in reversed(sizes):
        order = tuple(
            outer * inside + number
            for outer in range(size)
            for number in (order[::-1] if outer % 2 else order)
        )
        inside *= size
    return order
