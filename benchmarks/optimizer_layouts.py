"""What a matrix optimizer adds to a step, by layout of its matrices, by the TPU compiler.

    python -m benchmarks optimizer_layouts [owned gathered sharded] [--out FILE]

A decoder of 1.1 billion parameters in a scan of 16 layers, 64 sequences of 4,096 tokens on v5e:4x4,
under AdamW and under Muon (layers' matrices; embedding, head and scales under AdamW), one plan
pinned to fsdp 16 with ZeRO 3. Each is compiled ahead of time by libtpu, which needs no chip:
`compute_seconds` are the compiler's cycles of all kernels of a step, `wire_bytes` what a device
sends. An update's share of the step is what Muon adds to the kernels, and its all-to-alls, over
AdamW's predicted step. Peaks are the compiler's.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import shardlib
from benchmarks.environment import command_line, write
from shardlib import models

TOPOLOGY = "v5e:4x4"
CONFIG = models.TransformerConfig(
    name="decoder-1b",
    vocab_size=32768,
    layers=16,
    embed=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp=8192,
    max_seq=4096,
)
BATCH = {name: jax.ShapeDtypeStruct((64, 4096), jnp.int32) for name in ("inputs", "targets")}
PIN = {"mesh": {"fsdp": 16}, "zero": 3, "remat": "full", "microbatches": 1}
LAYOUTS = ("owned", "gathered", "sharded")


def dimension_numbers(params: Any) -> Any:
    """Matrices of a stack of layers: attention's output contracts heads and their widths."""

    def of(path: Any, leaf: Any) -> Any:
        if leaf.ndim < 3:
            return None
        dims = tuple(range(1, leaf.ndim))
        split = len(dims) - 1 if "out" in jax.tree_util.keystr(path) else 1
        return optax.contrib.MuonDimensionNumbers(dims[:split], dims[split:])

    return jax.tree_util.tree_map_with_path(of, params)


def muon() -> optax.GradientTransformation:
    """Muon for the matrices of layers, AdamW for the rest."""
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dimension_numbers)


def measured(optimizer: optax.GradientTransformation, **pins: str) -> dict[str, Any]:
    """A step as planned and as compiled."""
    init, loss = models.build(CONFIG)
    found = shardlib.verify(init, loss, optimizer, BATCH, topology=TOPOLOGY, pin={**PIN, **pins})
    compiled, estimate = found.compiled, found.plan.estimate
    assert compiled is not None, found
    exchanges = [c for c in estimate.collectives if "optimizer" in c.cause]
    return {
        "predicted_step_s": estimate.step_seconds,
        "predicted_optimizer_s": estimate.seconds.optimizer,
        "predicted_exchanges_s": sum(c.seconds for c in exchanges),
        "predicted_peak_gib": estimate.device_bytes.peak / 2**30,
        "compute_s": compiled.compute_seconds,
        "peak_gib": compiled.device_bytes["peak"] / 2**30,
        "wire_gib": compiled.wire_bytes / 2**30,
        "all_to_all_bytes": sum(
            c.bytes * c.count for c in compiled.collectives if c.kind == "all-to-all"
        ),
        "planned_all_to_all_bytes": sum(
            c.bytes * c.count for c in exchanges if c.kind == "all-to-all"
        ),
        "findings": [f.code for f in found.findings],
    }


def main() -> None:
    parser = command_line(__doc__, "optimizer_layouts.json")
    parser.add_argument("layouts", nargs="*", choices=[*LAYOUTS, []])
    args = parser.parse_args()
    rows: dict[str, Any] = {"adamw": measured(optax.adamw(1e-3))}
    base = rows["adamw"]
    print("adamw", base, flush=True)
    for layout in args.layouts or LAYOUTS:
        row = measured(muon(), optimizer_layout=layout)
        added = row["compute_s"] - base["compute_s"] + row["predicted_exchanges_s"]
        row["update_over_step"] = added / base["predicted_step_s"]
        rows[layout] = row
        print(layout, row, flush=True)
    write(args.out, {"command": "python -m benchmarks optimizer_layouts", "rows": rows})
