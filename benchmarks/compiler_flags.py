"""Exposed seconds of compiled programs with compiler flags and without, ahead of time.

    python -m benchmarks compiler_flags [NAME ...] [--sets SET ...] [--redo]

Each plan is compiled for its machine, none of which is there, once per set of options.
`exposed_s` are the seconds of a step in which no kernel runs because of a collective, by the
compiler's schedule (`shardlib.verification.schedule`), `kernels_s` those of its kernels, `peak` the
bytes of a device. `plan` has what the plan itself is compiled with (`plan.compiler_options`,
`docs/flags.md`).
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import shardlib
from benchmarks.compiled_programs import inputs
from benchmarks.environment import command_line, missing, show, source_digest, stored, write
from shardlib.verification.isolation import Limits


def _job(model: str, topology: str, batch: int, seq: int, mesh: dict[str, int]) -> dict[str, Any]:
    pin = {"mesh": mesh, "microbatches": 1, "remat": "full", "zero": 3}
    return {"model": model, "topology": topology, "batch": batch, "seq": seq, "pin": pin}


CASES = {
    "gpt2 h100 fsdp": _job("gpt2-small", "2*h100:8", 64, 1024, {"fsdp": 16}),
    "gpt2 h100 fsdp tensor": _job("gpt2-small", "2*h100:8", 64, 1024, {"fsdp": 4, "tensor": 4}),
    "7b h100 fsdp": _job("llama2-7b", "8*h100:8", 256, 2048, {"fsdp": 64}),
    "7b h100 few fsdp": _job("llama2-7b", "4*h100:8", 128, 2048, {"fsdp": 32}),
    "7b h100 data fsdp": _job("llama2-7b", "8*h100:8", 256, 2048, {"data": 8, "fsdp": 8}),
    "7b h100 fsdp tensor": _job("llama2-7b", "8*h100:8", 256, 2048, {"fsdp": 8, "tensor": 8}),
    "8b h100 fsdp": _job("llama3-8b", "16*h100:8", 256, 4096, {"fsdp": 128}),
    "8b h100 short fsdp": _job("llama3-8b", "8*h100:8", 128, 2048, {"fsdp": 64}),
    "8b h100 fsdp tensor": _job("llama3-8b", "16*h100:8", 256, 4096, {"fsdp": 16, "tensor": 8}),
    "gpt2 v5e fsdp": _job("gpt2-small", "v5e:4x4", 64, 1024, {"fsdp": 16}),
    "gpt2 v5e fsdp tensor": _job("gpt2-small", "v5e:4x4", 64, 1024, {"fsdp": 4, "tensor": 4}),
    "7b v5e fsdp tensor": _job("llama2-7b", "v5e:16x16", 1024, 2048, {"fsdp": 64, "tensor": 4}),
}


def _threshold(mebibytes: int) -> dict[str, int]:
    return {"xla_gpu_all_gather_combine_threshold_bytes": mebibytes << 20}


_PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "nvidia": {
        "none": {},
        "combined 64 MiB": _threshold(64),
        "combined 128 MiB": _threshold(128),
        "pipelined": {f"xla_gpu_enable_pipelined_{kind}": True for kind in _PIPELINED},
        "analytical latencies": {"xla_gpu_enable_analytical_latency_estimator": True},
        "latency hiding off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    },
    "google": {
        "none": {},
        "asynchronous all-reduce": {
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
            "xla_enable_async_all_reduce": True,
        },
        "asynchronous reduce-scatter": {
            "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
            "xla_enable_async_reduce_scatter_fusion": True,
        },
        "data-parallel all-reduce": {
            "xla_tpu_enable_data_parallel_all_reduce_opt": True,
            "xla_tpu_data_parallel_opt_different_sized_ops": True,
        },
        "64 MiB of VMEM": {"xla_tpu_scoped_vmem_limit_kib": 65536},
        "experimental scheduler": {"xla_tpu_enable_all_experimental_scheduler_features": True},
    },
}


def measured(case: dict[str, Any], options: dict[str, Any], plan: shardlib.Plan) -> dict[str, Any]:
    """The figures of one compilation."""
    limits = Limits(seconds=550)
    done = shardlib.verify(**inputs(case), plan=plan, limits=limits, options=options)
    if done.compiled is None or done.compiled.schedule is None:
        return {"failed": str(done.findings[0])[:400]}
    return {
        "exposed_s": done.compiled.schedule.exposed,
        "kernels_s": done.compiled.schedule.kernels,
        "peak": done.compiled.device_bytes["peak"],
        "collectives": sum(collective.count for collective in done.compiled.collectives),
        "versions": dict(done.versions),
    }


def main() -> None:
    parser = command_line(__doc__, "compiler_flags_jax-*.json")
    parser.add_argument("names", nargs="*", default=list(CASES), help="of cases")
    parser.add_argument("--sets", nargs="+", help="of options; by default all of the machine")
    parser.add_argument("--redo", action="store_true")
    args = parser.parse_args()
    rows = stored(args.out, "rows", {})
    source = source_digest("lowering", "tracing", "models", "planner")
    for name in args.names:
        case = CASES[name]
        machine = shardlib.topology(case["topology"])
        plan = shardlib.plan(**inputs(case), topology=machine, pin=case["pin"])
        sets = SETS[machine.chip.vendor]
        asked = {which: sets[which] for which in args.sets or sets}
        row = rows.setdefault(name, {"case": case, "sets": {}})
        row["plan"] = plan.compiler_options
        row["exposed_predicted_s"] = plan.estimate.seconds.exposed
        for which, options in missing(asked.items(), row["sets"], source, redo=args.redo):
            row["sets"][which] = {
                "options": options,
                "source": source,
                **measured(case, options, plan),
            }
            show(f"{name}, {which}", row["sets"][which], "failed", "exposed_s", "kernels_s", "peak")
            write(args.out, {"benchmark": "compiler_flags", "rows": rows}, quiet=True)
