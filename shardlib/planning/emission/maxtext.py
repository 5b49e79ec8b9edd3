"""The YAML of MaxText (maxtext/configs/base.yml of maxtext 0.2.5), what it says over `base.yml`."""

from __future__ import annotations

from shardlib.planning.emission.job import Job
from shardlib.untrusted.json_types import JsonObject

#: Mesh axes -> the word in ici_WORD_parallelism and dcn_WORD_parallelism.
_AXES = {
    "data": "data",
    "stage": "pipeline",
    "fsdp": "fsdp",
    "context": "context",
    "tensor": "tensor",
    "expert": "expert",
}
#: Results of a layer that are kept where nothing is rematerialised, as `remat_policy: custom` names
#: them (base.yml).
_KEPT: tuple[str, ...] = (
    "decoder_layer_input",
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "query_proj",
    "key_proj",
    "value_proj",
    "qkv_proj",
    "out_proj",
)
_REMAT = {"full": "full", "dots": "minimal", "none": "custom"}


def maxtext(job: Job, failures: list[str]) -> JsonObject:
    """The options of a plan."""
    plan = job.plan
    if job.sizes.compute_dtype not in ("bfloat16", "float32"):
        failures.append(f"matmuls in {job.sizes.compute_dtype} (it is planned with bfloat16)")
    if plan.zero == 0 and job.stored_over > 1:
        failures.append(f"zero=0 on {plan.mesh} (parameters are sharded over all of it but data)")
    options: JsonObject = {
        "base_config": "base.yml",
        "hardware": "tpu" if job.sizes.vendor == "google" else "gpu",
    }
    for where in ("ici", "dcn"):
        for axis, word in _AXES.items():
            network = job.network(axis)
            size = network if where == "dcn" else job.axis(axis) // network
            if axis == "tensor" and plan.sequence_parallel:
                options |= {
                    f"{where}_tensor_parallelism": 1,
                    f"{where}_tensor_sequence_parallelism": size,
                }
            else:
                options[f"{where}_{word}_parallelism"] = size
    if job.axis("context") > 1:
        options["context_parallel_strategy"] = "all_gather"
    accumulated = 1 if job.staged else plan.microbatches
    options |= {
        "per_device_batch_size": _whole(job.sizes.batch / plan.mesh.devices / accumulated),
        "gradient_accumulation_steps": accumulated,
        "max_target_length": job.sizes.sequence,
        "dtype": job.sizes.compute_dtype,
        "weight_dtype": "float32",
        "remat_policy": _REMAT[plan.remat],
    }
    if plan.remat == "none":
        options |= dict.fromkeys(_KEPT, "device")
    if job.staged:
        if plan.microbatches % job.axis("stage"):
            failures.append(
                f"{plan.microbatches} microbatches on {job.axis('stage')} stages (a multiple of"
                " the stages)"
            )
        options |= {
            "num_layers_per_pipeline_stage": job.chunk_layers,
            "num_pipeline_repeats": plan.virtual_stages,
            "num_pipeline_microbatches": plan.microbatches,
            "pipeline_fsdp_ag_once": plan.gather == "once",
        }
    return options


def _whole(size: float) -> int | float:
    return int(size) if size == int(size) else size
