"""JAX's kernel of ragged paged attention beside ours, compiled for a TPU.

    python -m benchmarks serving_kernel

Attention of the next tokens of 16 requests over pages of 4,096 tokens, in the layers of Llama 3 70B
over eight devices, compiled ahead of time for a slice that is not here, in two forms: as this
library has it, which gathers a few pages at a time, and by the kernel, which reads pages where they
are. For the kernel keys and values stand interleaved in one array, and layers and pages are one
dim, so that no layer is copied. Both write the keys and values of the tokens first. Stored are the
compiler's memory and its estimate of cycles, and whether both give the same on a CPU, where the
kernel is interpreted, for a small case.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.environment import command_line, write
from shardlib.functions.attention import Attention
from shardlib.layout import MeshShape
from shardlib.serve.cache import Grid, LayerPlacement, attending
from shardlib.verification.traffic import read_traffic

#: Layers, pages, tokens of a page, requests, pages of a request, heads, key heads, width.
LARGE = (80, 1024, 64, 16, 64, 64, 8, 128)
SMALL = (2, 24, 16, 4, 5, 4, 2, 128)
FORM = Attention(
    scale=128**-0.5,
    causal=True,
    window=0,
    softcap=0.0,
    block=0,
    parts=1,
    chosen=False,
    packed=False,
)
HEADS = PartitionSpec(None, None, None, "tensor")


def gathered(grid: Grid) -> Callable[..., Any]:
    """(keys, values, queries, new keys, new values, table, positions) -> results of all layers."""
    attend = attending(FORM, grid)

    def run(pages: Any, query: Any, key: Any, value: Any, table: Any, position: Any) -> Any:
        size = pages[0].shape[2]
        row = jnp.arange(len(position))
        entry = table[row, position // size] * size + position % size
        where = LayerPlacement(
            position=position,
            entry=entry,
            table=table,
            chunks=jnp.zeros((0, 1), jnp.int32),
            first=0,
            pages=pages[0].shape[1],
            columns=table.shape[1],
        )
        dims = replace(
            where,
            position=0,
            entry=0,
            table=None,
            chunks=None,
            first=None,
            pages=None,
            columns=None,
        )

        def layer(carry: Any, number: Any) -> Any:
            query, pages = carry
            mixed, pages = jax.vmap(
                attend, in_axes=(None, None, dims, 0, 0, 0), out_axes=(0, None)
            )(pages, number, where, query[:, None, None], key[:, None, None], value[:, None, None])
            return (query + mixed[:, 0, 0], pages), None

        return jax.lax.scan(layer, (query, pages), jnp.arange(pages[0].shape[0]))[0]

    return run


def by_kernel(mesh: Mesh | None) -> Callable[..., Any]:
    """The same, of pages [layers pages, tokens, 2 key heads, width]."""

    def local(pages: Any, query: Any, key: Any, value: Any, table: Any, position: Any) -> Any:
        layers, size = pages.shape[0], pages.shape[2]
        flat = pages.reshape(-1, *pages.shape[2:])
        count, rows = pages.shape[1], len(position)
        both = jnp.stack([key, value], axis=2).reshape(rows, -1, key.shape[-1])

        def layer(carry: Any, number: Any) -> Any:
            query, flat = carry
            mine = table + number * count
            page = mine[jnp.arange(rows), position // size]
            flat = flat.at[page, position % size].set(both)
            mixed = ragged_paged_attention(
                query,
                flat,
                position + 1,
                mine,
                jnp.arange(rows + 1, dtype=jnp.int32),
                jnp.full((1,), rows, jnp.int32),
                sm_scale=FORM.scale,
                num_kv_pages_per_block=min(8, table.shape[1]),
                num_queries_per_block=min(8, rows),
                vmem_limit_bytes=64 << 20,
            )
            return (query + mixed, flat), None

        (query, flat), _ = jax.lax.scan(layer, (query, flat), jnp.arange(layers, dtype=jnp.int32))
        return query, flat.reshape(pages.shape)

    if mesh is None:
        return local
    head, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(HEADS, head, head, head, whole, whole),
        out_specs=(head, HEADS),
        check_vma=False,
    )


def compiled(topology: str, kernel: bool) -> dict[str, Any]:
    """What the compiler makes of one form."""
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    names = ("data", "context", "tensor")
    mesh = Mesh(devices.reshape(1, 1, -1), names, axis_types=(AxisType.Auto,) * 3)
    layers, count, size, requests, most, heads, groups, width = LARGE

    def of(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    def pages(groups: int) -> jax.ShapeDtypeStruct:
        return of((layers, count, size, groups, width), jnp.bfloat16, *HEADS)

    rows = [of((requests, n, width), jnp.bfloat16, None, "tensor") for n in (heads, groups, groups)]
    cache = pages(2 * groups) if kernel else (pages(groups), pages(groups))
    function = by_kernel(mesh) if kernel else gathered(Grid(mesh=mesh))
    made = (
        jax.jit(function, donate_argnums=0)
        .lower(cache, *rows, of((requests, most), jnp.int32), of((requests,), jnp.int32))
        .compile()
    )
    text, memory = str(made.as_text()), made.memory_analysis()
    assert memory is not None
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return {
        "topology": topology,
        "form": "kernel" if kernel else "gathered",
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "kernels": len(calls),
        "kernels_with_cycles": sum("estimated_cycles" in line for line in calls),
        "cycles": read_traffic(text, MeshShape(tensor=8)).cycles,
    }


def equal() -> float:
    """By how much both forms differ at most, on a CPU."""
    layers, count, size, requests, most, heads, groups, width = SMALL
    draw = np.random.default_rng(0)

    def of(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    keys, values = (of(layers, count, size, groups, width) for _ in range(2))
    rows = [of(requests, n, width) for n in (heads, groups, groups)]
    table = jnp.asarray(draw.permutation(count)[: requests * most].reshape(requests, most))
    position = jnp.asarray(draw.integers(0, size * most, requests), jnp.int32)
    given = *rows, table.astype(jnp.int32), position
    mine = jax.jit(gathered(Grid()))((keys, values), *given)[0]
    both = jnp.stack([keys, values], axis=4).reshape(layers, count, size, 2 * groups, width)
    with pltpu.force_tpu_interpret_mode():
        theirs = jax.jit(by_kernel(None))(both, *given)[0]
    return float(jnp.max(jnp.abs(mine - theirs)))


def main() -> None:
    parser = command_line(__doc__, "serving_kernel_jax-*.json")
    parser.add_argument("--topology", default="v5e:2x4")
    args = parser.parse_args()
    try:
        off: float | str = equal()
    except Exception as error:  # an interpreter that lacks what the kernel uses is a result
        said = [line for line in str(error).splitlines() if "Error: " in line and "/" not in line]
        off = f"not interpreted: {said[-1] if said else type(error).__name__}"
    print("differ by", off, flush=True)
    rows = []
    for kernel in (False, True):
        rows.append(compiled(args.topology, kernel))
        print(rows[-1], flush=True)
    write(args.out, {"benchmark": "serving_kernel", "differ": off, "forms": rows})
