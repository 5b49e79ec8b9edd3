"""Replica groups: the three forms say the same, and groups along axes are recognised on every mesh
of eight devices.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardlib.layout import INNER_AXES, MeshShape
from shardlib.verification.hlo import (
    HloError,
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)

SIZES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=6) if np.prod(sizes) == 8]


def along(mesh: MeshShape, axes: tuple[str, ...]) -> np.ndarray:
    """Groups along axes, by grouping devices whose other coordinates agree."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(mesh[axis]) for axis in INNER_AXES))):
        groups.setdefault(
            tuple(i for i, axis in zip(place, INNER_AXES, strict=True) if axis not in axes), []
        ).append(device)
    return np.array(list(groups.values()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_along_axes_are_recognised_in_every_form(sizes: tuple[int, ...]):
    mesh = MeshShape(zip(INNER_AXES, sizes, strict=True))
    for count in range(1, len(list(mesh)) + 1):
        for axes in itertools.combinations(list(mesh), count):
            groups = along(mesh, axes)
            explicit = (
                "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in groups.tolist()) + "}"
            )
            named = (
                "mesh["
                + ",".join(f"'{axis}'={mesh[axis]}" for axis in INNER_AXES)
                + "] {"
                + ",".join(f"'{axis}'" for axis in axes)
                + "}"
            )
            order = [i for i, axis in enumerate(INNER_AXES) if axis not in axes] + [
                i for i, axis in enumerate(INNER_AXES) if axis in axes
            ]
            iota = f"[{groups.shape[0]},{groups.shape[1]}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
            for text in (explicit, named, iota):
                assert replica_groups(text, 8).tolist() == groups.tolist(), text
            assert axes_of_groups(groups, mesh) == axes


def test_parts_of_an_axis_belong_to_it_and_mixtures_to_nobody():
    mesh = MeshShape(data=2, fsdp=4)
    assert axes_of_groups(replica_groups("mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}", 8), mesh) == (
        "fsdp",
    )
    assert replica_groups("mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", 8).tolist() == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]
    assert axes_of_groups(np.array([[0, 5], [1, 4], [2, 7], [3, 6]]), mesh) is None
    assert axes_of_groups(replica_groups("{}", 8), mesh) == ("data", "fsdp")


def test_device_numbers_of_a_mesh():
    text = "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_0'}"
    assert replica_groups(text, 8).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert replica_groups("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4).tolist() == [
        [3, 1],
        [2, 0],
    ]


def test_pairs():
    mesh = MeshShape(stage=2, tensor=4)
    ring = source_target_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 8)
    assert axes_of_pairs(ring, mesh) == ("tensor",)
    assert axes_of_pairs(source_target_pairs("{{0,4},{4,0},{1,1}}", 8), mesh) == ("stage",)


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1},{2}}",
        "[2,3]<=[8]",
        "[2,4]<=[2,4]T(0,0)",
        "{{0,9},{1,2}}",
        "mesh['a'=2] {'b'}",
        "mesh['a'=3,'b'=3] {'b'}",
        "V9(0,1)",
        "{{}}",
    ],
)
def test_groups_that_make_no_sense_are_refused(text: str):
    with pytest.raises(HloError):
        replica_groups(text, 8)


@pytest.mark.parametrize("text", ["", "{{0,1,2}}", "{{0,8}}"])
def test_pairs_that_make_no_sense_are_refused(text: str):
    with pytest.raises(HloError):
        source_target_pairs(text, 8)
