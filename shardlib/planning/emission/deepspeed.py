"""The JSON of DeepSpeed (deepspeed/runtime/config.py of deepspeed 0.19.8)."""

from __future__ import annotations

from shardlib.planning.emission.job import Job
from shardlib.untrusted.json_types import JsonObject

_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def deepspeed(job: Job, failures: list[str]) -> JsonObject:
    """The sections of a plan."""
    plan, context = job.plan, job.axis("context")
    if plan.zero and job.axis("data") > 1:
        failures.append(f"zero={plan.zero} on {plan.mesh} (it shards over all ranks)")
    options: JsonObject = {
        "train_batch_size": job.sizes.batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": plan.microbatches,
    }
    if job.sizes.compute_dtype in _HALF:
        options[_HALF[job.sizes.compute_dtype]] = {"enabled": True}
    elif job.sizes.compute_dtype != "float32":
        failures.append(f"matmuls in {job.sizes.compute_dtype} (it has bf16, fp16 and float32)")
    zero: JsonObject = {"stage": plan.zero}
    if plan.zero:
        zero["overlap_comm"] = True
    if "optimizer" in plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    options["zero_optimization"] = zero
    if context > 1:
        options["sequence_parallel_size"] = context
    if plan.remat == "full":
        options["activation_checkpointing"] = {
            "partition_activations": False,
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": False,
            "number_checkpoints": job.sizes.layers,
        }
    return options
