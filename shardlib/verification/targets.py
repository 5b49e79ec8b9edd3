"""The machine that a compiler compiles for, and where its devices sit on the mesh.

A `Target` is plain data, made without JAX, and travels to the process that compiles; only
`compile_devices`, which runs there, loads a compiler.

>>> from shardlib.hardware import topology
>>> from shardlib.axes import MeshShape
>>> target(topology("2*v5e:4x4"), MeshShape(data=2, fsdp=16)).name
'v5e:4x4'
>>> target(topology("16*h100:8"), MeshShape(data=16, tensor=8)).name
'1x16x8'
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlib.axes import MeshShape
from shardlib.errors import MissingPackageError, TopologyError
from shardlib.hardware.placement import device_order
from shardlib.hardware.slices import slice_of
from shardlib.hardware.topology import Topology
from shardlib.untrusted.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    import jax

#: Chips whose two TensorCores form one device only when libtpu is told so (as the catalogue counts
#: them).
MEGACORE: Mapping[str, str] = {"v4": "megacore"}
#: What JAX calls the compiler of a chip's vendor.
PLATFORMS: Mapping[str, str] = {"google": "tpu", "nvidia": "cuda", "cpu": "cpu"}
GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine in the words of a compiler.

    Attributes:
        platform: "tpu", "cuda" or "cpu", as JAX says it.
        name: what the compiler calls the topology: "v5e:16x16", or "slices x hosts x GPUs".
        slices: TPU slices joined by the data-centre network.
        spec: description of the GPU as a text proto; empty elsewhere.
        devices: devices of the whole topology.
        order: the device at each place of the mesh, first axis major; on a TPU (slice, x, y, z,
            core), elsewhere (number,).
        flops_per_cycle: dense bfloat16 FLOPs that the matrix units of one device do in a cycle; 0
            where cycles are not estimated.
        peak_flops_per_s: of one device in bfloat16.
        usable_bytes: memory that a program can have.
    """

    platform: str
    name: str
    slices: int = 1
    spec: str = ""
    devices: int
    order: tuple[tuple[int, ...], ...]
    flops_per_cycle: float = 0.0
    peak_flops_per_s: float
    usable_bytes: int

    @property
    def cycles_per_s(self) -> float:
        """Clock of the matrix units; 0 where it is not known."""
        return self.peak_flops_per_s / self.flops_per_cycle if self.flops_per_cycle else 0.0

    @property
    def positions(self) -> list[list[int]]:
        """Mesh positions of the devices of each TPU slice; one list of all elsewhere."""
        if self.slices == 1:
            return [list(range(len(self.order)))]
        used = sorted({place[0] for place in self.order})
        return [[i for i, place in enumerate(self.order) if place[0] == number] for number in used]

    def to_json(self) -> JsonObject:
        """The target as plain data."""
        return {**self.__dict__, "order": [list(place) for place in self.order]}

    @classmethod
    def from_json(cls, data: JsonMapping) -> Target:
        """Reads what `to_json` wrote."""
        return cls(**{**data, "order": tuple(tuple(place) for place in data["order"])})


#: Multiply-adds of the matrix units of one JAX device in a cycle, times two (jax-ml/scaling-book
#: tpus.md: MXUs of 128x128, 256x256 since v6e, four of them a TensorCore; v4 and v5p have two
#: TensorCores a device). With the peak rate they give the clock: 1.05, 1.5, 1.75 GHz.
TPU_FLOPS_PER_CYCLE: Mapping[str, float] = {
    "v4": 2 * 4 * 128 * 128 * 2,
    "v5e": 4 * 128 * 128 * 2,
    "v5p": 2 * 4 * 128 * 128 * 2,
    "v6e": 4 * 256 * 256 * 2,
    "tpu7x": 4 * 256 * 256 * 2,
}


def target(topology: Topology, mesh: MeshShape, axes: tuple[str, ...] = ()) -> Target:
    """Says a topology in the words of its compiler."""
    part = slice_of(topology, mesh.devices)
    if part is not None:
        return target(part, mesh, axes)
    order = device_order(mesh, topology, axes)
    if order is None:
        raise TopologyError(
            f"the mesh {mesh} has {mesh.devices} devices and does not fit {topology.name}, which"
            f" has {topology.devices}"
        )
    numbers = order.reshape(-1)
    make = {"google": _tpu, "nvidia": _gpu, "cpu": _cpu}[topology.chip.vendor]
    return make(topology, numbers)


def _cpu(topology: Topology, numbers: np.ndarray) -> Target:
    return Target(
        platform="cpu",
        name=topology.name,
        devices=topology.devices,
        order=_single(numbers),
        usable_bytes=topology.chip.usable_bytes,
        peak_flops_per_s=topology.chip.peak("float32"),
    )


def _single(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple((int(number),) for number in numbers)


def _gpu(topology: Topology, numbers: np.ndarray) -> Target:
    chip = topology.chip
    spec = resources.files("shardlib.verification") / "gpu_specs" / f"{chip.name}.txtpb"
    if not spec.is_file():
        described = sorted(
            file.name.removesuffix(".txtpb")
            for file in (resources.files("shardlib.verification") / "gpu_specs").iterdir()
        )
        raise TopologyError(
            f"there is no device description of the GPU {chip.name!r} of {topology.name}; described"
            f" are {', '.join(described)}"
        )
    inner = topology.tiers[-1].devices
    return Target(
        platform="cuda",
        name=f"1x{topology.devices // inner}x{inner}",
        spec=spec.read_text(encoding="utf-8"),
        devices=topology.devices,
        order=_single(numbers),
        usable_bytes=chip.usable_bytes,
        peak_flops_per_s=chip.peak("bfloat16"),
    )


def _tpu(topology: Topology, numbers: np.ndarray) -> Target:
    chip, tiers = topology.chip, list(topology.tiers)
    if chip.name not in TPU_FLOPS_PER_CYCLE:
        raise TopologyError(
            f"the TPU compiler does not know the chip {chip.name!r} of {topology.name}; it knows"
            f" {', '.join(TPU_FLOPS_PER_CYCLE)}"
        )
    torus = [i for i, tier in enumerate(tiers) if tier.kind == "torus"]
    if len(torus) != 1 or len(tiers[torus[0]].shape) > 3:
        raise TopologyError(
            f"the TPU compiler wants one torus of 2 or 3 dims, {topology.name} has"
            f" {[tier.kind for tier in tiers]}"
        )
    shape = tiers[torus[0]].shape
    slices = math.prod(tier.devices for tier in tiers[: torus[0]])
    cores = math.prod(tier.devices for tier in tiers[torus[0] + 1 :])
    places = np.stack(
        np.unravel_index(numbers, (slices, *shape, *(1,) * (3 - len(shape)), cores)), axis=-1
    )
    return Target(
        platform="tpu",
        name=f"{chip.name}:{'x'.join(map(str, shape))}",
        slices=slices,
        devices=topology.devices,
        order=tuple(tuple(int(i) for i in place) for place in places),
        flops_per_cycle=TPU_FLOPS_PER_CYCLE[chip.name],
        peak_flops_per_s=chip.peak("bfloat16"),
        usable_bytes=chip.usable_bytes,
    )


def require_compiler(platform: str) -> None:
    """Checks that the packages of a compiler are installed, without loading them."""
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingPackageError(
            "the TPU compiler is not installed: there is no package libtpu\nTry: pip install"
            " 'shardlib[tpu]'  (or: pip install libtpu)"
        )
    if platform == "cuda" and not any(importlib.util.find_spec(name) for name in GPU_PLUGINS):
        raise MissingPackageError(
            f"the GPU compiler is not installed: there is neither of {' and '.join(GPU_PLUGINS)}\n"
            "Try: pip install 'shardlib[gpu]'"
        )


def environment(platform: str, devices: int) -> dict[str, str]:
    """Environment variables that a compiling process needs before JAX is imported."""
    common = {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }  # a cache entry cannot be read back without a device
    if platform == "tpu":
        return {
            **common,
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "1",
            "XLA_FLAGS": "",
        }
    if platform == "cuda":
        return {
            "JAX_PLATFORMS": "",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        }
    return {**common, "JAX_NUM_CPU_DEVICES": str(devices)}


def compile_devices(target: Target) -> list[jax.Device]:
    """The devices of a target in mesh order; loads the compiler."""
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        devices, key = list(jax.devices("cpu")), _number
    elif target.platform == "cuda":
        jax.devices("cpu")  # lets JAX discover its plugins before the topology is asked for
        devices, key = (
            topologies.get_topology_desc(
                "", platform="cuda", target_config=target.spec, topology=target.name
            ).devices,
            _number,
        )
    else:
        options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
        if target.name.split(":")[0] in MEGACORE:
            options["chip_config_name"] = MEGACORE[target.name.split(":")[0]]
        devices, key = (
            topologies.get_topology_desc(
                platform="tpu", topology_name=target.name, **options
            ).devices,
            _tpu_key,
        )
    by_key = {key(i, device): device for i, device in enumerate(devices)}
    missing = [place for place in target.order if place not in by_key]
    if missing or (len(devices) != target.devices and target.platform != "cpu"):
        raise TopologyError(
            f"the {target.platform} compiler makes {len(devices)} devices of {target.name!r}, the"
            f" catalogue {target.devices}"
        )
    return [by_key[place] for place in target.order]


def _number(i: int, device: jax.Device) -> tuple[int, ...]:
    return (i,)


def _tpu_key(i: int, device: Any) -> tuple[int, ...]:
    return (getattr(device, "slice_index", 0), *device.coords, device.core_on_chip)
