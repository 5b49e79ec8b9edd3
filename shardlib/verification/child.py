"""The process that compiles: `python -m shardlib.verification.child FOLDER`.

Reads `job.json` and `program.bin` from the folder and leaves `result.json` and `compiled.hlo`
there; an abort of the compiler ends this process and no other.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlib.errors import TopologyError
from shardlib.untrusted.data import JsonObject
from shardlib.verification.isolation import Target

if TYPE_CHECKING:
    import jax


def main(folder: Path, run: Callable[[Path], JsonObject]) -> None:
    """Runs the job of a folder, and writes what it returns or raises there."""
    try:
        result = run(folder)
    except Exception as error:
        result = {"error": {"kind": type(error).__name__, "message": str(error)}}
    draft = folder / "result.json.tmp"
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.replace(folder / "result.json")


#: Chips whose two TensorCores form one device only when libtpu is told so (as the catalogue counts
#: them).
MEGACORE: Mapping[str, str] = {"v4": "megacore"}


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


def compile_job(folder: Path) -> JsonObject:
    """Compiles the program of a folder and writes its text there; returns what else is worth
    knowing.
    """
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from shardlib._jax_compat import compiled_memory

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    exported = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    devices = compile_devices(Target.from_json(job["target"]))
    names, sizes = zip(*job["mesh"], strict=True)
    mesh = Mesh(
        np.array(devices, dtype=object).reshape(sizes),
        names,
        axis_types=(AxisType.Auto,) * len(names),
    )

    def sharding(spec: list[list[str]], kind: str = "") -> NamedSharding:
        return NamedSharding(
            mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)), memory_kind=kind or None
        )

    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding(spec, kind))
        for aval, spec, kind in zip(
            exported.in_avals, job["in_specs"], job["in_kinds"], strict=True
        )
    ]
    results = (
        tuple(
            sharding(spec, kind)
            for spec, kind in zip(job["out_specs"], job["out_kinds"], strict=True)
        ),
        sharding([]),
    )
    step = jax.jit(
        exported.call, donate_argnums=tuple(range(job["donated"])), out_shardings=results
    )
    start = time.perf_counter()
    compiled = step.lower(*arguments).compile(compiler_options=job.get("options") or None)
    seconds = time.perf_counter() - start
    (folder / "compiled.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    return {
        "compile_seconds": seconds,
        "memory": compiled_memory(compiled, offloaded=any(job["in_kinds"])),
        "device_kind": devices[0].device_kind,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    from importlib import metadata

    versions: dict[str, str] = {}
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    main(Path(sys.argv[1]), compile_job)
