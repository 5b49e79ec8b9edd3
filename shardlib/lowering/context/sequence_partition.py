"""The positions of a sequence that each device has, contiguous or in zig-zag order.

Contiguous, device i of N has the i-th part. Under a causal mask the last device then does most of
the work while the first has almost none. In zig-zag order a device has two runs that are as far
from the ends of the sequence as each other, the i-th and the (2 N - 1 - i)-th of 2 N, and all
devices have the same work (Brandon et al., arXiv:2311.09431, balance it by stripes; two runs leave
blocks of whole rows).

>>> Cut(axis="context", ways=2).order(8).tolist()
[0, 1, 6, 7, 2, 3, 4, 5]
>>> Cut(axis="context", ways=2, zigzag=False).order(8).tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import LayoutError
from shardlib.jax_types import Index, Value

#: The number of a device: known, or computed by the program.
Number = TypeVar("Number", int, jax.Array, Index)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A sequence over a mesh axis.

    Attributes:
        axis: the mesh axis, or its parts.
        ways: its size, parts of the sequence.
        zigzag: whether a device has two runs of the sequence.
        number: number of the device, inside of a region, where that must not be a constant of it
            (`beside`).
    """

    axis: str | tuple[str, ...]
    ways: int
    zigzag: bool = True
    number: Value | None = None

    @property
    def runs(self) -> int:
        """Runs of the sequence that a device has."""
        return 2 if self.zigzag else 1

    def order(self, length: int) -> np.ndarray:
        """Position of the sequence at every place of the array whose i-th part is what device i
        has: [length].
        """
        self.check(length)
        runs = np.arange(length).reshape(self.runs * self.ways, -1)
        return np.concatenate(
            [runs[number] for device in range(self.ways) for number in self.numbers(device)]
        )

    def check(self, length: int) -> None:
        """Checks that a sequence can be sharded."""
        if length % (self.runs * self.ways):
            raise LayoutError(
                f"a sequence of {length} positions cannot be sharded over {self.axis}={self.ways}"
                f" in {self.runs * self.ways} equal runs\nTry: a sequence that is a multiple of"
                f" {self.runs * self.ways}{', or zigzag=False' if self.zigzag else ''}"
            )

    def dealt(self, array: Value, dim: int = 1) -> Value:
        """A whole array with its sequence in the order of the devices."""
        return jnp.take(array, self.order(array.shape[dim]), axis=dim) if self.zigzag else array

    def collected(self, array: Value, dim: int = 1) -> Value:
        """The reverse of `dealt`."""
        return (
            jnp.take(array, np.argsort(self.order(array.shape[dim])), axis=dim)
            if self.zigzag
            else array
        )

    def dealt_inside(self, array: Value, dim: int = 1) -> Value:
        """A device's part of an array in the order of the sequence -> its part in the order of the
        devices; inside of a region that is manual over the axis.

        Contiguous, a device has the runs 2 i and 2 i + 1. All first ones are one message, and all
        second ones another, for no two of either go to the same device; nothing is gathered.
        """
        if not self.zigzag:
            return array
        even, odd = (
            self._sent(run, self._homes(number))
            for number, run in enumerate(jnp.split(array, 2, axis=dim))
        )
        # Runs of even numbers are the first ones of devices of even numbers, and the second ones of
        # the others.
        return self._by_parity(even, odd, dim)

    def collected_inside(self, array: Value, dim: int = 1) -> Value:
        """The reverse of `dealt_inside`."""
        if not self.zigzag:
            return array
        first, second = jnp.split(array, 2, axis=dim)
        even, odd = jnp.split(self._by_parity(first, second, dim), 2, axis=dim)
        return jnp.concatenate(
            [
                self._sent(run, [(to, source) for source, to in self._homes(number)])
                for number, run in enumerate((even, odd))
            ],
            axis=dim,
        )

    def _homes(self, parity: int) -> list[tuple[int, int]]:
        """(the device that has a run contiguously, the device that has it in zig-zag order) of all
        runs of even numbers, or of odd ones.
        """
        runs = [2 * device + parity for device in range(self.ways)]
        return [(device, min(run, 2 * self.ways - 1 - run)) for device, run in enumerate(runs)]

    def _sent(self, array: Value, pairs: list[tuple[int, int]]) -> Value:
        """Messages between devices, (source, target)."""
        return jax.lax.ppermute(array, self.axis, pairs)

    def _by_parity(self, even: Value, odd: Value, dim: int) -> Value:
        """Two arrays one after the other on devices of even numbers, and the other way round on
        others.
        """
        swapped = self.beside(even).device() % 2 == 1
        return jnp.concatenate(
            [jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)], axis=dim
        )

    def whole(self, array: Value) -> Value:
        """The parts of all devices, one after the other: [B, S / N, ...] -> [B, S, ...]."""
        return jax.lax.all_gather(array, self.axis, axis=1, tiled=True)

    def positions(self, device: Index, local: int) -> Value:
        """Positions of the sequence that a device has, [local], by its number."""
        run = jnp.arange(local // self.runs)
        return jnp.concatenate(
            [number * (local // self.runs) + run for number in self.numbers(device)]
        )

    def device(self) -> Value:
        """Number of the device, inside of a region that is manual over the axis."""
        return jax.lax.axis_index(self.axis) if self.number is None else self.number

    def beside(self, array: Value) -> Cut:
        """The cut with a number of the device that is known no sooner than an array that the region
        works on.

        What depends on the number alone is taken out of a loop around the region, into a region
        without operands, which XLA's partitioner does not take (seen with JAX 0.10.2: "'func.call'
        op expected at least one operand of @xla.sdy.manual_computation_body").
        """
        element = jax.lax.stop_gradient(array)[(0,) * array.ndim]
        return replace(self, number=jax.lax.optimization_barrier((self.device(), element))[0])

    def passed(self, array: Value, far: int = 1) -> Value:
        """Returns what the device `far` numbers before this one has."""
        return self._sent(array, [(i, (i + far) % self.ways) for i in range(self.ways)])

    def numbers(self, device: Number) -> tuple[Number, ...]:
        """Numbers of the runs that a device has, by its number."""
        return (device, 2 * self.ways - 1 - device) if self.zigzag else (device,)
