"""Device-hours that published runs took, beside those that plans of this library predict, and the
model that `shardlib fit-model` finds for the same machine and days.

    python -m benchmarks booked_runs [--hours] --out benchmarks/results/booked_runs.json

A published number is what a run took with everything in it: failures, evaluation, and a plan that
people chose. A predicted one is the best plan of this library for one program of JAX, without
failures. So it should be below, by about the ratio of the utilisations.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")


import shardlib
from benchmarks.compiling import inputs
from benchmarks.environment import command_line, show, write
from shardlib.launch import booking
from shardlib.models.config import TransformerConfig
from shardlib.models.presets import PRESETS


def _llama1(name: str, layers: int, embed: int, heads: int, mlp: int) -> TransformerConfig:
    """arXiv:2302.13971, table 2; feed-forward of the released code."""
    known = PRESETS["llama2-7b"]
    assert isinstance(known, TransformerConfig)
    shape = {"layers": layers, "embed": embed, "heads": heads, "kv_heads": heads, "mlp": mlp}
    return replace(known, name=name, max_seq=2048, **shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: its machine, and the GPU-hours that it took.

    Attributes:
        assumed: what the source does not say.
    """

    model: TransformerConfig
    topology: str
    batch: int
    seq: int
    tokens: float
    hours: float
    source: str
    assumed: str = ""
    fitted: bool = False


def _preset(name: str) -> TransformerConfig:
    known = PRESETS[name]
    assert isinstance(known, TransformerConfig)
    return known


LLAMA1 = "arXiv:2302.13971, tables 2 and 15: 4M tokens a batch, A100-80GB"
LLAMA2 = "arXiv:2307.09288, tables 1 and 2: 4M tokens a batch, A100-80GB"
LLAMA3 = "Llama 3.1 model card: H100-80GB hours; arXiv:2407.21783, table 4: the machine"
RUNS = (
    Run(model=_llama1("llama-7b", 32, 4096, 32, 11008), topology="128*a100:8", batch=2048, seq=2048,
        tokens=1e12, hours=82_432, source=LLAMA1, assumed="1,024 GPUs"),
    Run(model=_llama1("llama-65b", 80, 8192, 64, 22016), topology="256*a100:8", batch=2048, seq=2048,
        tokens=1.4e12, hours=1_022_362, source=f"{LLAMA1}; section 2.4: 2,048 GPUs", fitted=True),
    Run(model=_preset("llama2-7b"), topology="128*a100:8", batch=1024, seq=4096, tokens=2e12,
        hours=184_320, source=LLAMA2, assumed="1,024 GPUs", fitted=True),
    Run(model=_preset("llama2-70b"), topology="256*a100:8", batch=1024, seq=4096, tokens=2e12,
        hours=1_720_320, source=LLAMA2, assumed="2,048 GPUs (`up to 2000` in section 2.2.1)"),
    Run(model=_preset("llama3-405b"), topology="2048*h100:8", batch=2048, seq=8192, tokens=15.6e12,
        hours=30_840_000, source=LLAMA3, assumed="16M tokens a batch throughout", fitted=True),
)  # fmt: skip


def measure(run: Run, *, fit: bool) -> dict[str, Any]:
    """A published run beside its plan, and, where asked, beside the model that fits its days."""
    plan = shardlib.plan(**inputs(run.model, run.batch, run.seq), topology=run.topology)
    cost = plan.run_cost(run.tokens)
    devices = shardlib.topology(run.topology).devices
    row: dict[str, Any] = {
        "model": run.model.name,
        "topology": run.topology,
        "tokens": run.tokens,
        "source": run.source,
        "assumed": run.assumed,
        "published_device_hours": run.hours,
        "predicted_device_hours": cost.device_hours,
        "ratio": cost.device_hours / run.hours,
        "mfu": plan.estimate.mfu,
        "mesh": str(plan.mesh),
    }
    if run.fitted and fit:
        started = time.perf_counter()
        days = run.hours / devices / 24
        budget = booking.Budget(
            deadline=days * booking.DAY,
            tokens_per_parameter=run.tokens / run.model.parameter_count(),
        )
        found = booking.fit_model(
            run.model, topology=run.topology, budget=budget, batch=run.batch, seq=run.seq
        )
        parameters = found.best.config.parameter_count()
        row["fitted"] = {
            "days": days,
            "tokens_per_parameter": budget.tokens_per_parameter,
            "parameters": parameters,
            "published_parameters": run.model.parameter_count(),
            "ratio": parameters / run.model.parameter_count(),
            "proven": found.proven,
            "certificate": found.certificate,
            "seconds": time.perf_counter() - started,
        }
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="store the figures")
    parser.add_argument("--hours", action="store_true", help="device-hours only, no models fitted")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for run in RUNS:
        rows.append(measure(run, fit=not options.hours))
        show(run.model.name, rows[-1], "topology", "predicted_device_hours", "ratio", "fitted")
    if options.out is not None:
        write(options.out, {"runs": rows})
