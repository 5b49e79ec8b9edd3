"""Collectives over tensor behind the matmuls that they feed, in the real compiler's schedule.

    python -m benchmarks collective_matmul v5p:2x2x2 [--tensor 8] [--seq 4096] [--examples 2] [--out FILE]
    python -m benchmarks collective_matmul h100:8

Two layers of Llama 3 8B with tensor and sequence parallelism are compiled ahead of time, which
needs no device: with collectives ("none"), with loops of the program's own ("loop"), and as the
compiler makes loops where it is asked for them ("compiler", XLA's windowed einsum). Stored are, by
kind of collective over tensor, executions and bytes of a step, how many stand in the text, how many
of those are split in a start and a done, and how many have matmuls between the two; memory; and the
TPU compiler's estimate of its kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import shardlib
from benchmarks.compiling import inputs
from benchmarks.environment import command_line, stored, table, write
from shardlib import models
from shardlib.machines.topology import topology
from shardlib.verification.report import CompiledStep

#: Options of each compiler: as it is; and with its own loops for collectives of any size.
FORMS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = table("collective_matmul")


def compiled_form(
    args: argparse.Namespace, form: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """One program, as data."""
    config = models.load("llama3-8b")
    assert isinstance(config, models.TransformerConfig)
    machine = topology(args.topology)
    batch = args.examples * machine.devices // args.tensor
    given = inputs(replace(config, layers=2, vocab_size=2048), batch, args.seq)
    mesh = {"tensor": args.tensor, "fsdp": machine.devices // args.tensor}
    pin = {
        "mesh": mesh,
        "rules": [
            ["batch", ["data", "fsdp"]],
            *([dim, "tensor"] for dim in ("mlp", "kv_heads", "seq")),
        ],
        "remat": "none",
        "microbatches": 1,
        "collective_matmul": form,
    }
    report = shardlib.verify(**given, topology=machine, pin=pin, options=options)
    found = {
        "options": dict(options),
        "predicted_seconds": report.plan.estimate.step_seconds,
        "predicted_bytes": report.plan.estimate.device_bytes.peak,
        "versions": dict(report.versions),
    }
    if report.compiled is None:
        return {**found, "failure": report.findings[0].message[:400]}
    return {
        **found,
        **over_tensor(report.compiled),
        "findings": [str(one) for one in report.findings],
        "compile_seconds": report.compile_seconds,
    }


def over_tensor(step: CompiledStep) -> dict[str, Any]:
    """What a compiler made, as data."""
    moved = [one for one in step.collectives if one.axes == ("tensor",)]
    stand = [one for one in step.scheduled if one.axes == ("tensor",)]
    kinds = {
        kind: {
            "executions": sum(one.count for one in moved if one.kind == kind),
            "result_bytes": sum(one.total_bytes for one in moved if one.kind == kind),
            "in_text": sum(one.kind == kind for one in stand),
            "split": sum(one.kind == kind and one.split for one in stand),
            "with_matmuls_between": sum(one.kind == kind and one.matmuls > 0 for one in stand),
        }
        for kind in sorted({one.kind for one in moved})
    }
    return {
        "collectives_over_tensor": kinds,
        "device_bytes": dict(step.device_bytes),
        "kernel_seconds": step.compute_seconds,
    }


def main() -> None:
    parser = command_line(__doc__, "collective_matmul.json")
    parser.add_argument("topology")
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument(
        "--examples", type=int, default=2, help="examples of each group of devices along tensor"
    )
    parser.add_argument("--form", action="append", help="by default all")
    args = parser.parse_args()
    forms = FORMS["tpu" if topology(args.topology).chip.vendor == "google" else "cuda"]
    before = stored(args.out, "machines")
    key = f"{args.topology}, tensor={args.tensor}, {args.examples} x {args.seq} tokens"
    found = dict(before.get(key, {}))
    for name in args.form or forms:
        found[name] = compiled_form(args, *forms[name])
        print(name, json.dumps(found[name]))
    write(args.out, {"machines": {**before, key: found}})
