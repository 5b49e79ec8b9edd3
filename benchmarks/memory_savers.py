"""Savings of every saver of memory, as predicted and as the compilers of a TPU and a GPU have it.

    python -m benchmarks memory_savers [--topology v5e:2x4 ...] [--only NAME ...] [--out results.json]

One Llama-like model of 400 million parameters on eight devices: ZeRO 0 to 3, recomputation,
gradient accumulation, dtypes, and what rests in host memory. Every step is compiled ahead of time;
bytes are those of one device. A saving is that over the row that the row names, as predicted and as
compiled; collectives of gradients are listed with their dtypes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


from benchmarks.compiling import compiled, inputs
from benchmarks.environment import card, command_line, show, table, write
from shardlib.models.config import TransformerConfig
from shardlib.verification.report import totals

MODEL = card("llama-400m")
BATCH, SEQ = 32, 1024
#: Attention as programs have it that are compiled without the machine: the kernel of cuDNN is
#: lowered where the GPUs are, and nowhere else.
ATTENTION = {"h100:8": "blocks"}
TOPOLOGIES = ("v5e:2x4", "h100:8")
#: (name, the row that it is compared with, pins).
ROWS: list[tuple[str, str, dict[str, Any]]] = table("memory_savers")["rows"]


def measure(
    topology: str, name: str, pin: dict[str, Any], model: TransformerConfig
) -> dict[str, Any]:
    """One row as plain data."""
    pin = {**({"attention": ATTENTION[topology]} if topology in ATTENTION else {}), **pin}
    row: dict[str, Any] = {"topology": topology, "name": name, "model": model.name, "pin": pin}
    found = compiled(inputs(model, BATCH, SEQ), topology, seconds=900, pin=pin)
    if isinstance(found, str):
        return {**row, "failed": found}
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


def run(
    benchmark: str,
    description: str | None,
    rows: Sequence[tuple[str, str, dict[str, Any], TransformerConfig]],
) -> None:
    """Measures rows (name, the row that it is compared with or "", pins, model) that the command
    line asks for, and writes the result of the benchmark.
    """
    parser = command_line(description, f"{benchmark}.json")
    parser.add_argument("--topology", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--only", nargs="*", default=None, help="names of rows")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for topology in args.topology:
        done: dict[str, dict[str, Any]] = {}
        for name, base, pin, model in rows:
            if args.only is None or name in args.only:
                row = done[name] = measure(topology, name, pin, model)
                found.append(row)
                sizes = ("predicted_bytes", "compiled_bytes")
                compared = done.get(base, {}).keys() & row.keys() & {*sizes}
                saved = {f"saved {key}": done[base][key] - row[key] for key in compared}
                show(f"{topology} {name}", row | saved, "failed", *sizes, "error", *saved)
                result = {"benchmark": benchmark, "batch": BATCH, "seq": SEQ, "rows": found}
                write(args.out, result, quiet=True)


def main() -> None:
    run("memory_savers", __doc__, [(*row, MODEL) for row in ROWS])
