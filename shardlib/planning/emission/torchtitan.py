"""The TOML of torchtitan 0.2 (torchtitan/config/job_config.py of torchtitan 0.2.2). Later releases
take the same names as options, `--parallelism.tensor_parallel_degree 8`.
"""

from __future__ import annotations

from shardlib.planning.emission.job import Job
from shardlib.untrusted.json_types import JsonObject

#: Schedules by the names of torch/distributed/pipelining/schedules.py.
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def torchtitan(job: Job, failures: list[str]) -> JsonObject:
    """The sections of a plan."""
    plan, tensor = job.plan, job.axis("tensor")
    if job.sizes.compute_dtype not in ("bfloat16", "float32"):
        failures.append(f"matmuls in {job.sizes.compute_dtype} (it has bfloat16 and float32)")
    if plan.zero == 0 and job.stored_over > 1:
        failures.append(f"zero=0 on {plan.mesh} (what is sharded over more than data is FSDP)")
    parallelism: JsonObject = {
        "data_parallel_replicate_degree": job.axis("data"),
        "data_parallel_shard_degree": job.axis("fsdp") * job.axis("expert"),
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": tensor,
        "context_parallel_degree": job.axis("context"),
        "pipeline_parallel_degree": job.axis("stage"),
    }
    if job.axis("context") > 1:
        parallelism["context_parallel_rotate_method"] = "allgather"
    if job.sizes.experts > 1:
        parallelism |= {
            "expert_parallel_degree": job.axis("expert"),
            "expert_tensor_parallel_degree": tensor if job.axis("expert") > 1 else 1,
        }
    if job.staged:
        parallelism |= {
            "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": job.micro_batch,
            "pipeline_parallel_layers_per_stage": job.chunk_layers,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    return {
        "training": {
            "local_batch_size": job.local_batch if job.staged else job.micro_batch,
            "global_batch_size": job.sizes.batch,
            "seq_len": job.sizes.sequence,
            "dtype": "float32",
            "mixed_precision_param": job.sizes.compute_dtype,
            "mixed_precision_reduce": "float32",
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": plan.remat},
        "compile": {"enable": True, "components": ["model", "loss"]},
    }
