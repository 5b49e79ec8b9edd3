"""Flags of Megatron-Core's training script (NVIDIA/Megatron-LM megatron/training/arguments.py of
megatron-core 0.19.2), for `pretrain_gpt.py`.
"""

from __future__ import annotations

from shardlib.planning.emission.job import Job
from shardlib.untrusted.json_types import JsonObject

#: Context strategies -> --cp-comm-type (megatron/core/transformer/transformer_config.py).
_CONTEXT = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}
_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def megatron(job: Job, failures: list[str]) -> JsonObject:
    """The options of a plan, by the names of flags."""
    plan, tensor, stages = job.plan, job.axis("tensor"), job.axis("stage")
    context, experts = job.axis("context"), job.axis("expert")
    options: JsonObject = {
        "tensor-model-parallel-size": tensor,
        "pipeline-model-parallel-size": stages,
        "context-parallel-size": context,
    }
    if tensor > 1 and plan.sequence_parallel:
        options["sequence-parallel"] = True
    if context > 1:
        options["cp-comm-type"] = _CONTEXT[plan.context]
    if job.sizes.experts > 1:
        options |= {
            "expert-model-parallel-size": experts,
            "expert-tensor-parallel-size": tensor,
        }
    if plan.virtual_stages > 1:
        options["num-virtual-stages-per-pipeline-rank"] = plan.virtual_stages
    options |= {
        "micro-batch-size": job.micro_batch,
        "global-batch-size": job.sizes.batch,
        "seq-length": job.sizes.sequence,
    }
    if plan.zero:
        options |= {
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "overlap-param-gather": True,
        }
        if job.axis("data") > 1:
            options["num-distributed-optimizer-instances"] = job.axis("data")
    options |= _recompute(job)
    if job.sizes.compute_dtype in _HALF:
        options[_HALF[job.sizes.compute_dtype]] = True
    elif job.sizes.compute_dtype != "float32":
        failures.append(f"matmuls in {job.sizes.compute_dtype} (it has bf16, fp16 and float32)")
    return options


def _recompute(job: Job) -> JsonObject:
    """What is rematerialised: every layer, or some of each stage."""
    plan = job.plan
    if plan.remat == "none":
        return {}
    some = plan.remat_layers
    return {
        "recompute-granularity": "full",
        "recompute-method": "block" if some else "uniform",
        "recompute-num-layers": some or 1,
    }
