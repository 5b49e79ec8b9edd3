"""Collectives of simulated devices: a meeting of threads, and copies through the memory that all
share.

A figure is of all devices at work: groups of two are measured with every device in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.calibration.figures import exchange_names, measured_ways
from shardlib.calibration.stopwatch import seconds_of
from shardlib.collective import KINDS

#: float32 elements of the full array of a large collective: 2 MiB.
MESSAGE = 1 << 19
#: Elements of a shard of the smallest.
SMALL = 16
#: Collectives in one program, so that the dispatch of the program does not count.
CHAIN = 8


def exchange_figures(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Measures every kind of collective by participants."""
    figures: dict[str, float] = {}
    for degree in measured_ways(len(devices)):
        grid = np.array(devices).reshape(-1, degree)
        mesh = Mesh(grid, ("groups", "along"), axis_types=(AxisType.Auto,) * 2)
        for kind in KINDS:
            seconds = [_seconds(mesh, kind, size) for size in (SMALL * degree * degree, MESSAGE)]
            figures |= dict(zip(exchange_names(kind, degree), line(*seconds), strict=True))
    return figures


def line(small: float, large: float) -> tuple[float, float]:
    """Seconds without bytes, and of each byte of the full array; a noisy small run does not make
    bytes free.

    Args:
        small: seconds of the smallest collective.
    """
    return small, max(large - small, large / 10) / (4 * MESSAGE)


def _seconds(mesh: Mesh, kind: str, elements: int) -> float:
    """Seconds of one collective whose full array has so many elements."""
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
    """One collective of each kind, whose result has the shape of its operand again."""
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
