"""Which words name the directions of a device mesh, and how large is each?

A *logical axis* is a model's name for a dimension ("embed"); a *mesh axis* is a direction of the
device grid ("tensor"). shardlib has six mesh axes, listed here from the one that tolerates the
slowest links to the one that needs the fastest:

>>> mesh = MeshShape(data=2, tensor=4)
>>> mesh.devices, mesh["tensor"], mesh["stage"]
(8, 4, 1)
>>> str(mesh)
'data=2 x tensor=4'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping

from shardlib.errors import PinError, raise_all

#: Mesh axes from the outermost (slowest links) to the innermost (fastest links) of the device
#: order.
MESH_AXES: tuple[str, ...] = ("stage", "data", "fsdp", "expert", "context", "tensor")

#: Other names of the same axes that users bring from other systems.
MESH_AXIS_ALIASES: Mapping[str, str] = {
    "pp": "stage",
    "pipeline": "stage",
    "dp": "data",
    "replica": "data",
    "ep": "expert",
    "cp": "context",
    "sp": "context",
    "tp": "tensor",
    "model": "tensor",
}

#: A logical name per dim of an array; None where the user gave no name.
LogicalAxes = tuple[str | None, ...]


def mesh_axis(name: str) -> str:
    """Returns the canonical mesh axis for a name or alias.

    Raises:
        PinError: the name is no mesh axis.
    """
    canonical = MESH_AXIS_ALIASES.get(name, name)
    if canonical not in MESH_AXES:
        near = difflib.get_close_matches(name, MESH_AXES, n=1)
        raise PinError(
            f"{name!r} is no mesh axis; {f'did you mean {near[0]!r}? ' if near else ''}mesh axes"
            f" are {', '.join(MESH_AXES)}"
        )
    return canonical


class MeshShape(Mapping[str, int]):
    """Sizes of the mesh axes; axes that are not given have size 1. Immutable, hashable, equal by
    value.

    Iteration covers the axes larger than 1, outermost first; indexing knows all six.
    """

    __slots__ = ("_sizes",)
    _sizes: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | Iterable[tuple[str, int]] = (), /, **axes: int):
        given: dict[str, int] = {}
        failures: list[str] = []
        for name, size in [*dict(sizes).items(), *axes.items()]:
            canonical = mesh_axis(name)
            if canonical in given:
                failures.append(f"{name!r} names the mesh axis {canonical!r} a second time")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                failures.append(
                    f"mesh axis {name!r} has size {size!r}; sizes are integers of at least 1"
                )
            given[canonical] = size
        if failures:
            raise_all(PinError, "the mesh is not usable", failures)
        object.__setattr__(self, "_sizes", tuple(given.get(axis, 1) for axis in MESH_AXES))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("MeshShape is immutable")

    def __getitem__(self, axis: str) -> int:
        return self._sizes[MESH_AXES.index(axis)] if axis in MESH_AXES else self._unknown(axis)

    def _unknown(self, axis: str) -> int:
        raise KeyError(axis)

    def __contains__(self, axis: object) -> bool:
        return axis in MESH_AXES and self[str(axis)] > 1

    def __iter__(self) -> Iterator[str]:
        return (axis for axis, size in zip(MESH_AXES, self._sizes, strict=True) if size > 1)

    def __len__(self) -> int:
        return sum(size > 1 for size in self._sizes)

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self._sizes == other._sizes

    def __reduce__(self) -> tuple[type[MeshShape], tuple[dict[str, int]]]:
        return MeshShape, (dict(self),)

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self._sizes)

    def ways(self, axes: Iterable[str]) -> int:
        """Number of parts that a dim cut over `axes` has."""
        return math.prod(self[axis] for axis in axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={self[axis]}" for axis in self) or "one device"

    def __repr__(self) -> str:
        return f"MeshShape({', '.join(f'{axis}={self[axis]}' for axis in self)})"
