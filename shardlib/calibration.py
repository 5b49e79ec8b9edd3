"""Measured rates of this machine's simulated devices, and their cache; prices of attached devices.

`measured_cpu` runs small programs on the local CPU devices, on all of them at once, and returns a
`Topology` with the measured figures in place of the catalogue's. Figures are per device with all
devices in use: N devices on C cores have together the FLOP/s of C cores, and a device that computes
alone is as fast as XLA makes it (`Topology.alone`).

The programs run in several passes, ten to twenty seconds in all. The runs of passes in which other
programs left the processors alone count (`shardlib.processes.timing`); without such a pass the
figures are marked as made under load. They are stored as JSON in the user's cache folder for a
week, one file per processor, core count, versions of JAX and number of devices. Nothing runs, and
JAX starts no backend, before the first call.

>>> [name for name in figure_names(4) if name.startswith("all-reduce")]
['all-reduce.2.s', 'all-reduce.2.s_per_byte', 'all-reduce.4.s', 'all-reduce.4.s_per_byte']

`prices` measures on all attached devices of a job.

>>> [name for name in figure_list(topology("2*h100:8")) if name.startswith("matmul.bf")]
['matmul.bfloat16.2048', 'matmul.bfloat16.8192']
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from shardlib.cost.collectives import LinearCost, collective_cost
from shardlib.errors import MissingFileError, TopologyError
from shardlib.layout import KINDS
from shardlib.machines.catalog import CPU
from shardlib.machines.chips import LARGEST, Chip, Exchange, Measurement, Tier
from shardlib.machines.topology import Span, Topology, topology
from shardlib.processes.machine import let_collectives_wait, user_cache
from shardlib.processes.timing import QUIET, Busy, Clock, cores
from shardlib.processes.values import of_first
from shardlib.untrusted.data import Limits, read_json

#: Seconds for which a program is repeated in a pass, and passes.
BUDGET_S, PASSES = 0.05, 3
#: Seconds of a look at what other programs use.
LOOK_S = 0.3
#: Version of the cached figures; increased with the method, so that old files are ignored.
FORMAT = 6
#: Maximum size of a cache file.
CACHED = Limits(bytes=1 << 16, depth=4)
#: Rates and times of kernels, and what each is; rates are per device, with all at work.
KERNELS: Mapping[str, str] = {
    "float32_flops_per_s": "FLOP/s of a large matmul, forward and backward",
    "bfloat16_flops_per_s": "the same in bfloat16",
    "matmul_start": "depth of a matmul that takes as long as starting one of its blocks",
    "batched": "share of the matmul rate that many small matmuls of one kernel reach",
    "cores": "speed-up of a device over one core",
    "convolution_flops_per_s": "FLOP/s of a convolution, forward and backward",
    "memory_bytes_per_s": "bytes/s of a pass over memory",
    "elements_per_s": "element-wise operations per second",
    "transcendental_per_s": "exponentials per second",
    "fresh_bytes_per_s": "bytes/s of untouched memory",
    "optimizer_bytes_per_s": "bytes/s of an optimizer update",
    "gather_bytes_per_s": "bytes/s of gathers and scatters of rows",
    "launch_s": "seconds of an op with next to no work",
    "step_s": "seconds of a program with next to no work",
    "alone": "speed-up of a device while the others idle",
}


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
    return tuple(KERNELS) + tuple(
        name
        for kind in KINDS
        for degree in measured_ways(local)
        for name in exchange_names(kind, degree)
    )


def cache_path(devices: int, local: int) -> Path:
    """The cache file of the figures of `devices` devices, measured on `local` devices."""
    libraries = [jax.__version__, metadata.version("jaxlib")]
    key = [FORMAT, cpu_model(), cores(), *libraries, devices, local]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return user_cache() / f"cpu-{digest}.json"


def cpu_model() -> str:
    """The name of the processor according to the operating system."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


#: How long figures are used: machines are updated, and slow down.
LASTS = timedelta(days=7)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured figures of simulated devices.

    Attributes:
        figures: by name.
        made: date and time, in ISO 8601 and UTC.
        load: share of the processors that other programs used in the quietest pass; None if the
            system does not say.
    """

    figures: Mapping[str, float]
    made: str
    load: float | None = None

    @property
    def expired(self) -> bool:
        """True if the figures are too old, or of a time to come."""
        age = datetime.now(UTC) - datetime.fromisoformat(self.made)
        return not timedelta(minutes=-5) < age < LASTS


def now() -> str:
    """The date and time, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_calibration(path: Path, local: int) -> Calibration | None:
    """What a cache file has; None if there is none, or if no run can have written it."""
    try:
        stored = read_json(path, "measured figures", TopologyError, limits=CACHED)
        return _calibration(stored, figure_names(local))
    except (MissingFileError, TopologyError, ValueError, TypeError, KeyError):
        return None


def _calibration(stored: Any, names: Sequence[str]) -> Calibration:
    """The calibration of plain data; any error if a figure is missing or impossible."""
    figures = {name: stored["figures"][name] for name in names}
    if not all(type(value) in (int, float) and 0 < value < LARGEST for value in figures.values()):
        raise ValueError("a figure is not a positive number")
    load, made = stored["load"], datetime.fromisoformat(stored["made"])
    if made.tzinfo is None or not (load is None or 0 <= float(load) <= 1):
        raise ValueError("the date or the load is not one")
    return Calibration(figures=figures, made=stored["made"], load=load)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes a cache file; does nothing if that is not possible."""
    place = {"cpu": cpu_model(), "cores": cores(), "jax": jax.__version__}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({**asdict(calibration), **place}, indent=1), encoding="utf-8")
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


def exchange_figures(devices: Sequence[jax.Device], clock: Clock) -> dict[str, float]:
    """The figures of every kind of collective, measured by number of participants."""
    figures: dict[str, float] = {}
    for degree in measured_ways(len(devices)):
        grid = np.array(devices).reshape(-1, degree)
        mesh = Mesh(grid, ("groups", "along"), axis_types=(AxisType.Auto,) * 2)
        for kind in KINDS:
            sizes = (SMALL * degree * degree, MESSAGE)
            seconds = [collective_seconds(mesh, kind, size, clock) for size in sizes]
            figures |= dict(zip(exchange_names(kind, degree), line(*seconds), strict=True))
    return figures


def line(small: float, large: float, *, elements: int = MESSAGE) -> tuple[float, float]:
    """Seconds without bytes, and seconds per byte of the full array; at least some, even if the
    small run was slow by noise.

    Args:
        small: seconds of the smallest collective.
        elements: float32 numbers of the full array of the large one.
    """
    return small, max(large - small, large / 10) / (4 * elements)


def collective_seconds(mesh: Mesh, kind: str, elements: int, clock: Clock) -> float:
    """Seconds of one collective along an axis of a mesh, whose full array has so many elements."""
    degree = mesh.shape["along"]
    step = _steps(degree)[kind]

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            a = step(a)
        return a

    size = elements // degree if kind == "all-gather" else elements // degree * degree
    sharding = NamedSharding(mesh, P(("groups", "along")))

    def make() -> Callable[[], jax.Array]:
        a = jax.jit(lambda: jnp.ones((mesh.size * size,), jnp.float32), out_shardings=sharding)()
        program = jax.jit(
            jax.shard_map(
                chain, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
            )
        )
        return lambda: program(a)

    name = f"{kind} of {degree}, {elements} elements"
    return clock.seconds(name, make, devices=mesh.size) / CHAIN


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
STEPS = 6
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


def timed(
    clock: Clock,
    mesh: Mesh,
    name: str,
    body: Callable[..., object],
    *operands: Callable[[Mesh], jax.Array],
) -> float:
    """Seconds of a program in which every device runs `body` on its shards of all operands."""

    def make() -> Callable[[], object]:
        program = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
        )
        arrays = [operand(mesh) for operand in operands]
        return lambda: program(*arrays)

    return clock.seconds(f"{name} on {mesh.size}", make, devices=mesh.size)


#: Seconds of a program by its name, what each device runs, and its operands.
TimeOf = Callable[..., float]


def line_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with the single axis "all"."""
    return Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))


def per_device(*shape: int, dtype: DTypeLike = jnp.float32) -> Callable[[Mesh], jax.Array]:
    """Makes numbers near one with this shape per device of a mesh, sharded along the leading
    dim.
    """

    def make(mesh: Mesh) -> jax.Array:
        full = (mesh.size * shape[0], *shape[1:])
        return jax.jit(
            lambda: jnp.full(full, 0.9, dtype), out_shardings=NamedSharding(mesh, P("all"))
        )()

    return make


def kernel_figures(mesh: Mesh, clock: Clock) -> dict[str, float]:
    """All figures of kernels except `alone`, measured."""
    time_of = partial(timed, clock, mesh)
    memory = STEPS * 8 * STREAM / _steps_over(time_of, "stream", lambda a: a * 0.5 + 0.5)
    streamed = STREAM / memory * 8
    start = _matmul_start(time_of, memory)
    chained, exponential = (
        _steps_over(time_of, name, body) / STEPS
        for name, body in (("chain", _chain), ("exponentials", lambda a: jnp.exp(a * -0.5)))
    )
    short = _steps_over(time_of, "short chain", _chain, SHORT)
    single = _matmul(time_of, jnp.float32, memory, start)
    return {
        "float32_flops_per_s": single,
        "batched": _batched(time_of, single, memory, start),
        "cores": short / SHORT * STREAM / (chained * STEPS),
        "bfloat16_flops_per_s": _matmul(time_of, jnp.bfloat16, memory, start),
        "matmul_start": start,
        "convolution_flops_per_s": _convolution(time_of),
        "memory_bytes_per_s": memory,
        "elements_per_s": STREAM * (PROGRAMS_CHAIN - 2) / max(chained - streamed, streamed / 16),
        "transcendental_per_s": STREAM / max(exponential - streamed, streamed / 16),
        "fresh_bytes_per_s": _fresh(time_of, memory),
        "optimizer_bytes_per_s": _optimizer(time_of),
        "gather_bytes_per_s": _gather(time_of),
        "launch_s": _tiny_ops(time_of),
        "step_s": time_of("step", lambda a: a + 1, per_device(8)),
    }


def speed_alone(devices: Sequence[jax.Device], clock: Clock) -> float:
    """Speed of a device on a block of a model while the others idle, over its speed while all
    compute: between 1 and the number of devices.
    """
    together, alone = (
        timed(clock, mesh, "block", _block, per_device(1024, 256), per_device(256, 512))
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


def _matmul(time_of: TimeOf, dtype: DTypeLike, memory_bytes_per_s: float, start: float) -> float:
    """FLOP/s of a matmul forward and backward, without the passes over its operands and result and
    the starts of its blocks.
    """
    rows, columns, depth = MATMUL

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        product, back = jax.vjp(lambda x, w: x @ w, x, w)
        dx, dw = back(product)
        return (dx[:1, :1] + dw[:1, :1]).astype(jnp.float32)

    x, w = per_device(rows, depth, dtype=dtype), per_device(depth, columns, dtype=dtype)
    seconds = time_of(f"matmul {jnp.dtype(dtype).name}", body, x, w)
    moved = 3 * (rows * depth + depth * columns + rows * columns) * jnp.dtype(dtype).itemsize
    flops = 2 * rows * columns * depth * sum(1 + start / n for n in MATMUL)
    return flops / max(seconds - moved / memory_bytes_per_s, seconds / 2)


def _matmul_start(time_of: TimeOf, memory_bytes_per_s: float) -> float:
    """Depth of a matmul that takes as long as the start of its blocks."""
    _, columns, _ = MATMUL

    def seconds(depth: int) -> float:
        x, w = per_device(TALL, depth), per_device(depth, columns)
        moved = 4 * (TALL * depth + depth * columns + TALL * columns)
        taken = time_of(f"matmul of depth {depth}", lambda x, w: x @ w, x, w)
        return taken - moved / memory_bytes_per_s

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


def _batched(time_of: TimeOf, flops_per_s: float, memory_bytes_per_s: float, start: float) -> float:
    """Share of a large matmul's FLOP/s that many small ones of one kernel reach, which some
    versions of XLA compute on one core (JAX 0.10.2) and others on all (0.12).
    """
    many, rows, columns, depth = BATCHED
    x, w = per_device(many, rows, depth), per_device(many, depth, columns)
    seconds = time_of("batched matmul", lambda x, w: jnp.einsum("nrd,ndc->nrc", x, w), x, w)
    moved = 4 * many * (rows * depth + depth * columns + rows * columns)
    flops = 2 * many * rows * columns * (depth + start)
    return flops / flops_per_s / max(seconds - moved / memory_bytes_per_s, seconds / 2)


def _convolution(time_of: TimeOf) -> float:
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

    x, w = per_device(batch, side, side, channels), per_device(3, 3, channels, channels)
    flops = 3 * 2 * 9 * channels * channels * batch * side * side
    return flops / time_of("convolution", body, x, w)


def _chain(a: jax.Array) -> jax.Array:
    b = a * 0.5 + 0.5
    for number in range((PROGRAMS_CHAIN - 1) // 2):
        b = b * a + 1 / (3 + number)
    return b * 0.3


def _steps_over(
    time_of: TimeOf, name: str, body: Callable[[jax.Array], jax.Array], elements: int = STREAM
) -> float:
    """Seconds of `STEPS` times `body` over one buffer."""

    def loop(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, b: body(b), a)

    return time_of(name, loop, per_device(elements))


def _fresh(time_of: TimeOf, memory_bytes_per_s: float) -> float:
    """Bytes per second of memory that the operating system first maps and clears."""
    seconds = time_of("fresh", lambda a: jnp.broadcast_to(a[:1], (FRESH // 4,)), per_device(8))
    return FRESH / max(seconds - FRESH / memory_bytes_per_s, seconds / 16)


def _optimizer(time_of: TimeOf) -> float:
    """Bytes per second of an update with two moments: three arrays written, four read."""

    def body(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    return 7 * 4 * STREAM / time_of("optimizer", body, *[per_device(STREAM)] * 4)


def _gather(time_of: TimeOf) -> float:
    """Bytes per second of a lookup of rows and the scatter of their gradients: each reads and
    writes the rows.
    """
    rows, width, looked_up = TABLE

    def body(table: jax.Array, indices: jax.Array) -> jax.Array:
        gathered, back = jax.vjp(lambda table: table[indices], table)
        return back(gathered * 2)[0]

    def indices(mesh: Mesh) -> jax.Array:
        return jax.jit(
            lambda: jnp.arange(mesh.size * looked_up) * 7 % rows,
            out_shardings=NamedSharding(mesh, P("all")),
        )()

    return 4 * 4 * looked_up * width / time_of("gather", body, per_device(rows, width), indices)


def _tiny_ops(time_of: TimeOf) -> float:
    """Seconds of one op with next to no work: a step of a loop over 8x8 products."""

    def loop(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, TINY_OPS, lambda _, b: (b @ b) * 0.1, a)

    return time_of("tiny ops", loop, per_device(8, 8)) / TINY_OPS


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

    Figures are kept for a week. Those that were measured while other programs used the processors
    are measured again by the next process that starts on a quieter machine.
    """
    if devices < 1:
        raise TopologyError(f"measured_cpu(devices={devices}) needs at least one device")
    let_collectives_wait()
    local = jax.local_devices(backend="cpu")[:devices]
    # Every process would measure slightly different figures, and then plan differently.
    text = of_first(
        f"figures of cpu:{devices}",
        lambda: json.dumps(asdict(_current(devices, local, refresh))),
    )
    return machine_of_figures(devices, len(local), Calibration(**json.loads(text)))


#: Calibrations under load that this process has made or taken: all its plans have the same prices.
_under_load: dict[Path, Calibration] = {}


def _current(devices: int, local: Sequence[jax.Device], refresh: bool) -> Calibration:
    """The stored calibration, or a new one if it is missing, expired or was made under load."""
    path = cache_path(devices, len(local))
    stored = None if refresh else read_calibration(path, len(local))
    if stored is not None and not stored.expired:
        if (stored.load or 0) <= QUIET or stored == _under_load.get(path):
            return stored
        if not _quieter(stored.load or 0):
            return _under_load.setdefault(path, stored)
    calibration = measure(local)
    write_calibration(path, calibration)
    if (calibration.load or 0) > QUIET:
        _under_load[path] = calibration
    return calibration


def _quieter(load: float) -> bool:
    """Whether other programs use much less of the processors now than they did."""
    busy = Busy()
    time.sleep(LOOK_S)
    share = busy.share()
    return share is not None and share <= max(QUIET, load / 2)


def measure(devices: Sequence[jax.Device]) -> Calibration:
    """The figures of JAX devices, from all measurements, in several passes over all programs."""
    clock = Clock(budget_s=BUDGET_S)

    def figures() -> dict[str, float]:
        return {
            **kernel_figures(line_of(devices), clock),
            "alone": speed_alone(devices, clock) if len(devices) > 1 else 1.0,
            **exchange_figures(devices, clock),
        }

    figures()  # makes the programs
    clock.again(PASSES)
    return Calibration(figures=figures(), made=now(), load=clock.load)


def machine_of_figures(devices: int, local: int, calibration: Calibration) -> Topology:
    """The topology of `devices` devices, from the figures of `local` ones."""
    figures, share = calibration.figures, local / devices
    place = f"{cpu_model()}, {cores()} cores, {local} devices, JAX {jax.__version__}"
    sources = (f"measured on {place}",)
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
        measured=Measurement(made=calibration.made, place=place, load=calibration.load),
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


# --------------------------------------------------------------------------------------------------
# Prices of attached devices: matmuls, memory, collectives by tier and kind, and their overlap.
#
# `prices` measures on all devices of a job and returns a topology whose figures replace those of
# the catalogue or of a topology file, each with the interval of its values from pass to pass.

#: Seconds for which a program is repeated in a pass; passes at least and at most.
ATTACHED_S, LEAST_PASSES, MOST_PASSES = 0.1, 3, 12
#: Rows, columns and depth of the matmuls, the last one large enough for the best kernels.
SIDES = (2048, 8192)
#: float32 elements of the full array of a large collective: 64 MiB.
LARGE = 1 << 24
#: float32 elements of a pass over memory: 256 MiB.
STREAMED = 1 << 26
#: Dtypes of matmuls, where a chip has a rate for them.
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A measured machine.

    Attributes:
        machine: the topology with measured figures; `machine.measured` has their intervals.
        figures: measured, by name.
        before: the same figures of the catalogue or the file, where it has them.
    """

    machine: Topology
    figures: Figures
    before: Figures


def figure_list(base: Topology) -> dict[str, str]:
    """Names of the figures that are measured, and what each is."""
    if base.chip.vendor == "cpu":
        names = dict(KERNELS)
        for kind in KINDS:
            for ways in measured_ways(base.devices):
                names |= described(exchange_names(kind, ways), kind, ways)
        return {**names, **({"overlap": OVERLAP} if base.devices > 1 else {})}
    names = {
        f"matmul.{dtype}.{side}": f"FLOP/s of a matmul of {side} x {side} x {side} in {dtype}"
        for dtype in _dtypes(base.chip)
        for side in SIDES
    }
    names["memory"] = f"bytes/s of a pass over {4 * STREAMED >> 20} MiB"
    for tier in base.tiers:
        for kind in KINDS if tier.devices > 1 else ():
            names |= described(link_names(tier, kind), kind, tier.devices)
    return {**names, **({"overlap": OVERLAP} if base.devices > 1 else {})}


def described(names: tuple[str, str], kind: str, ways: int) -> dict[str, str]:
    """The two figures of a collective, and what each is."""
    small, per_byte = names
    return {
        small: f"seconds of the smallest {kind} among {ways}",
        per_byte: f"seconds per byte of the full array, {kind} among {ways}",
    }


OVERLAP = "share of an all-reduce that hides behind matmuls of the same program"


def link_names(tier: Tier, kind: str) -> tuple[str, str]:
    """Names of the figures of a collective over all positions of a tier."""
    return f"{tier.name}.{kind}.s", f"{tier.name}.{kind}.s_per_byte"


def _dtypes(chip: Chip) -> list[str]:
    return [dtype for dtype in DTYPES if dtype in dict(chip.flops_per_s)]


def prices(base: Topology, devices: Sequence[jax.Device], minutes: float) -> Prices:
    """Measures a machine on all its devices; to be called by all processes of a job.

    Args:
        base: the machine as it is known: shape and data sheet.
        devices: in the order of the topology.
        minutes: that passes may take, beside the compilation of the programs.

    Raises:
        TopologyError: the devices are not as many, or of another kind.
    """
    require_attached(base, devices)
    clock = Clock(budget_s=ATTACHED_S)
    cpu = base.chip.vendor == "cpu"
    figures_now = partial(_cpu_figures if cpu else _figures, base, devices, clock)
    figures_now()  # makes the programs
    end = time.monotonic() + 60 * minutes
    for number in range(MOST_PASSES):
        goes_on = number < LEAST_PASSES or time.monotonic() < end
        if of_first(f"pass {number} of prices", lambda goes_on=goes_on: str(goes_on)) != "True":
            break
        clock.again(1)
    figures = figures_now()
    in_passes = [clock.in_pass(number, figures_now) for number in range(1, clock.count)]
    text = of_first(
        "prices",
        lambda: json.dumps([figures, intervals([figures, *in_passes]), now(), clock.load]),
    )  # every process would make a slightly different machine
    figures, ranges, date, load = json.loads(text)
    measured = Measurement(
        made=date,
        place=_place(devices),
        load=load,
        intervals=tuple((name, low, high) for name, (low, high) in ranges.items()),
    )
    make = cpu_machine if cpu else machine
    return Prices(
        machine=replace(make(base, figures), measured=measured),
        figures=figures,
        before=known(base),
    )


def require_attached(base: Topology, devices: Sequence[jax.Device]) -> None:
    """Raises if a topology is not that of the attached devices."""
    platform = devices[0].platform
    vendors = {"gpu": "nvidia", "cuda": "nvidia", "tpu": "google", "cpu": "cpu"}
    if vendors.get(platform, platform) != base.chip.vendor or len(devices) != base.devices:
        raise TopologyError(
            f"{base.name} has {base.devices} devices {base.chip.name}, and {len(devices)} of"
            f" {platform} ({devices[0].device_kind}) are attached\nTry: the topology of these"
            " devices, or leave it out; --dry-run says what would be measured without them"
        )


def _place(devices: Sequence[jax.Device]) -> str:
    kind = f"{cpu_model()}, {cores()} cores" if devices[0].platform == "cpu" else ""
    several = f" in {count} processes" if (count := jax.process_count()) > 1 else ""
    return (
        f"{kind or devices[0].device_kind}, {len(devices)} devices{several},"
        f" JAX {jax.__version__}, jaxlib {metadata.version('jaxlib')}"
    )


def intervals(passes: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of every figure in several passes.

    >>> intervals([{"a": 2.0}, {"a": 1.0}, {"a": 1.5}])
    {'a': (1.0, 2.0)}
    """
    values = {name: [figures[name] for figures in passes] for name in passes[0]}
    return {name: (min(runs), max(runs)) for name, runs in values.items()}


# --------------------------------------------------------------------------------------------------
# What is run.


def _cpu_figures(base: Topology, devices: Sequence[jax.Device], clock: Clock) -> dict[str, float]:
    """Figures of simulated devices: kernels on those of each process at the same time, collectives
    among all.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    return {
        **kernel_figures(line_of(local), clock),
        "alone": speed_alone(local, clock) if len(local) > 1 else 1.0,
        **exchange_figures(devices, clock),
        **_overlap(devices, clock, 256, MESSAGE),
    }


def _figures(base: Topology, devices: Sequence[jax.Device], clock: Clock) -> dict[str, float]:
    """Figures of accelerators."""
    mesh = line_of(devices)
    time_of = partial(timed, clock, mesh)
    figures: dict[str, float] = {}
    for dtype in _dtypes(base.chip):
        for side in SIDES:
            x = per_device(side, side, dtype=jnp.dtype(dtype))
            name = f"matmul.{dtype}.{side}"
            figures[name] = 2 * side**3 / time_of(name, _product, x, x)
    figures["memory"] = 8 * STREAMED / time_of("stream", lambda a: a * 0.5, per_device(STREAMED))
    for number, tier in enumerate(base.tiers):
        for kind in KINDS if tier.devices > 1 else ():
            along = along_tier(base, number, devices)
            sizes = (SMALL * tier.devices**2, -(-LARGE // tier.devices**2) * tier.devices**2)
            seconds = [collective_seconds(along, kind, size, clock) for size in sizes]
            values = line(seconds[0], seconds[1], elements=sizes[1])
            figures |= dict(zip(link_names(tier, kind), values, strict=True))
    return {**figures, **_overlap(devices, clock, SIDES[-1], LARGE)}


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return lax.dot(x, w, preferred_element_type=wide)


def along_tier(base: Topology, tier: int, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh whose axis "along" is a tier of the topology; all its groups work at once."""
    shape = [level.devices for level in base.tiers]
    grid = np.moveaxis(np.array(devices, dtype=object).reshape(shape), tier, -1)
    return Mesh(grid.reshape(-1, shape[tier]), ("groups", "along"), axis_types=(AxisType.Auto,) * 2)


def _overlap(
    devices: Sequence[jax.Device], clock: Clock, side: int, elements: int
) -> dict[str, float]:
    """The share of an all-reduce that hides behind matmuls of the same program."""
    if len(devices) == 1:
        return {}
    mesh = line_of(devices)

    def matmuls(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = x @ x * 1e-3
        return x

    def sums(a: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            a = lax.psum(a, "all") * 1e-3
        return a

    def both(x: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return matmuls(x), sums(a)

    x, a = per_device(side, side), per_device(elements)
    compute, communication, together = (
        timed(clock, mesh, "matmuls", matmuls, x),
        timed(clock, mesh, "sums", sums, a),
        timed(clock, mesh, "matmuls and sums", both, x, a),
    )
    return {"overlap": hidden(compute, communication, together)}


def hidden(compute: float, communication: float, together: float) -> float:
    """The share of the shorter of two that takes no time beside the longer one.

    >>> hidden(3.0, 2.0, 3.5), hidden(3.0, 2.0, 6.0)
    (0.75, 0.0)
    """
    saved = compute + communication - together
    return min(max(saved / min(compute, communication), 0.0), 1.0)


# --------------------------------------------------------------------------------------------------
# The machine of measured figures.


def cpu_machine(base: Topology, figures: Figures) -> Topology:
    """The topology of simulated devices, each of which was measured with all others at work."""
    calibration = Calibration(figures=figures, made=now())
    return machine_of_figures(base.devices, base.devices, calibration)


def machine(base: Topology, figures: Figures) -> Topology:
    """A topology with measured rates of matmuls, memory and links in place of the known ones."""
    reached = {dtype: figures[f"matmul.{dtype}.{SIDES[-1]}"] for dtype in _dtypes(base.chip)}
    peaks = dict(base.chip.flops_per_s)
    usual = "bfloat16" if "bfloat16" in reached else next(iter(reached))
    share = min(1.0, reached[usual] / peaks[usual])
    memory = min(1.0, figures["memory"] / base.chip.hbm_bytes_per_s)
    chip = replace(
        base.chip,
        flops_per_s={**peaks, **{dtype: rate / share for dtype, rate in reached.items()}},
        hbm_bytes_per_s=figures["memory"] / memory,
        sources=(*base.chip.sources, "rates of matmuls and memory measured"),
    )
    efficiency: dict[str, Any] = {
        **dict(base.efficiency),
        "matmul": share,
        "eight_bit": share,
        "memory": memory,
        # links have the rates that collectives reach
        "fast": 1.0,
        "slow": 1.0,
        "ring_step_s": 0.0,
        **({"hidden": max(figures["overlap"], 1e-3)} if "overlap" in figures else {}),
    }
    tiers = tuple(_measured_tier(base, number, figures) for number in range(len(base.tiers)))
    return replace(base, chip=chip, tiers=tiers, efficiency=tuple(efficiency.items()))


def _measured_tier(base: Topology, number: int, figures: Figures) -> Tier:
    """A tier with the rate and the latency at which the formulas give the measured collectives, in
    the median of the kinds.
    """
    tier = base.tiers[number]
    if tier.devices == 1:
        return tier
    unit = costs_of(base, number, bytes_per_s=1.0, latency_s=1.0)
    rates, latencies = [], []
    for kind, cost in unit.items():
        small, per_byte = (figures[name] for name in link_names(tier, kind))
        of_result = per_byte * (tier.devices if kind == "reduce-scatter" else 1)
        rates.append(cost.seconds_per_byte / of_result)
        latencies.append(small / cost.latency_s)
    rate = statistics.median(rates)
    peak = max(tier.bytes_per_s, rate)
    return replace(
        tier,
        bytes_per_s=peak,
        efficiency=rate / peak,
        latency_s=statistics.median(latencies),
        ring=False,
        sources=(*tier.sources, "rate and latency measured"),
    )


def costs_of(
    base: Topology, number: int, *, bytes_per_s: float, latency_s: float
) -> dict[str, LinearCost]:
    """The cost of each kind of collective over a whole tier of such links, per byte of the
    result.
    """
    tier = base.tiers[number]
    changed = replace(
        tier, bytes_per_s=bytes_per_s, latency_s=latency_s, efficiency=1.0, ring=False, exchanges=()
    )
    tiers = (*base.tiers[:number], changed, *base.tiers[number + 1 :])
    machine = replace(base, name=f"{base.name} {bytes_per_s} {latency_s}", tiers=tiers)
    spans = tuple(Span(number, dim, ways, 1) for dim, ways in enumerate(tier.shape) if ways > 1)
    return {kind: collective_cost(kind, spans, machine) for kind in KINDS}


def known(base: Topology) -> dict[str, float]:
    """The figures of a machine that its topology gives, by the names of those that are measured."""
    if base.chip.vendor == "cpu":
        return {}
    figures = {
        f"matmul.{dtype}.{side}": rate
        for dtype, rate in base.chip.flops_per_s
        if dtype in DTYPES
        for side in SIDES
    }
    figures["memory"] = base.chip.hbm_bytes_per_s
    for number, tier in enumerate(base.tiers):
        if tier.devices == 1:
            continue
        costs = costs_of(
            base, number, bytes_per_s=tier.reached_bytes_per_s, latency_s=tier.latency_s
        )
        for kind, cost in costs.items():
            full = tier.devices if kind == "reduce-scatter" else 1
            values = (cost.latency_s, cost.seconds_per_byte / full)
            figures |= dict(zip(link_names(tier, kind), values, strict=True))
    return {name: value for name, value in figures.items() if math.isfinite(value)}
