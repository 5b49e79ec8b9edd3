"""Traffic and memory of a training step, beside MaxText's own configuration of the same job.

    python -m benchmarks gradient_traffic [--out results.json]

Every model is planned and compiled ahead of time by the TPU compiler, with parameters, gradients
and optimizer state cut over all chips (ZeRO 3). MaxText and hand-written Flax reduce the gradients
of such parameters whole; here they are to be reduce-scattered. The first rows are Llama-2-7B with a
global batch of 1024 x 2048 on `v5e:16x16`: MaxText's vendor configuration, the same layout from
shardlib, and the planner's free choice. Bytes are those of the results on one chip in one step;
wire bytes what it sends, by ring algorithms.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks.compiled_programs import inputs
from benchmarks.compiling import compiled, decisions
from benchmarks.environment import command_line, show, table, write

_TABLE = table("gradient_traffic")
#: MaxText 0.2, configs/tpu/v5e/llama2_7b.sh (fsdp 256, per-device batch 4, sequences of 2048, remat
#: save_qkv_proj), compiled for v5e-256 ahead of time with the same libtpu by its own train_compile:
#: 26.4 GB of all-gather, 13.5 GB of all-reduce, 9.97 GiB peak.
MAXTEXT = _TABLE["maxtext"]

#: (name, model, topology, batch, seq, pins).
JOBS: tuple[tuple[str, str, str, int, int, dict[str, Any] | None], ...] = _TABLE["jobs"]


def measure(
    name: str, model: str, topology: str, batch: int, seq: int, pin: dict[str, Any] | None
) -> dict[str, Any]:
    """One job as plain data."""
    given = inputs({"model": model, "batch": batch, "seq": seq})
    found = compiled(given, topology, seconds=900, pin=pin)
    job = {"name": name, "topology": topology, "batch": batch, "seq": seq}
    if isinstance(found, str):
        return {**job, "failed": found}
    gb = dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter"), 0.0)
    for c in found.compiled.collectives:
        gb[c.kind] = gb.get(c.kind, 0.0) + c.total_bytes / 1e9
    return {
        **job,
        "plan": decisions(found.plan),
        "gb": gb,
        "wire_gb": found.compiled.wire_bytes / 1e9,
        "peak_gib": found.compiled.device_bytes["peak"] / 2**30,
        "temporaries_gib": found.compiled.device_bytes["temporaries"] / 2**30,
        "compute_seconds": found.compiled.compute_seconds,
        "predicted_peak_gib": found.plan.estimate.device_bytes.peak / 2**30,
        "compile_seconds": found.compile_seconds,
        "versions": dict(found.versions),
    }


def main() -> None:
    args = command_line(__doc__, "gradient_traffic.json").parse_args()
    rows: list[dict[str, Any]] = [MAXTEXT]
    for job in JOBS:
        rows.append(measure(*job))
        show(rows[-1]["name"], rows[-1], "failed", "gb", "wire_gb", "peak_gib", "compute_seconds")
        write(args.out, {"benchmark": "gradient_traffic", "rows": rows}, quiet=True)
