"""How is a value sharded over the mesh?

A layout says, for each dim of an array, which mesh axes shard it, the major one first. Printed as
the scaling book writes it (jax-ml/scaling-book, `sharding.md`): A[I_X, J] is sharded over X along I
and whole along J.

>>> layout = Layout(("data", "fsdp"), (), "tensor")
>>> layout.local_shape((16, 5, 8), MeshShape(data=2, fsdp=2, tensor=4))
(4, 5, 2)
>>> str(layout)
'[data·fsdp, -, tensor]'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardlib.axes import INNER_AXES, MeshShape
from shardlib.errors import LayoutError


class Layout(tuple[tuple[str, ...], ...]):
    """Mesh axes per dim, major first; a frozen tuple of tuples.

    Attributes:
        dims: for each dim of the array, what shards it: a mesh axis, several, or None or () for
            none.

    Raises:
        LayoutError: an axis is unknown or shards two dims.
    """

    __slots__ = ()

    def __new__(cls, *dims: str | Iterable[str] | None) -> Layout:
        cut = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        used = [axis for dim in cut for axis in dim]
        unknown = sorted(set(used) - set(INNER_AXES))
        if unknown:
            raise LayoutError(
                f"layout {cut} names {', '.join(unknown)}; mesh axes are {', '.join(INNER_AXES)}"
            )
        if len(set(used)) < len(used):
            raise LayoutError(
                f"layout {cut} uses a mesh axis twice; each axis shards at most one dim of a value"
            )
        return super().__new__(cls, cut)

    def __getnewargs__(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self)

    @classmethod
    def replicated(cls, rank: int) -> Layout:
        """The layout of an array of `rank` dims, none of which is sharded.

        Args:
            rank: number of dims.

        Returns:
            () for every dim.
        """
        return cls(*((),) * rank)

    @property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that shards some dim."""
        return frozenset(axis for dim in self for axis in dim)

    def parts(self, mesh: MeshShape) -> tuple[int, ...]:
        """Number of shards along each dim.

        Args:
            mesh: sizes of the mesh axes.

        Returns:
            One number per dim; 1 where it is not sharded.
        """
        return tuple(mesh.ways(dim) for dim in self)

    def ways(self, mesh: MeshShape) -> int:
        """Number of distinct shards of the whole value.

        Args:
            mesh: sizes of the mesh axes.

        Returns:
            The product of `parts`; fewer than the devices where some hold replicas.
        """
        return math.prod(self.parts(mesh))

    def local_shape(self, shape: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """Shape that one device holds.

        Args:
            shape: elements per dim of the whole array.
            mesh: sizes of the mesh axes.

        Returns:
            Elements per dim of the shard of one device.

        Raises:
            LayoutError: the rank differs or a dim does not divide.
        """
        if len(shape) != len(self):
            raise LayoutError(
                f"layout {self} has {len(self)} dims, the array {tuple(shape)} has {len(shape)}"
            )
        parts = self.parts(mesh)
        bad = [i for i, (size, n) in enumerate(zip(shape, parts, strict=True)) if size % n]
        if bad:
            i = bad[0]
            raise LayoutError(
                f"dim {i} of {tuple(shape)} has size {shape[i]}, which {parts[i]} parts"
                f" ({'·'.join(self[i])}) do not divide"
            )
        return tuple(size // n for size, n in zip(shape, parts, strict=True))

    def local_bytes(self, shape: Sequence[int], itemsize: int, mesh: MeshShape) -> int:
        """Bytes that one device holds of an array with `itemsize` bytes an element.

        Args:
            shape: elements per dim of the whole array.
            itemsize: bytes of an element.
            mesh: sizes of the mesh axes.

        Returns:
            Bytes of one shard.

        Raises:
            LayoutError: as `local_shape`.
        """
        return math.prod(self.local_shape(shape, mesh)) * itemsize

    def __str__(self) -> str:
        return "[" + ", ".join("·".join(dim) or "-" for dim in self) + "]"

    def __repr__(self) -> str:
        return f"Layout{tuple(self)!r}"

    def to_json(self) -> list[list[str]]:
        """The layout as plain lists."""
        return [list(dim) for dim in self]
