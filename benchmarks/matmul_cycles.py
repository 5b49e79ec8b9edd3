"""Share of the peak that matmuls of typical layers reach, by the TPU compiler's own cycles.

    python -m benchmarks matmul_cycles [v5e v6e] [--out FILE]

Matmuls of the sizes that layers have on one device are compiled ahead of time for each generation,
which needs no chip, forward and as gradients of weights (contracted over rows, float32 results).
The compiler writes the cycles that it estimates for each kernel; the share is the cycles that the
matrix units take at full speed over those. Reading operands again from HBM, which decides on chips
whose matrix units are fast for their memory (v6e), is in it. A chip's figure is the geometric mean.
Where a chip has two cores and the compiler did not split a kernel over them, the estimate is of one.
"""

from __future__ import annotations

import os
import re
import statistics
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.environment import command_line, write
from shardlib.verification.isolation import TPU_FLOPS_PER_CYCLE

#: The smallest machine of each generation, as the compiler names it.
MACHINES: dict[str, str] = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
#: Rows, columns and depth: projections and feed-forward layers of models of 8 and 70 billion
#: parameters, whole and with columns or depth sharded over 8 devices.
SHAPES: tuple[tuple[int, int, int], ...] = (
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 28672, 8192),
    (8192, 8192, 1024),
    (16384, 3584, 8192),
    (2048, 2048, 2048),
)
#: Chips with two cores a device.
TWO_CORES = ("v4", "v5p")


def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Results of a layer."""
    return x @ weight


def weight_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of a weight, in float32."""
    dims = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(x, cotangent, dims, preferred_element_type=jnp.float32)


def share(chip: str, rows: int, columns: int, depth: int, backward: bool) -> float:
    """Share of the peak of one matmul, by the compiler's cycles."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=MACHINES[chip]).devices[0]
    place = SingleDeviceSharding(device)
    first = (depth, rows) if backward else (rows, depth)
    step = jax.jit(
        weight_gradient if backward else forward, in_shardings=place, out_shardings=place
    )
    operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (first, (depth, columns)))
    text = step.lower(*operands).compile().as_text() or ""
    cycles = [int(found) for found in re.findall(r'"estimated_cycles":"(\d+)"', text)]
    per_cycle = TPU_FLOPS_PER_CYCLE[chip]
    if chip in TWO_CORES and "megacore_split_dim" not in text:
        per_cycle /= 2
    return 2 * rows * columns * depth / per_cycle / sum(cycles)


def main() -> None:
    parser = command_line(__doc__, "matmul_cycles.json")
    parser.add_argument("chips", nargs="*", choices=[*MACHINES, []])
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for chip in args.chips or MACHINES:
        shares = {
            f"{rows} x {columns} x {depth}{', gradient' if backward else ''}": round(
                share(chip, rows, columns, depth, backward), 4
            )
            for rows, columns, depth in SHAPES
            for backward in (False, True)
        }
        found[chip] = {"share": round(statistics.geometric_mean(shares.values()), 3), **shares}
        print(chip, found[chip], flush=True)
    write(args.out, {"command": "python -m benchmarks matmul_cycles", "chips": found})
