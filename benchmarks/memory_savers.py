"""What does every saver of memory save, as predicted and as the compilers of a TPU and a GPU have
it?

    python benchmarks/memory_savers.py [--topology v5e:2x4 ...] [--only NAME ...] [--out results.json]

One Llama-like model of 400 million parameters on eight devices: ZeRO 0 to 3, recomputation,
gradient accumulation, dtypes, and what rests in host memory. Every step is compiled ahead of time;
bytes are those of one device. A saving is that over the row that the row names, as predicted and as
compiled; collectives of gradients are listed with their dtypes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import optax

import shardlib
from benchmarks.environment import RESULTS, write
from shardlib import models
from shardlib.models.config import TransformerConfig
from shardlib.verification.isolation import Limits
from shardlib.verification.report import totals

MODEL = TransformerConfig(
    name="llama-400m",
    vocab_size=4096,
    layers=24,
    embed=1024,
    heads=8,
    kv_heads=8,
    head_dim=128,
    mlp=4096,
    max_seq=1024,
)
BATCH, SEQ = 32, 1024
#: Attention as programs have it that are compiled without the machine: the kernel of cuDNN is
#: lowered where the GPUs are, and nowhere else.
ATTENTION = {"h100:8": "blocks"}
TOPOLOGIES = ("v5e:2x4", "h100:8")
FULL = {"remat": "full", "microbatches": 1}
ZERO3 = {**FULL, "mesh": {"fsdp": 8}, "zero": 3}
#: (name, the row that it is compared with, pins).
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("zero 0", "", {**FULL, "mesh": {"data": 8}, "zero": 0}),
    ("zero 1", "zero 0", {**FULL, "mesh": {"fsdp": 8}, "zero": 1}),
    ("zero 2", "zero 0", {**FULL, "mesh": {"fsdp": 8}, "zero": 2}),
    ("zero 3", "zero 0", ZERO3),
    ("remat none", "", {**ZERO3, "remat": "none"}),
    ("remat dots", "remat none", {**ZERO3, "remat": "dots"}),
    ("remat full", "remat none", ZERO3),
    ("remat full of 12 layers", "remat none", {**ZERO3, "remat_layers": 12}),
    ("accumulation 4, remat none", "remat none", {**ZERO3, "remat": "none", "microbatches": 4}),
    ("accumulation 4", "zero 3", {**ZERO3, "microbatches": 4}),
    (
        "accumulation 4, sums in bfloat16",
        "accumulation 4",
        {**ZERO3, "microbatches": 4, "gradient_dtype": "bfloat16"},
    ),
    (
        "accumulation 4, zero 0",
        "zero 0",
        {**FULL, "mesh": {"data": 8}, "zero": 0, "microbatches": 4},
    ),
    (
        "accumulation 4, zero 1",
        "zero 1",
        {**FULL, "mesh": {"fsdp": 8}, "zero": 1, "microbatches": 4},
    ),
    ("parameters in bfloat16", "zero 3", {**ZERO3, "param_dtype": "bfloat16"}),
    ("moments in bfloat16", "zero 3", {**ZERO3, "moment_dtype": "bfloat16"}),
    ("gradients in float32 on the wire", "zero 3", {**ZERO3, "reduction_dtype": "float32"}),
    (
        "zero 0, gradients in bfloat16 on the wire",
        "zero 0",
        {**FULL, "mesh": {"data": 8}, "zero": 0, "reduction_dtype": "bfloat16"},
    ),
    ("optimizer state in host memory", "zero 3", {**ZERO3, "offload": ["optimizer"]}),
    ("activations in host memory", "zero 3", {**ZERO3, "offload": ["activations"]}),
)


def measure(
    topology: str, name: str, pin: dict[str, Any], model: TransformerConfig
) -> dict[str, Any]:
    """One row as plain data."""
    init, loss = models.build(model)
    pin = {**({"attention": ATTENTION[topology]} if topology in ATTENTION else {}), **pin}
    row: dict[str, Any] = {"topology": topology, "name": name, "model": model.name, "pin": pin}
    try:
        found = shardlib.verify(
            init,
            loss,
            optax.adamw(3e-4),
            models.example_batch(model, BATCH, SEQ),
            topology=topology,
            pin=pin,
            name=model.name,
            limits=Limits(seconds=900),
        )
    except shardlib.ShardlibError as error:
        return {**row, "failed": f"{type(error).__name__}: {error}"}
    if found.compiled is None:
        return {**row, "failed": str(found.findings[0])}
    predicted, made = found.plan.estimate.device_bytes, found.compiled.device_bytes
    return {
        **row,
        "predicted_bytes": predicted.peak,
        "compiled_bytes": made["peak"],
        "error": predicted.peak / made["peak"] - 1,
        "predicted": dict(vars(predicted)),
        "compiled": dict(made),
        "collective_bytes": [
            sum(totals(every).values())
            for every in (found.plan.estimate.collectives, found.compiled.collectives)
        ],
        "reductions": [
            f"{kind} over {'/'.join(axes)}, {dtype}: {size} bytes"
            for kind, axes, dtype, size in found.compiled.reductions
        ],
        "compile_seconds": found.compile_seconds,
        "versions": dict(found.versions),
        "findings": [str(finding) for finding in found.findings],
    }


def line(row: dict[str, Any], others: dict[str, dict[str, Any]], base: str) -> str:
    """A row in one line for people."""
    if "failed" in row:
        return (
            f"{row['topology']:8s} {row['name']:44s} failed: {row['failed'].splitlines()[0][:160]}"
        )
    other = others.get(base, {})
    saved = (
        "".join(
            f"{other[key] / 2**30 - row[key] / 2**30:9.2f}"
            for key in ("predicted_bytes", "compiled_bytes")
        )
        if "compiled_bytes" in other
        else ""
    )
    return (
        f"{row['topology']:8s} {row['name']:44s} {row['predicted_bytes'] / 2**30:9.2f}"
        f" {row['compiled_bytes'] / 2**30:9.2f} {row['error']:7.1%} {saved}"
    )


def run(
    benchmark: str,
    description: str | None,
    rows: Sequence[tuple[str, str, dict[str, Any], TransformerConfig]],
) -> None:
    """Measures every row that the command line asks for, prints the table and writes the results.

    Args:
        benchmark: its name, that of the file of results.
        description: of the command.
        rows: (name, the row that it is compared with or "", pins, model).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--only", nargs="*", default=None, help="names of rows")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{benchmark}.json")
    args = parser.parse_args()
    print(
        f"{'':8s} {'GiB per device':44s} {'predicted':>9s} {'compiled':>9s} {'error':>7s}   saved,"
        " predicted and compiled"
    )
    found: list[dict[str, Any]] = []
    for topology in args.topology:
        done: dict[str, dict[str, Any]] = {}
        for name, base, pin, model in rows:
            if args.only is None or name in args.only:
                done[name] = measure(topology, name, pin, model)
                found.append(done[name])
                print(line(done[name], done, base), flush=True)
                write(
                    args.out,
                    {"benchmark": benchmark, "batch": BATCH, "seq": SEQ, "rows": found},
                    quiet=True,
                )


if __name__ == "__main__":
    run("memory_savers", __doc__, [(*row, MODEL) for row in ROWS])
