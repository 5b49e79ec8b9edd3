"""The YAML of Levanter (levanter/trainer.py of levanter 1.2.dev1644): what it says of `trainer` and
`model`.
"""

from __future__ import annotations

from shardlib.planning.emission.job import Job
from shardlib.untrusted.json_types import JsonObject

#: Logical axes that tensor shards, by the names of levanter/models/llama.py.
_TENSOR: tuple[str, ...] = ("mlp", "kv_head", "vocab")
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def levanter(job: Job, failures: list[str]) -> JsonObject:
    """The sections of a plan."""
    plan, tensor = job.plan, job.axis("tensor")
    dtype = _SHORT.get(job.sizes.compute_dtype)
    if dtype is None:
        failures.append(f"matmuls in {job.sizes.compute_dtype} (it has {', '.join(_SHORT)})")
    slices = {axis: job.network(axis) for axis in plan.mesh} if _slices(job) else {}
    if slices.get("tensor", 1) > 1:
        failures.append(f"tensor={tensor} between slices (its axis model is within one)")
    replicas = slices.get("data", 1)
    trainer: JsonObject = {
        "mp": f"p=f32,c={dtype}",
        "train_batch_size": job.sizes.batch,
        "per_device_parallelism": job.micro_batch,
        "replica_ici_axis_size": job.axis("data") // replicas,
        "replica_dcn_axis_size": replicas,
        "model_axis_size": tensor,
        "fsdp_axis": "embed" if plan.zero else None,
    }
    if tensor > 1:
        trainer["tensor_parallel_axes"] = list(_TENSOR)
    return {
        "trainer": trainer,
        "model": {"seq_len": job.sizes.sequence, "gradient_checkpointing": plan.remat == "full"},
    }


def _slices(job: Job) -> bool:
    """Whether the slowest links are those between slices of TPUs, which JAX numbers."""
    return job.sizes.vendor == "google"
