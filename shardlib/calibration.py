"""Measured rates of this machine's simulated devices, and their cache.

`measured_cpu` runs small programs on the local CPU devices, on all of them at once, and returns a
`Topology` with the measured figures in place of the catalogue's. Figures are per device with all
devices in use: N devices on C cores have together the FLOP/s of C cores, and a device that computes
alone is as fast as XLA makes it (`Topology.alone`).

The measurement takes a few seconds; the figures are stored as JSON in the user's cache folder
(`SHARDLIB_CACHE_DIR` if set), one file per processor, core count, JAX version and number of
devices. Nothing runs, and JAX starts no backend, before the first call.

>>> [name for name in figure_names(4) if name.startswith("all-reduce")]
['all-reduce.2.s', 'all-reduce.2.s_per_byte', 'all-reduce.4.s', 'all-reduce.4.s_per_byte']
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from shardlib.errors import MissingFileError, TopologyError
from shardlib.layout import KINDS
from shardlib.machines.catalog import CPU
from shardlib.machines.chips import LARGEST, Chip, Exchange, Tier
from shardlib.machines.topology import Topology, topology
from shardlib.processes.devices import let_collectives_wait
from shardlib.processes.values import of_first
from shardlib.untrusted.data import Limits, read_json

#: Seconds for which a program is repeated.
BUDGET_S = 0.15
#: Minimum number of runs, regardless of their time.
RUNS = 3


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quiet_seconds(
    walls: Sequence[float], processor: Sequence[float], *, cores: int, all_busy: bool
) -> float:
    """Seconds of a program without the influence of other processes.

    Other processes only ever slow a run down, so the fastest of several runs counts. If a program
    keeps all cores busy, its processor time over the cores is its time on an idle machine;
    otherwise processor time is too low.

    >>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=True)
    0.2
    >>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=False)
    0.3

    Args:
        walls: seconds of each run.
        processor: processor seconds of each run, summed over the cores.
    """
    if not all_busy:
        return min(walls)
    return min(min(walls), sorted(processor)[len(processor) // 4] / cores)


def seconds_of(
    call: Callable[..., object], *operands: jax.Array, devices: int, budget_s: float = BUDGET_S
) -> float:
    """Seconds of a call that is already compiled."""
    jax.block_until_ready(call(*operands))
    walls: list[float] = []
    processor: list[float] = []
    end = time.perf_counter() + budget_s
    while len(walls) < RUNS or time.perf_counter() < end:
        start, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(call(*operands))
        walls.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return quiet_seconds(walls, processor, cores=cores(), all_busy=devices >= cores())


#: Version of the cached figures; increased with the method, so that old files are ignored.
FORMAT = 5
#: Maximum size of a cache file.
CACHED = Limits(bytes=1 << 16, depth=4)
#: Rates and times of kernels: large matmuls and convolutions, forward and backward; the depth of a
#: matmul that takes as long as starting one of its blocks; the share of the matmul rate that many
#: small matmuls of one kernel reach; the speed-up of a device over one core; bytes and elements of
#: element-wise ops; bytes of untouched memory, of an optimizer update, and of gathers and scatters
#: of rows; fixed seconds of an op and of a program; and the speed-up of a device while the others
#: idle.
KERNELS: tuple[str, ...] = (
    "float32_flops_per_s",
    "bfloat16_flops_per_s",
    "matmul_start",
    "batched",
    "cores",
    "convolution_flops_per_s",
    "memory_bytes_per_s",
    "elements_per_s",
    "transcendental_per_s",
    "fresh_bytes_per_s",
    "optimizer_bytes_per_s",
    "gather_bytes_per_s",
    "launch_s",
    "step_s",
    "alone",
)


def measured_ways(devices: int) -> tuple[int, ...]:
    """Numbers of participants of the measured collectives: two and all; others are interpolated.

    >>> measured_ways(1), measured_ways(2), measured_ways(8), measured_ways(6), measured_ways(3)
    ((), (2,), (2, 8), (2, 6), (3,))
    """
    return tuple(dict.fromkeys(n for n in (2, devices) if n > 1 and devices % n == 0))


def exchange_names(kind: str, degree: int) -> tuple[str, str]:
    """Names of the figures of a collective: seconds of the smallest, and seconds per byte of the
    full array.

    >>> exchange_names("all-gather", 8)
    ('all-gather.8.s', 'all-gather.8.s_per_byte')
    """
    return f"{kind}.{degree}.s", f"{kind}.{degree}.s_per_byte"


def figure_names(local: int) -> tuple[str, ...]:
    """Names of all figures of `local` devices."""
    return KERNELS + tuple(
        name
        for kind in KINDS
        for degree in measured_ways(local)
        for name in exchange_names(kind, degree)
    )


def cache_path(devices: int, local: int) -> Path:
    """The cache file of the figures of `devices` devices, measured on `local` devices."""
    folder = os.environ.get("SHARDLIB_CACHE_DIR") or platformdirs.user_cache_dir(
        "shardlib", appauthor=False
    )
    key = [FORMAT, cpu_model(), cores(), jax.__version__, devices, local]
    return Path(folder) / f"cpu-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def cpu_model() -> str:
    """The name of the processor according to the operating system."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def read_figures(path: Path, local: int) -> dict[str, float] | None:
    """The figures of a cache file; None if there is none, or if no run can have written it."""
    try:
        figures = read_json(path, "measured figures", TopologyError, limits=CACHED)
    except (MissingFileError, TopologyError):
        return None
    if not isinstance(figures, dict):
        return None
    stored, names = cast("dict[str, Any]", figures), figure_names(local)
    values = {
        name: float(value)
        for name in names
        if isinstance(value := stored.get(name), int | float)
        and not isinstance(value, bool)
        and 0 < value < LARGEST
    }
    return values if len(values) == len(names) else None


def write_figures(path: Path, figures: Mapping[str, float]) -> None:
    """Writes a cache file; does nothing if that is not possible."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(
            json.dumps({**figures, "cpu": cpu_model(), "jax": jax.__version__}, indent=1),
            encoding="utf-8",
        )
        draft.replace(path)  # another process never reads half a file


# --------------------------------------------------------------------------------------------------
# Collectives of simulated devices: a rendezvous of threads, and copies through shared memory.
#
# Figures are for all devices in use: groups of two are measured with every device in one of them.

#: float32 elements of the full array of a large collective: 2 MiB.
MESSAGE = 1 << 19
#: Elements of a shard of the smallest collective.
SMALL = 16
#: Collectives per program, so that the dispatch of the program does not matter.
CHAIN = 8


def exchange_figures(devices: Sequence[jax.Device]) -> dict[str, float]:
    """The figures of every kind of collective, measured by number of participants."""
    figures: dict[str, float] = {}
    for degree in measured_ways(len(devices)):
        grid = np.array(devices).reshape(-1, degree)
        mesh = Mesh(grid, ("groups", "along"), axis_types=(AxisType.Auto,) * 2)
        for kind in KINDS:
            seconds = [_seconds(mesh, kind, size) for size in (SMALL * degree * degree, MESSAGE)]
            figures |= dict(zip(exchange_names(kind, degree), line(*seconds), strict=True))
    return figures


def line(small: float, large: float) -> tuple[float, float]:
    """Seconds without bytes, and seconds per byte of the full array; at least some, even if the
    small run was slow by noise.

    Args:
        small: seconds of the smallest collective.
    """
    return small, max(large - small, large / 10) / (4 * MESSAGE)


def _seconds(mesh: Mesh, kind: str, elements: int) -> float:
    """Seconds of one collective whose full array has `elements` elements."""
    degree = mesh.shape["along"]
    step = _steps(degree)[kind]

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            a = step(a)
        return a

    size = elements // degree if kind == "all-gather" else elements // degree * degree
    sharding = NamedSharding(mesh, P(("groups", "along")))
    a = jax.jit(lambda: jnp.ones((mesh.size * size,), jnp.float32), out_shardings=sharding)()
    program = jax.jit(
        jax.shard_map(
            chain, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
    )
    return seconds_of(program, a, devices=mesh.size) / CHAIN


def _steps(degree: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """One collective of each kind, with a result of the shape of its operand."""
    ring = [(i, (i + 1) % degree) for i in range(degree)]

    def gather(a: jax.Array) -> jax.Array:
        return lax.dynamic_slice(lax.all_gather(a, "along", tiled=True), (0,), a.shape)

    def scatter(a: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(a, lax.psum_scatter(a, "along", tiled=True), (0,))

    def exchange(a: jax.Array) -> jax.Array:
        return lax.all_to_all(a.reshape(degree, -1), "along", 0, 0, tiled=True).reshape(-1)

    return {
        "all-gather": gather,
        "all-reduce": lambda a: lax.psum(a, "along"),
        "reduce-scatter": scatter,
        "all-to-all": exchange,
        "collective-permute": lambda a: lax.ppermute(a, "along", ring),
    }


# --------------------------------------------------------------------------------------------------
# Programs whose seconds are the figures of kernels.
#
# Each runs under `shard_map`, the same on all devices at once, on arrays of the size of a device's
# shard of a small model. Rates that include a pass over memory are found by difference.

#: Rows, columns and depth of a matmul: large enough for the matmul library's best kernels.
MATMUL = (512, 512, 256)
#: Batch, height and width, and channels of a convolution, 3x3.
IMAGES = (8, 16, 32)
#: float32 elements that a device reads and writes: 2 MiB, about those of a layer of a small model.
STREAM = 1 << 19
#: Additions and multiplications of the longer of two chains over the same elements.
PROGRAMS_CHAIN = 17
PASSES = 6
#: float32 elements of a chain that uses a single core.
SHORT = 1 << 15
#: Matmuls per kernel, and rows, columns and depth of each.
BATCHED = (16, 128, 128, 128)
#: Depths, and rows, of the matmuls that measure the start of a block.
DEPTHS = (32, 256)
TALL = 1024
#: Bytes of untouched memory; allocators map buffers of this size anew each time.
FRESH = 40 << 20
#: Rows of a table, elements of a row, and rows of a lookup.
TABLE = (1024, 128, 1024)
TINY_OPS = 256


def local_program(mesh: Mesh, body: Callable[..., object]) -> Callable[..., object]:
    """The jitted program in which every device runs `body` on its shards of all operands."""
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    )


def line_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with the single axis "all"."""
    return Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))


def per_device(mesh: Mesh, *shape: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Numbers near one with this shape per device, sharded along the leading dim."""
    full = (mesh.size * shape[0], *shape[1:])
    return jax.jit(
        lambda: jnp.full(full, 0.9, dtype), out_shardings=NamedSharding(mesh, P("all"))
    )()


def kernel_figures(mesh: Mesh) -> dict[str, float]:
    """All figures of kernels except `alone`, measured."""
    memory = PASSES * 8 * STREAM / _passes(mesh, lambda a: a * 0.5 + 0.5)
    streamed = STREAM / memory * 8
    start = _matmul_start(mesh, memory)
    chained, exponential = (
        _passes(mesh, body) / PASSES for body in (_chain, lambda a: jnp.exp(a * -0.5))
    )
    single = _matmul(mesh, jnp.float32, memory, start)
    return {
        "float32_flops_per_s": single,
        "batched": _batched(mesh, single, memory, start),
        "cores": _passes(mesh, _chain, SHORT) / SHORT * STREAM / (chained * PASSES),
        "bfloat16_flops_per_s": _matmul(mesh, jnp.bfloat16, memory, start),
        "matmul_start": start,
        "convolution_flops_per_s": _convolution(mesh),
        "memory_bytes_per_s": memory,
        "elements_per_s": STREAM * (PROGRAMS_CHAIN - 2) / max(chained - streamed, streamed / 16),
        "transcendental_per_s": STREAM / max(exponential - streamed, streamed / 16),
        "fresh_bytes_per_s": _fresh(mesh, memory),
        "optimizer_bytes_per_s": _optimizer(mesh),
        "gather_bytes_per_s": _gather(mesh),
        "launch_s": _tiny_ops(mesh),
        "step_s": seconds_of(
            local_program(mesh, lambda a: a + 1), per_device(mesh, 8), devices=mesh.size
        ),
    }


def speed_alone(devices: Sequence[jax.Device]) -> float:
    """Speed of a device on a block of a model while the others idle, over its speed while all
    compute: between 1 and the number of devices.
    """
    together, alone = (
        seconds_of(
            local_program(mesh, _block),
            per_device(mesh, 1024, 256),
            per_device(mesh, 256, 512),
            devices=mesh.size,
            budget_s=0.5,
        )
        for mesh in (line_of(devices), line_of(devices[:1]))
    )
    return min(max(together / alone, 1.0), float(len(devices)))


def _block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two matmuls, a sigmoid and a softmax, forward and backward."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(x @ w)
        return jnp.sum(jax.nn.softmax(hidden @ w.T) ** 2)

    dw, dx = jax.grad(loss, argnums=(0, 1))(w, x)
    return (jnp.sum(dw) + jnp.sum(dx))[None]


def _matmul(mesh: Mesh, dtype: DTypeLike, memory_bytes_per_s: float, start: float) -> float:
    """FLOP/s of a matmul forward and backward, without the passes over its operands and result and
    the starts of its blocks.
    """
    rows, columns, depth = MATMUL

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        product, back = jax.vjp(lambda x, w: x @ w, x, w)
        dx, dw = back(product)
        return (dx[:1, :1] + dw[:1, :1]).astype(jnp.float32)

    x, w = per_device(mesh, rows, depth, dtype=dtype), per_device(mesh, depth, columns, dtype=dtype)
    seconds = seconds_of(local_program(mesh, body), x, w, devices=mesh.size)
    moved = 3 * (rows * depth + depth * columns + rows * columns) * jnp.dtype(dtype).itemsize
    flops = 2 * rows * columns * depth * sum(1 + start / n for n in MATMUL)
    return flops / max(seconds - moved / memory_bytes_per_s, seconds / 2)


def _matmul_start(mesh: Mesh, memory_bytes_per_s: float) -> float:
    """Depth of a matmul that takes as long as the start of its blocks."""
    _, columns, _ = MATMUL

    def seconds(depth: int) -> float:
        product = local_program(mesh, lambda x, w: x @ w)
        x, w = per_device(mesh, TALL, depth), per_device(mesh, depth, columns)
        moved = 4 * (TALL * depth + depth * columns + TALL * columns)
        return seconds_of(product, x, w, devices=mesh.size) - moved / memory_bytes_per_s

    return start_of(DEPTHS, [seconds(depth) for depth in DEPTHS])


def start_of(depths: Sequence[int], seconds: Sequence[float]) -> float:
    """The distance below zero at which the line through two (depth, seconds) points reaches zero;
    at least one element, at most the smaller depth.

    >>> start_of((32, 256), (6.0, 34.0))
    16.0
    """
    (shallow, deep), (less, more) = depths, seconds
    slope = (more - less) / (deep - shallow)
    return min(max(less / slope - shallow, 1.0), float(shallow)) if slope > 0 else float(shallow)


def _batched(mesh: Mesh, flops_per_s: float, memory_bytes_per_s: float, start: float) -> float:
    """Share of a large matmul's FLOP/s that many small ones of one kernel reach, which some
    versions of XLA compute on one core (JAX 0.10.2) and others on all (0.12).
    """
    many, rows, columns, depth = BATCHED
    x, w = per_device(mesh, many, rows, depth), per_device(mesh, many, depth, columns)
    product = local_program(mesh, lambda x, w: jnp.einsum("nrd,ndc->nrc", x, w))
    seconds = seconds_of(product, x, w, devices=mesh.size)
    moved = 4 * many * (rows * depth + depth * columns + rows * columns)
    flops = 2 * many * rows * columns * (depth + start)
    return flops / flops_per_s / max(seconds - moved / memory_bytes_per_s, seconds / 2)


def _convolution(mesh: Mesh) -> float:
    batch, side, channels = IMAGES

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        product, back = jax.vjp(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            x,
            w,
        )
        dx, dw = back(product)
        return dx[:1, :1, :1, :1] + dw[:1, :1, :1, :1]

    x, w = per_device(mesh, batch, side, side, channels), per_device(mesh, 3, 3, channels, channels)
    flops = 3 * 2 * 9 * channels * channels * batch * side * side
    return flops / seconds_of(local_program(mesh, body), x, w, devices=mesh.size)


def _chain(a: jax.Array) -> jax.Array:
    b = a * 0.5 + 0.5
    for number in range((PROGRAMS_CHAIN - 1) // 2):
        b = b * a + 1 / (3 + number)
    return b * 0.3


def _passes(mesh: Mesh, body: Callable[[jax.Array], jax.Array], elements: int = STREAM) -> float:
    """Seconds of `body` over one buffer."""
    loop = local_program(mesh, lambda a: jax.lax.fori_loop(0, PASSES, lambda _, b: body(b), a))
    return seconds_of(loop, per_device(mesh, elements), devices=mesh.size)


def _fresh(mesh: Mesh, memory_bytes_per_s: float) -> float:
    """Bytes per second of memory that the operating system first maps and clears."""
    write = local_program(mesh, lambda a: jnp.broadcast_to(a[:1], (FRESH // 4,)))
    seconds = seconds_of(write, per_device(mesh, 8), devices=mesh.size)
    return FRESH / max(seconds - FRESH / memory_bytes_per_s, seconds / 16)


def _optimizer(mesh: Mesh) -> float:
    """Bytes per second of an update with two moments: three arrays written, four read."""

    def body(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    arrays = [per_device(mesh, STREAM) for _ in range(4)]
    return 7 * 4 * STREAM / seconds_of(local_program(mesh, body), *arrays, devices=mesh.size)


def _gather(mesh: Mesh) -> float:
    """Bytes per second of a lookup of rows and the scatter of their gradients: each reads and
    writes the rows.
    """
    rows, width, looked_up = TABLE

    def body(table: jax.Array, indices: jax.Array) -> jax.Array:
        gathered, back = jax.vjp(lambda table: table[indices], table)
        return back(gathered * 2)[0]

    indices = jax.jit(
        lambda: jnp.arange(mesh.size * looked_up) * 7 % rows,
        out_shardings=NamedSharding(mesh, P("all")),
    )()
    seconds = seconds_of(
        local_program(mesh, body), per_device(mesh, rows, width), indices, devices=mesh.size
    )
    return 4 * 4 * looked_up * width / seconds


def _tiny_ops(mesh: Mesh) -> float:
    """Seconds of one op with next to no work: a step of a loop over 8x8 products."""
    loop = local_program(
        mesh, lambda a: jax.lax.fori_loop(0, TINY_OPS, lambda _, b: (b @ b) * 0.1, a)
    )
    return seconds_of(loop, per_device(mesh, 8, 8), devices=mesh.size) / TINY_OPS


# --------------------------------------------------------------------------------------------------
# The topology of this machine's simulated devices, from the measured figures.

#: Rows, columns and share of the blocks of a matmul that a core computes in its registers.
BLOCK = (8.0, 16.0, 1.0)
#: Bytes that chains of element-wise ops, views and reductions move over those of perfectly fused
#: chains: XLA:CPU clears and copies the stacks of loops, and reads operands again. And the bytes of
#: the transposed copies around a weight gradient, as if they moved in order, per byte of the
#: gradient. Both were chosen on the transformer of `benchmarks/hand_sharded.py`, with one and four
#: microbatches on data 8, which take 2.51 and 2.93 s of two cores.
UNFUSED, TRANSPOSED = 2.15, 30.0


def measured_cpu(devices: int, refresh: bool = False) -> Topology:
    """The measured topology of `devices` simulated CPU devices on this machine.

    If JAX has fewer local CPU devices, those are measured and their compute and memory rates are
    divided among `devices`, since they share the same cores. A single device has no collectives:
    the catalogue's static link figures stay. If the cache folder cannot be written, every process
    measures. In a multi-process run, the first process measures for all.
    """
    if devices < 1:
        raise TopologyError(f"measured_cpu(devices={devices}) needs at least one device")
    let_collectives_wait()
    local = jax.local_devices(backend="cpu")[:devices]
    # Every process would measure slightly different figures, and then plan differently.
    figures = json.loads(
        of_first(f"figures of cpu:{devices}", lambda: json.dumps(_figures(devices, local, refresh)))
    )
    return machine_of_figures(devices, len(local), figures)


def _figures(devices: int, local: Sequence[jax.Device], refresh: bool) -> dict[str, float]:
    path = cache_path(devices, len(local))
    figures = None if refresh else read_figures(path, len(local))
    if figures is None:
        figures = measure(local)
        write_figures(path, figures)
    return figures


def measure(devices: Sequence[jax.Device]) -> dict[str, float]:
    """The figures of JAX devices, from all measurements."""
    return {
        **kernel_figures(line_of(devices)),
        "alone": speed_alone(devices) if len(devices) > 1 else 1.0,
        **exchange_figures(devices),
    }


def machine_of_figures(devices: int, local: int, figures: Mapping[str, float]) -> Topology:
    """The topology of `devices` devices, from the figures of `local` ones."""
    share = local / devices
    sources = (
        f"measured on {cpu_model()}, {cores()} cores, {local} devices, JAX {jax.__version__}",
    )
    peak = max(figures["float32_flops_per_s"], figures["bfloat16_flops_per_s"])
    memory = figures["memory_bytes_per_s"]
    chip = Chip(
        name="cpu",
        vendor="cpu",
        hbm_bytes=max(1, _memory_bytes() // devices),
        hbm_bytes_per_s=memory * share,
        flops_per_s=(
            ("float32", figures["float32_flops_per_s"] * share),
            ("bfloat16", figures["bfloat16_flops_per_s"] * share),
        ),
        launch_s=figures["launch_s"] / share,
        sources=sources,
    )
    elements = min(figures["elements_per_s"], figures["bfloat16_flops_per_s"])
    busy = min(max(1.0, figures["cores"]), max(1.0, cores() / local))
    efficiency = {
        "matmul": 1.0,  # the rates of matmuls were measured
        "tiles": (BLOCK,),
        "cores": busy,
        "batched_cores": min(max(1.0, busy * figures["batched"]), busy),
        "depth": figures["matmul_start"],
        "memory": 1.0,
        "at_once": False,  # a core does not overlap kinds of work
        "unfused": UNFUSED,
        "transposed": TRANSPOSED,
        "vector": elements / figures["bfloat16_flops_per_s"],
        "transcendental": elements / figures["transcendental_per_s"],
        "convolution": min(1.0, figures["convolution_flops_per_s"] / peak),
        "optimizer": min(1.0, figures["optimizer_bytes_per_s"] / memory),
        "gather": min(1.0, figures["gather_bytes_per_s"] / memory),
        "fresh": memory / figures["fresh_bytes_per_s"],
        "step_s": figures["step_s"] / share,
    }
    static = topology(f"cpu:{devices}")
    return Topology(
        name=static.name,
        chip=chip,
        tiers=(_tier(static.tiers[0], local, share, figures, sources),),
        efficiency=tuple(efficiency.items()),
        alone=min(float(devices), figures["alone"] / share),
    )


def _tier(
    static: Tier,
    local: int,
    share: float,
    figures: Mapping[str, float],
    sources: tuple[str, ...],
) -> Tier:
    """The memory tier of the collectives between devices."""
    if local == 1:
        return static
    return replace(
        static,
        exchanges=tuple(
            Exchange(
                kind=kind,
                ways=degree,
                latency_s=figures[latency] / share,
                seconds_per_byte=figures[per_byte] / share,
            )
            for kind in KINDS
            for degree in measured_ways(local)
            for latency, per_byte in [exchange_names(kind, degree)]
        ),
        sources=sources,
    )


def _memory_bytes() -> int:
    """Memory of the machine, or of the container if that is smaller."""
    sizes = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        else []
    )
    with contextlib.suppress(OSError, ValueError):  # no control groups, or the word "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=8 * CPU.chip.hbm_bytes)
