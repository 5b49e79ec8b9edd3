"""The positions of a sequence on each device, contiguous or in zig-zag order.

Contiguous, device i of N has the i-th of N runs. Under a causal mask the last device then does most
of the work and the first almost none. In zig-zag order a device has the i-th and the (2 N - 1 -
i)-th of 2 N runs, at equal distances from the two ends, and all devices have the same work (Brandon
et al., arXiv:2311.09431, balance it by stripes; two runs leave blocks of whole rows).

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

#: Index of a device: a Python integer, or computed by the program.
DeviceIndex = TypeVar("DeviceIndex", int, jax.Array, Index)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A sequence sharded over a mesh axis.

    Attributes:
        axis: the mesh axis, or its parts.
        ways: its size.
        zigzag: whether a device has two runs of the sequence.
        device_index: index of the device, inside of a region where it must not be a constant of the
            region (`tied_to`).
    """

    axis: str | tuple[str, ...]
    ways: int
    zigzag: bool = True
    device_index: Value | None = None

    @property
    def runs(self) -> int:
        """Number of runs of the sequence per device."""
        return 2 if self.zigzag else 1

    def order(self, length: int) -> np.ndarray:
        """The position in the sequence of each element of the concatenated parts of all devices,
        [length].
        """
        self.check(length)
        runs = np.arange(length).reshape(self.runs * self.ways, -1)
        return np.concatenate(
            [runs[number] for device in range(self.ways) for number in self.run_indices(device)]
        )

    def check(self, length: int) -> None:
        """Raises if a sequence of this length cannot be sharded."""
        if length % (self.runs * self.ways):
            raise LayoutError(
                f"a sequence of {length} positions cannot be sharded over {self.axis}={self.ways}"
                f" in {self.runs * self.ways} equal runs\nTry: a sequence that is a multiple of"
                f" {self.runs * self.ways}{', or zigzag=False' if self.zigzag else ''}"
            )

    def dealt(self, array: Value, dim: int = 1) -> Value:
        """A replicated array with its sequence reordered to the order of the devices."""
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

        Contiguous, a device has the runs 2 i and 2 i + 1. All first runs are one message, and all
        second runs another, since no two of either go to the same device; nothing is gathered.
        """
        if not self.zigzag:
            return array
        even, odd = (
            self._permute(run, self._targets(number))
            for number, run in enumerate(jnp.split(array, 2, axis=dim))
        )
        # Even runs are the first ones of even devices, and the second ones of odd devices.
        return self._by_parity(even, odd, dim)

    def collected_inside(self, array: Value, dim: int = 1) -> Value:
        """The reverse of `dealt_inside`."""
        if not self.zigzag:
            return array
        first, second = jnp.split(array, 2, axis=dim)
        even, odd = jnp.split(self._by_parity(first, second, dim), 2, axis=dim)
        return jnp.concatenate(
            [
                self._permute(run, [(to, source) for source, to in self._targets(number)])
                for number, run in enumerate((even, odd))
            ],
            axis=dim,
        )

    def _targets(self, parity: int) -> list[tuple[int, int]]:
        """(device of a run in contiguous order, device in zig-zag order) of all even runs, or of
        all odd ones.
        """
        runs = [2 * device + parity for device in range(self.ways)]
        return [(device, min(run, 2 * self.ways - 1 - run)) for device, run in enumerate(runs)]

    def _permute(self, array: Value, pairs: list[tuple[int, int]]) -> Value:
        """An array after messages between (source, target) pairs of devices."""
        return jax.lax.ppermute(array, self.axis, pairs)

    def _by_parity(self, even: Value, odd: Value, dim: int) -> Value:
        """Two arrays concatenated on even devices, and in reverse order on odd ones."""
        swapped = self.tied_to(even).device() % 2 == 1
        return jnp.concatenate(
            [jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)], axis=dim
        )

    def all_gathered(self, array: Value) -> Value:
        """The all-gathered parts of all devices: [B, S / N, ...] -> [B, S, ...]."""
        return jax.lax.all_gather(array, self.axis, axis=1, tiled=True)

    def positions(self, device: Index, local: int) -> Value:
        """Positions in the sequence of a device's tokens, [local]."""
        run = jnp.arange(local // self.runs)
        return jnp.concatenate(
            [number * (local // self.runs) + run for number in self.run_indices(device)]
        )

    def device(self) -> Value:
        """Index of the device, inside of a region that is manual over the axis."""
        return jax.lax.axis_index(self.axis) if self.device_index is None else self.device_index

    def tied_to(self, array: Value) -> Cut:
        """The partition with a device index that depends on an array that the region reads.

        Values that depend on the index alone are moved out of a loop around the region, into a
        region without operands, which XLA's partitioner rejects (seen with JAX 0.10.2: "'func.call'
        op expected at least one operand of @xla.sdy.manual_computation_body").
        """
        element = jax.lax.stop_gradient(array)[(0,) * array.ndim]
        return replace(self, device_index=jax.lax.optimization_barrier((self.device(), element))[0])

    def shifted(self, array: Value, hop: int = 1) -> Value:
        """The array of the device whose index is smaller by `hop`."""
        return self._permute(array, [(i, (i + hop) % self.ways) for i in range(self.ways)])

    def run_indices(self, device: DeviceIndex) -> tuple[DeviceIndex, ...]:
        """Indices of the runs of a device."""
        return (device, 2 * self.ways - 1 - device) if self.zigzag else (device,)
