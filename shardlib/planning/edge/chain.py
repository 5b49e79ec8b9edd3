"""A model's forward pass as a chain of pieces that devices can take runs of.

The pieces are what comes before the layers, every layer, what comes between layer groups, and
what comes after them, in the order of the program. Each has kernels, weights, values that it works
on, and what has to be handed on for the pieces after it: the residual stream, and whatever else
they read that is made of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardlib.cost.machine.efficiency_curves import efficiency_of
from shardlib.cost.machine.roofline import kernel_seconds
from shardlib.cost.terms.terms import Amount, Compute
from shardlib.hardware.cluster import Device

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal pieces that follow each other.

    Attributes:
        name: "before the layers", "layer", "between layers", "after the layers".
        count: how many.
        layers: layer group; `OUTSIDE_LAYERS` outside of them.
        first, last: its ops.
        kernels: of one piece.
        weights: bytes of parameters that one piece has for itself.
        shared: parameters that it reads and that others may read, too, by value in the graph.
        working: most bytes of values alive at once, weights left out.
        inner: bytes handed on between two of its pieces.
        outer: bytes handed on after its last piece.
    """

    name: str
    count: int
    layers: int
    first: int
    last: int
    kernels: tuple[Compute, ...] = ()
    weights: float = 0.0
    shared: frozenset[int] = frozenset()
    working: float = 0.0
    inner: float = 0.0
    outer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The forward pass of a model as a chain.

    Attributes:
        groups: runs of equal pieces, in order.
        sizes: bytes of the parameters in `Group.shared`, by value.
    """

    groups: tuple[Group, ...]
    sizes: dict[int, float]

    @property
    def names(self) -> tuple[str, ...]:
        """Every piece by name, layers with their number."""
        return tuple(
            f"{group.name} {i}" if group.layers >= 0 else group.name
            for number, group in enumerate(self.groups)
            for i in range(self._layers_before(number), self._layers_before(number) + group.count)
        )

    def _layers_before(self, number: int) -> int:
        return sum(group.count for group in self.groups[:number] if group.layers >= 0)

    def each(self, amounts: list[float]) -> Array:
        """An amount of each group's pieces as an array over all pieces."""
        return np.repeat(np.array(amounts, dtype=float), [group.count for group in self.groups])

    def handed(self) -> Array:
        """Bytes that cross the cut before each piece, and after the last, array [pieces + 1]: 0 at
        both ends.
        """
        handed_bytes = [
            size
            for group in self.groups
            for size in (*[group.inner] * (group.count - 1), group.outer)
        ]
        return np.array([0.0, *handed_bytes[:-1], 0.0])

    def bytes(self) -> Array:
        """Bytes that a device needs for pieces [i, j): weights, the largest working set, and what
        comes in and goes out; array [pieces + 1, pieces + 1], infinite where i >= j.
        """
        pieces, handed = sum(group.count for group in self.groups), self.handed()
        weights = np.concatenate(
            ([0.0], np.cumsum(self.each([group.weights for group in self.groups])))
        )
        needed = weights[None, :] - weights[:, None] + handed[:, None] + handed[None, :]
        for value, size in self.sizes.items():
            reads = np.concatenate(
                (
                    [0.0],
                    np.cumsum(self.each([float(value in group.shared) for group in self.groups])),
                )
            )
            needed = needed + size * (reads[None, :] > reads[:, None])
        working = self.each([group.working for group in self.groups])
        for i in range(pieces):
            needed[i, i + 1 :] += np.maximum.accumulate(working[i:])
        return np.where(
            np.arange(pieces + 1)[:, None] < np.arange(pieces + 1)[None, :], needed, np.inf
        )

    def seconds(self, device: Device) -> Array:
        """Seconds of each piece on a device."""
        chip = device.chip
        constants = efficiency_of(chip.name, chip.vendor, "xla", dict(device.efficiency))

        def local(amount: Amount) -> Array:
            return np.array([amount.total])

        piece_seconds = [
            sum(
                float(kernel_seconds(kernel, local, chip, constants)[0]) * kernel.trips
                for kernel in group.kernels
            )
            for group in self.groups
        ]
        if device.layer_seconds is not None:
            longest = max(
                (k for k, group in enumerate(self.groups) if group.layers >= 0),
                key=lambda k: self.groups[k].count,
            )
            piece_seconds = [
                seconds * device.layer_seconds / piece_seconds[longest] for seconds in piece_seconds
            ]
        return self.each(piece_seconds)
