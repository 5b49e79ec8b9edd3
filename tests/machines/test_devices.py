"""The topology of JAX devices: kinds by their names, domains by slice or process, boxes of a torus
by coordinates.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardlib.errors import TopologyError
from shardlib.machines.topology import spelling_of, topology


def gpus(kind: str, hosts: int, each: int, **more: Any) -> list[Any]:
    return [
        SimpleNamespace(platform="gpu", device_kind=kind, process_index=host, **more)
        for host in range(hosts)
        for _ in range(each)
    ]


def chips(kind: str, *shape: int, slices: int = 1, cores: int = 1, first: int = 0) -> list[Any]:
    return [
        SimpleNamespace(
            platform="tpu",
            device_kind=kind,
            process_index=0,
            slice_index=part,
            coords=[first + int(i) for i in np.unravel_index(number, shape)],
            core_on_chip=core,
        )
        for part in range(slices)
        for number in range(math.prod(shape))
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    ("devices", "spelling"),
    [
        (gpus("NVIDIA H100 80GB HBM3", 1, 8), "h100:8"),
        (gpus("NVIDIA H100 80GB HBM3", 4, 8), "4*h100:8"),
        (gpus("NVIDIA H200", 1, 1), "h200:1"),
        (gpus("NVIDIA A100-SXM4-40GB", 2, 4), "2*a100-40gb:4"),
        (gpus("NVIDIA A100-SXM4-80GB", 1, 8), "a100:8"),
        (gpus("NVIDIA GB200", 18, 4, slice_index=0), "gb200:72"),
        (chips("TPU v5 lite", 4, 4, 1), "v5e:4x4"),
        (chips("TPU v5 lite", 4, 4, 1, slices=2, first=4), "2*v5e:4x4"),
        (chips("TPU v5", 2, 2, 4), "v5p:2x2x4"),
        (chips("TPU v4", 2, 2, 1), "v4:2x2x1"),
        (chips("TPU v6 lite", 2, 4, 1), "v6e:2x4"),
        (chips("TPU7x", 2, 2, 2, cores=2), "tpu7x:2x2x2"),
    ],
)
def test_devices_are_a_topology_of_the_catalogue(devices: list[Any], spelling: str) -> None:
    assert spelling_of(devices) == spelling
    machine = topology(devices)
    assert machine == topology(spelling) and machine.devices == len(devices)
    grid = np.array(devices, dtype=object).reshape(-1, 1)
    assert topology(SimpleNamespace(axis_names=("a", "b"), devices=grid)) == machine  # a mesh


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            gpus("NVIDIA H200", 1, 2) + gpus("NVIDIA H100 80GB HBM3", 1, 2),
            "topology is 2 of NVIDIA H100 80GB HBM3, 2 of NVIDIA H200\nTry: devices of one kind",
        ),
        (
            gpus("NVIDIA L4", 1, 2),
            "topology is 2 of 'NVIDIA L4', which the catalogue does not have\nTry: name it, one of"
            " v4, v5e, v5p, v6e, tpu7x, a100, a100-40gb, h100, h200, b200, gb200, cpu, or a .toml"
            " file",
        ),
        (
            gpus("NVIDIA H200", 2, 4)[:6],
            "topology is 6 of 'NVIDIA H200' in 2 unlike parts: 2, 4\nTry: as many devices of every"
            " one",
        ),
        (
            chips("TPU v5 lite", 4, 4, 1)[:5],
            "topology is 5 chips of v5e that are not a whole box: their coordinates span 2x4x1\nTry:"
            " all chips of a box",
        ),
        (
            [gpus("NVIDIA H200", 1, 1)[0]] * 2,
            "topology names a device twice\nTry: every device once",
        ),
        (
            SimpleNamespace(axis_names=("x",), devices=None),
            "topology is of type SimpleNamespace, which has no devices\nTry: a jax.sharding.Mesh, or a"
            ' spelling such as topology="v5e:16x16"',
        ),
        (
            [],
            "topology is [] of type list; give a spelling like 'cpu:8', 'h100:8', '16*h100:8',"
            " 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16', or a path to a .toml file, a Topology, a"
            " jax.sharding.Mesh, or a list of devices",
        ),
    ],
)
def test_devices_that_are_no_machine_are_told(spec: Any, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        topology(spec)
    assert str(caught.value) == message
