"""Replica groups and permutation pairs of collectives, and the mesh axes that they lie along.

XLA writes groups of devices in three forms; numbers are positions on the mesh, the first axis
major:

>>> replica_groups("{{0,1},{2,3}}", 4).tolist()
[[0, 1], [2, 3]]
>>> replica_groups("[2,2]<=[2,2]T(1,0)", 4).tolist()
[[0, 2], [1, 3]]
>>> replica_groups("mesh['a'=2,'b'=2] {'a'}", 4).tolist()
[[0, 2], [1, 3]]
>>> axes_of_groups(replica_groups("[2,2]<=[2,2]T(1,0)", 4), MeshShape(data=2, tensor=2))
('data',)
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.verification.hlo.shapes import HloError

Groups = NDArray[np.int64]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{([^}]*)\}$")
_IDS = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_AXIS = re.compile(r"^'?(.*?)'?(?::\((\d+)\)(\d+))?$")


def replica_groups(text: str, devices: int) -> Groups:
    """Groups as integers [groups, members]; an empty list means everyone."""
    compact = text.strip()
    if compact in ("", "{}"):
        groups = np.arange(devices, dtype=np.int64)[None]
    elif compact.startswith("{{"):
        groups = _explicit(compact)
    elif compact.startswith("["):
        groups = _iota(compact)
    elif compact.startswith("mesh["):
        groups = _mesh(compact)
    else:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < devices:
        raise HloError(
            f"replica groups {text[:80]!r} name devices beyond the {devices} of the program"
        )
    return groups


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def _explicit(text: str) -> Groups:
    rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
    if not rows or len({len(row) for row in rows}) != 1:
        raise HloError(f"replica groups {text[:80]!r} differ in size")
    return np.array(rows, np.int64)


def _iota(text: str) -> Groups:
    match = _IOTA.match(text.replace(" ", ""))
    if not match:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    dims, shape, order = _numbers(match[1]), _numbers(match[2]), _numbers(match[3] or "")
    if (
        len(dims) != 2
        or math.prod(dims) != math.prod(shape)
        or (order and sorted(order) != list(range(len(shape))))
    ):
        raise HloError(f"replica groups {text[:80]!r} do not fit together")
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return (numbers.transpose(order) if order else numbers).reshape(dims)


def _mesh(text: str) -> Groups:
    """Groups along axes of a mesh; an axis may be a part of one, `'x':(2)4` is the part of size 4
    with 2 outside of it.
    """
    match = _MESH.match(text)
    if not match:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    sizes = {
        name.strip().strip("'"): int(size)
        for name, _, size in (part.rpartition("=") for part in match[1].split(",") if part)
    }
    ids = _device_ids(match[2], math.prod(sizes.values()))
    cuts: dict[str, list[tuple[int, int]]] = {}
    named: list[tuple[str, int]] = []
    for word in (part.strip() for part in match[3].split(",") if part.strip()):
        axis = _AXIS.match(word)
        if not axis or axis[1] not in sizes:
            raise HloError(f"replica groups {text[:80]!r} name the unknown axis {word}")
        outside, size = (int(axis[2]), int(axis[3])) if axis[2] else (1, sizes[axis[1]])
        cuts.setdefault(axis[1], []).append((outside, size))
        named.append((axis[1], outside))
    shape, place = [], {}
    for name, size in sizes.items():
        done = 1
        for outside, ways in sorted(cuts.get(name, [])):
            shape += [outside // done, ways]
            place[name, outside] = len(shape) - 1
            done = outside * ways
        shape.append(size // done)
    if math.prod(shape) != ids.size:
        raise HloError(f"replica groups {text[:80]!r} do not fit together")
    inner = [place[key] for key in named]
    outer = [i for i in range(len(shape)) if i not in inner]
    return (
        ids.reshape(shape).transpose(*outer, *inner).reshape(-1, math.prod(shape[i] for i in inner))
    )


def _device_ids(text: str | None, devices: int) -> Groups:
    """The device at each place of a mesh: counted, counted through transposed dims `[4,2]T(1,0)`,
    or listed.
    """
    if not text:
        return np.arange(devices, dtype=np.int64)
    counted = _IDS.match(text.replace(" ", ""))
    if not counted:
        return np.array(_numbers(text.strip("[]{}")), np.int64)
    shape, order = _numbers(counted[1]), _numbers(counted[2] or "")
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return (numbers.transpose(order) if order else numbers).reshape(-1)


def source_target_pairs(text: str, devices: int) -> Groups:
    """Pairs as integers [pairs, 2], those to oneself left out."""
    rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
    if not rows or any(len(row) != 2 or max(row) >= devices for row in rows):
        raise HloError(f"source-target pairs {text[:80]!r} are not pairs of the {devices} devices")
    pairs = np.array(rows, np.int64)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def axes_of_groups(groups: Groups, mesh: MeshShape) -> tuple[str, ...] | None:
    """The mesh axes that groups span; None where they are no product of axes.

    A group that spans a part of one axis (one physical sub-axis of fsdp) belongs to that axis.

    Args:
        groups: numbers of devices, int [groups, members].
    """
    varying = _varying(groups, mesh)
    covered = groups.shape[1] == mesh.ways(varying)
    return varying if covered or len(varying) == 1 else None


def axes_of_pairs(pairs: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes along which pairs of devices differ.

    Args:
        pairs: numbers of devices, int [pairs, 2].
    """
    return _varying(pairs, mesh) if pairs.size else ()


def _varying(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """Axes whose coordinate differs inside some group."""
    sizes = tuple(mesh[axis] for axis in MESH_AXES)
    places = np.unravel_index(groups, sizes)
    return tuple(
        axis for axis, place in zip(MESH_AXES, places, strict=True) if (place != place[:, :1]).any()
    )
