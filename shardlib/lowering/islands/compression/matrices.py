"""Which parameters are matrices, and what of them one device holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.sharding import NamedSharding

from shardlib.exchanges.compressors import Compressor, PowerSGD
from shardlib.planning.islands.compression import low_rank, split

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of a parameter as a device holds it.

    Attributes:
        shape: of the whole.
        stacked: whether the first dim is one of layers, each a matrix of its own.
        state: sharding of the parameter's optimizer state, which it has while it is exchanged.
        matrix: whether it is sent as a matrix of low rank.
    """

    shape: tuple[int, ...]
    stacked: bool
    state: NamedSharding
    matrix: bool

    @staticmethod
    def of(shape: tuple[int, ...], stacked: bool, state: NamedSharding, by: Compressor) -> Gradient:
        """The gradient of a parameter."""
        matrix = isinstance(by, PowerSGD) and low_rank(shape, stacked, by.rank)
        return Gradient(shape=shape, stacked=stacked, state=state, matrix=matrix)

    @property
    def local(self) -> tuple[int, ...]:
        """What a device holds."""
        return self.state.shard_shape(self.shape)

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The mesh axes of every dim."""
        spec = (*self.state.spec, *(None,) * (len(self.shape) - len(self.state.spec)))
        return tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec)

    @property
    def every(self) -> Axes:
        """The mesh axes that shard it."""
        return sum(self.axes, ())

    @property
    def rows(self) -> Axes:
        """The mesh axes that shard the rows of a matrix."""
        return sum(self.axes[int(self.stacked) : self._split], ())

    @property
    def columns(self) -> Axes:
        """The mesh axes that shard the columns of a matrix."""
        return sum(self.axes[self._split :], ())

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(layers, rows, columns) of what a device holds."""
        first, at = int(self.stacked), self._split
        layers, rows, columns = self.local[:first], self.local[first:at], self.local[at:]
        return math.prod(layers), math.prod(rows), math.prod(columns)

    def factor(self, rank: int) -> tuple[tuple[int, ...], tuple[Axes, ...]]:
        """Shape and mesh axes of Q: layers where there are some, the columns' dims, the rank."""
        first, at = int(self.stacked), self._split
        return (
            (*self.shape[:first], *self.shape[at:], rank),
            (*self.axes[:first], *self.axes[at:], ()),
        )

    @property
    def _split(self) -> int:
        """Where dims of columns begin."""
        return split(self.shape, self.stacked)
