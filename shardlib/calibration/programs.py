"""Programs whose seconds are the figures of kernels.

Each runs under `shard_map`, the same on all devices at once, on arrays that a device's share of a
small model would have. Rates that a pass over memory is part of are found by difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from shardlib.calibration.stopwatch import seconds_of

#: Rows, columns and depth of a matmul: large enough for the matmul library's best kernels.
MATMUL = (512, 512, 256)
#: Batch, height and width, and channels of a convolution, 3x3.
IMAGES = (8, 16, 32)
#: float32 elements that a device reads and writes: 2 MiB, about what a layer of a small model has.
STREAM = 1 << 19
#: Additions and multiplications of the longer of two chains over the same elements.
CHAIN = 17
PASSES = 6
#: float32 elements of a chain that keeps one core busy.
SHORT = 1 << 15
#: Matmuls of one kernel, and rows, columns and depth of each.
BATCHED = (16, 128, 128, 128)
#: Depths, and rows, of the matmuls that say what the start of a block takes.
DEPTHS = (32, 256)
TALL = 1024
#: Bytes of memory that nobody has touched before; allocators map so many anew each time.
FRESH = 40 << 20
#: Rows of a table, elements of a row, and rows that are looked up.
TABLE = (1024, 128, 1024)
TINY_OPS = 256


def local_program(mesh: Mesh, body: Callable[..., object]) -> Callable[..., object]:
    """The jitted program in which every device runs `body` on its part of all operands."""
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    )


def line_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of one axis, "all"."""
    return Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))


def per_device(mesh: Mesh, *shape: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Numbers near one, of a shape on every device: their leading dim is sharded."""
    full = (mesh.size * shape[0], *shape[1:])
    return jax.jit(
        lambda: jnp.full(full, 0.9, dtype), out_shardings=NamedSharding(mesh, P("all"))
    )()


def kernel_figures(mesh: Mesh) -> dict[str, float]:
    """Measures every figure of kernels but `alone`."""
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
        "elements_per_s": STREAM * (CHAIN - 2) / max(chained - streamed, streamed / 16),
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
    """How many times as fast a device runs a block of a model while the others idle: between 1 and
    their number.
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
    """FLOP/s of a product forward and backward, less the passes over its operands and result and
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
    """Where the line through two (depth, seconds) meets zero, below zero; at least one element, at
    most the smaller depth.

    >>> start_of((32, 256), (6.0, 34.0))
    16.0
    """
    (shallow, deep), (less, more) = depths, seconds
    slope = (more - less) / (deep - shallow)
    return min(max(less / slope - shallow, 1.0), float(shallow)) if slope > 0 else float(shallow)


def _batched(mesh: Mesh, flops_per_s: float, memory_bytes_per_s: float, start: float) -> float:
    """Share of a large product's FLOP/s that many small ones of one kernel reach, which some
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
    for number in range((CHAIN - 1) // 2):
        b = b * a + 1 / (3 + number)
    return b * 0.3


def _passes(mesh: Mesh, body: Callable[[jax.Array], jax.Array], elements: int = STREAM) -> float:
    """Seconds of some passes over one buffer."""
    loop = local_program(mesh, lambda a: jax.lax.fori_loop(0, PASSES, lambda _, b: body(b), a))
    return seconds_of(loop, per_device(mesh, elements), devices=mesh.size)


def _fresh(mesh: Mesh, memory_bytes_per_s: float) -> float:
    """Bytes a second of memory that the system has to map and to clear first."""
    write = local_program(mesh, lambda a: jnp.broadcast_to(a[:1], (FRESH // 4,)))
    seconds = seconds_of(write, per_device(mesh, 8), devices=mesh.size)
    return FRESH / max(seconds - FRESH / memory_bytes_per_s, seconds / 16)


def _optimizer(mesh: Mesh) -> float:
    """Bytes a second of an update by two moments: three arrays written, four read."""

    def body(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    arrays = [per_device(mesh, STREAM) for _ in range(4)]
    return 7 * 4 * STREAM / seconds_of(local_program(mesh, body), *arrays, devices=mesh.size)


def _gather(mesh: Mesh) -> float:
    """Bytes a second of a lookup of rows and the scatter of their gradients: each reads and writes
    the rows.
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
    """Seconds of one op that has next to nothing to do: a step of a loop over 8x8 products."""
    loop = local_program(
        mesh, lambda a: jax.lax.fori_loop(0, TINY_OPS, lambda _, b: (b @ b) * 0.1, a)
    )
    return seconds_of(loop, per_device(mesh, 8, 8), devices=mesh.size) / TINY_OPS
