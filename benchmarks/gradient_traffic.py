"""What does a training step send, and how much memory does it take, beside MaxText's own
configuration of the same job?

    python benchmarks/gradient_traffic.py [--out results.json]

Every model is planned and compiled ahead of time by the TPU compiler, with parameters, gradients
and optimizer state cut over all chips (ZeRO 3). MaxText and hand-written Flax reduce the gradients
of such parameters whole; here they are to be reduce-scattered. The first rows are Llama-2-7B with a
global batch of 1024 x 2048 on `v5e:16x16`: MaxText's vendor configuration, the same layout from
shardlib, and the planner's free choice. Bytes are those of the results on one chip in one step;
wire bytes what it sends, by ring algorithms.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import shardlib
from benchmarks.compiled_programs import inputs
from benchmarks.environment import RESULTS, command_line, environment
from shardlib.verification.isolation import Limits

#: MaxText 0.2, configs/tpu/v5e/llama2_7b.sh (fsdp 256, per-device batch 4, sequences of 2048, remat
#: save_qkv_proj), compiled for v5e-256 ahead of time with the same libtpu by its own train_compile:
#: 26.4 GB of all-gather, 13.5 GB of all-reduce, 9.97 GiB peak.
MAXTEXT = {
    "name": "llama2-7b, MaxText fsdp=256",
    "topology": "v5e:16x16",
    "batch": 1024,
    "seq": 2048,
    "peak_gib": 9.966,
    "gb": {"all-gather": 26.4, "all-reduce": 13.5, "reduce-scatter": 0.0},
    "wire_gb": 26.4 + 2 * 13.5,
}

#: (name, model, topology, batch, seq, pins).
JOBS: tuple[tuple[str, str, str, int, int, dict[str, Any] | None], ...] = (
    (
        "llama2-7b, the same layout",
        "llama2-7b",
        "v5e:16x16",
        1024,
        2048,
        {"mesh": {"fsdp": 256}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
    ("llama2-7b, the planner's choice", "llama2-7b", "v5e:16x16", 1024, 2048, None),
    (
        "gpt2-small",
        "gpt2-small",
        "v5e:4x4",
        64,
        1024,
        {"mesh": {"fsdp": 16}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
    (
        "llama3-8b",
        "llama3-8b",
        "v5e:16x16",
        256,
        4096,
        {"mesh": {"fsdp": 256}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
    (
        "llama3-8b, 128 chips in three dims",
        "llama3-8b",
        "v5p:4x4x8",
        256,
        4096,
        {"mesh": {"fsdp": 128}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
    (
        "llama2-70b",
        "llama2-70b",
        "v5p:4x4x8",
        256,
        4096,
        {"mesh": {"fsdp": 128}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
    (
        "llama3-70b",
        "llama3-70b",
        "v5p:8x8x8",
        512,
        4096,
        {"mesh": {"fsdp": 512}, "zero": 3, "microbatches": 1, "remat": "full"},
    ),
)


def measure(
    name: str, model: str, topology: str, batch: int, seq: int, pin: dict[str, Any] | None
) -> dict[str, Any]:
    """One job as plain data."""
    given = inputs({"model": model, "batch": batch, "seq": seq})
    found = shardlib.verify(**given, topology=topology, pin=pin, limits=Limits(seconds=900))
    job = {"name": name, "topology": topology, "batch": batch, "seq": seq}
    if found.compiled is None:
        return {**job, "failed": str(found.findings[0])}
    gb = dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter"), 0.0)
    for c in found.compiled.collectives:
        gb[c.kind] = gb.get(c.kind, 0.0) + c.total_bytes / 1e9
    return {
        **job,
        "plan": {
            "mesh": dict(found.plan.mesh),
            **{key: found.plan.decisions[key] for key in ("zero", "remat", "microbatches")},
        },
        "gb": gb,
        "wire_gb": found.compiled.wire_bytes / 1e9,
        "peak_gib": found.compiled.device_bytes["peak"] / 2**30,
        "temporaries_gib": found.compiled.device_bytes["temporaries"] / 2**30,
        "compute_seconds": found.compiled.compute_seconds,
        "predicted_peak_gib": found.plan.estimate.device_bytes.peak / 2**30,
        "compile_seconds": found.compile_seconds,
        "versions": dict(found.versions),
    }


def line(row: dict[str, Any]) -> str:
    """A job in one line for people."""
    if "failed" in row:
        return f"{row['name']:36s} failed: {row['failed'].splitlines()[0][:200]}"
    gb = row["gb"]
    saved = (
        f"{1 - row['wire_gb'] / MAXTEXT['wire_gb']:8.1%}"
        if row["name"].startswith("llama2-7b")
        else ""
    )
    return (
        f"{row['name']:36s} {row['topology']:>10s} {gb['all-gather']:8.2f}"
        f" {gb['reduce-scatter']:8.2f} {gb['all-reduce']:8.2f} {row['wire_gb']:8.2f}"
        f" {row['peak_gib']:7.2f} {row.get('compute_seconds', 0):8.3f} {saved}"
    )


def main() -> None:
    """Measures every job and prints the table."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "gradient_traffic.json")
    args = parser.parse_args()
    print(
        f"{'':36s} {'':>10s} {'gather':>8s} {'scatter':>8s} {'reduce':>8s} {'wire GB':>8s}"
        f" {'GiB':>7s} {'kernels':>8s} under MaxText"
    )
    rows: list[dict[str, Any]] = [MAXTEXT]
    print(line(MAXTEXT), flush=True)
    for job in JOBS:
        rows.append(measure(*job))
        print(line(rows[-1]), flush=True)
    args.out.write_text(
        json.dumps({**environment(), "benchmark": "gradient_traffic", "rows": rows}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
