"""Rates of this machine's simulated devices.

`measured_cpu` runs four small programs on the local CPU devices, all of them busy at once, and
returns a `Topology` with the measured figures in place of the catalogue's static ones. It takes a
few seconds once; the figures are kept as JSON in the user's cache folder (`SHARDLIB_CACHE_DIR` if
set), one file for each processor, core count, JAX version and device count.

Nothing runs, and JAX starts no backend, before the first call.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import MissingFileError, TopologyError
from shardlib.hardware.catalog import CPU
from shardlib.hardware.chip import LARGEST, Chip
from shardlib.hardware.topology import Topology, topology
from shardlib.processes.agreement import of_first
from shardlib.processes.devices import let_collectives_wait
from shardlib.untrusted import Limits, read_json

#: Version of the cached figures; a change of the method makes old files stale.
FORMAT = 2
#: Files of the cache are short.
CACHED = Limits(bytes=1 << 16, depth=4)
# rows, columns and depth of each device's product: 0.27 GFLOP, large enough for the matmul
# library's best kernels
MATMUL = 512
#: float32 elements that each device reads and writes: 16 MiB, more than a core's share of the
#: caches.
STREAM = 1 << 22
PASSES = 6  # times that it does so in one program
MESSAGE = 1 << 19  # float32 elements of the large all-reduce: 2 MiB
CHAIN = 16  # collectives in one program, so that the dispatch of the program does not count
TINY_OPS = 256  # tiny ops in one program


def measured_cpu(devices: int, refresh: bool = False) -> Topology:
    """The topology of `devices` simulated CPU devices on this machine, as measured.

    Where JAX has fewer local CPU devices than asked for, those that exist are measured and their
    compute and memory rates are divided among the devices asked for, since they share the same
    cores. One device exchanges with nobody: the catalogue's static link figures stay. A cache
    folder that cannot be written costs a measurement in every process. Of processes that have
    joined each other, the first measures for all.

    Args:
        devices: number of devices of the topology, at least 1.
        refresh: measure again even where the cache has figures.

    Returns:
        A topology named "cpu:<devices>".

    Raises:
        TopologyError: `devices` is less than 1.
    """
    if devices < 1:
        raise TopologyError(f"measured_cpu(devices={devices}) needs at least one device")
    let_collectives_wait()
    local = jax.local_devices(backend="cpu")[:devices]
    # Every process would measure a little differently, and then plan differently.
    figures = json.loads(
        of_first(f"figures of cpu:{devices}", lambda: json.dumps(_figures(devices, local, refresh)))
    )
    return _topology(devices, len(local), figures)


def _figures(devices: int, local: Sequence[Any], refresh: bool) -> dict[str, float]:
    path = cache_path(devices, len(local))
    figures = None if refresh else _read_cache(path)
    if figures is None:
        figures = _measure(local)
        _write_cache(path, figures)
    return figures


def cache_path(devices: int, local: int) -> Path:
    """The file that keeps the figures of `devices` devices measured on `local` ones.

    Args:
        devices: of the topology.
        local: devices that were there to measure.
    """
    folder = os.environ.get("SHARDLIB_CACHE_DIR") or platformdirs.user_cache_dir(
        "shardlib", appauthor=False
    )
    key = [FORMAT, _cpu_model(), _cores(), jax.__version__, devices, local]
    return Path(folder) / f"cpu-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    sizes = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        else []
    )
    with contextlib.suppress(OSError, ValueError):  # no control groups, or the word "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=8 * CPU.chip.hbm_bytes)


def _read_cache(path: Path) -> dict[str, float] | None:
    """The figures of a cache file; None when there is none, or none that a run could have
    written.
    """
    try:
        figures = read_json(path, "measured figures", TopologyError, limits=CACHED)
    except (MissingFileError, TopologyError):
        return None
    if not isinstance(figures, dict):
        return None
    given = cast("dict[str, Any]", figures)
    found = {
        name: float(value)
        for name in FIGURES
        if isinstance(value := given.get(name), int | float)
        and not isinstance(value, bool)
        and 0 < value < LARGEST
    }
    return found if len(found) == len(FIGURES) else None


def _write_cache(path: Path, figures: dict[str, float]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(
            json.dumps({**figures, "cpu": _cpu_model(), "jax": jax.__version__}, indent=1),
            encoding="utf-8",
        )
        draft.replace(path)  # another process never reads half a file


#: What is measured, per device with all devices busy.
FIGURES: tuple[str, ...] = (
    "float32_flops_per_s",
    "bfloat16_flops_per_s",
    "memory_bytes_per_s",
    "launch_s",
    "latency_s",
    "link_bytes_per_s",
)


def _measure(devices: Sequence[Any]) -> dict[str, float]:
    """Runs every measurement on JAX devices."""
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    latency_s, link_bytes_per_s = _all_reduce(mesh)
    return {
        "float32_flops_per_s": _matmul(mesh, jnp.float32),
        "bfloat16_flops_per_s": _matmul(mesh, jnp.bfloat16),
        "memory_bytes_per_s": _stream(mesh),
        "launch_s": _tiny_ops(mesh),
        "latency_s": latency_s,
        "link_bytes_per_s": link_bytes_per_s,
    }


def _best_seconds(
    call: Callable[..., jax.Array], *operands: jax.Array, budget_s: float = 0.5
) -> float:
    """The fastest of several runs: other work on the machine only ever slows a run down."""
    call(*operands).block_until_ready()  # compiles
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call(*operands).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def _sharded(mesh: Mesh, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Ones whose leading dim is sharded over all devices."""
    return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=NamedSharding(mesh, P("all")))()


def _matmul(mesh: Mesh, dtype: Any) -> float:
    rows = _sharded(mesh, mesh.size, MATMUL, MATMUL, dtype=dtype)
    product = jax.jit(lambda a: jnp.einsum("dij,djk->dik", a, a))
    return 2 * MATMUL**3 / _best_seconds(product, rows)


def _stream(mesh: Mesh) -> float:
    """Bytes read and written a second, over and over in one buffer: a fresh one each time would
    measure page faults.
    """

    def body(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PASSES, lambda _, b: b * 0.5 + 1.0, a)

    local = jax.shard_map(body, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    return (
        PASSES * 2 * 4 * STREAM / _best_seconds(jax.jit(local), _sharded(mesh, mesh.size, STREAM))
    )


def _tiny_ops(mesh: Mesh) -> float:
    """Seconds of one op that has next to nothing to do: a step of a loop over 8x8 products."""

    def body(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0, TINY_OPS, lambda _, b: jnp.einsum("dij,djk->dik", b, b) * 0.1, a
        )

    local = jax.shard_map(body, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    return _best_seconds(jax.jit(local), _sharded(mesh, mesh.size, 8, 8)) / TINY_OPS


def _all_reduce(mesh: Mesh) -> tuple[float, float]:
    """(latency, bytes/s of a device): the inverse of how `shardlib.cost.machine.collectives` prices
    an all-reduce in memory.
    """
    ways = mesh.size
    if ways == 1:
        return CPU.fast.latency_s, CPU.fast.bytes_per_s

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            a = jax.lax.psum(a, "all") * (1 / ways)
        return a

    reduce = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    )
    small, large = (
        _best_seconds(reduce, _sharded(mesh, ways, size)) / CHAIN for size in (16, MESSAGE)
    )
    per_byte = max(large - small, large / 10) / (
        4 * MESSAGE
    )  # a noisy small run must not make the links look infinitely fast
    return small, 2 * (ways - 1) / ways / per_byte


def _topology(devices: int, local: int, figures: dict[str, float]) -> Topology:
    share = local / devices
    chip = Chip(
        name="cpu",
        vendor="cpu",
        hbm_bytes=max(1, _memory_bytes() // devices),
        hbm_bytes_per_s=figures["memory_bytes_per_s"] * share,
        flops_per_s=(
            ("float32", figures["float32_flops_per_s"] * share),
            ("bfloat16", figures["bfloat16_flops_per_s"] * share),
        ),
        launch_s=figures["launch_s"],
        sources=(
            f"measured on {_cpu_model()}, {_cores()} cores, {local} devices, JAX {jax.__version__}",
        ),
    )
    static = topology(f"cpu:{devices}")
    tier = static.tiers[0]
    if local > 1:
        tier = replace(
            tier,
            bytes_per_s=figures["link_bytes_per_s"],
            latency_s=figures["latency_s"],
            sources=chip.sources,
        )
    return Topology(name=static.name, chip=chip, tiers=(tier,))
