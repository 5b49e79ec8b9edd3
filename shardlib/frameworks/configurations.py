"""The configuration of a plan in the form of its framework, and an error for decisions that the
framework cannot express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w
import yaml

from shardlib.decisions.table import TABLE
from shardlib.errors import PlanError, raise_all
from shardlib.frameworks import framework, framework_profiles, frameworks
from shardlib.layout import BATCH_AXES, MESH_AXES, STORED_AXES
from shardlib.planner.plan import FrameworkJob, Plan
from shardlib.untrusted.data import JsonObject

#: Kind of the slowest links, between slices or hosts.
NETWORK = "network"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan for a framework.

    Attributes:
        plan: the plan.
        sizes: its framework, and the sizes of the job.
    """

    plan: Plan
    sizes: FrameworkJob

    def axis(self, name: str) -> int:
        """The size of a mesh axis; 1 where the mesh has none."""
        return self.plan.mesh[name]

    @property
    def staged(self) -> bool:
        """True if the plan has stages."""
        return self.axis("stage") > 1

    @property
    def local_batch(self) -> int:
        """Examples of a step that one part of the batch has."""
        return self.sizes.batch // math.prod(self.axis(axis) for axis in BATCH_AXES)

    @property
    def micro_batch(self) -> int:
        """Examples of a microbatch that one part of the batch has."""
        return self.local_batch // self.plan.microbatches

    @property
    def stored_over(self) -> int:
        """Devices that parameters, or their optimizer state, are stored sharded over."""
        return math.prod(self.axis(axis) for axis in STORED_AXES)

    @property
    def chunk_layers(self) -> int:
        """Layers of a chunk of a stage."""
        return self.sizes.layers // (self.axis("stage") * self.plan.virtual_stages)

    def network(self, name: str) -> int:
        """The part of a mesh axis that lies on the slowest links."""
        links = dict(self.plan.placement).get(name, ())
        return math.prod(link.ways for link in links if link.kind == NETWORK)

    @property
    def head(self) -> str:
        """One line that says what the configuration is of."""
        plan = self.plan
        return f"shardlib: {plan.model} on {plan.topology}, mesh {plan.mesh}, plan {plan.digest}"

    def indivisible(self) -> list[str]:
        """Lists the sizes that do not divide in a plan that was changed by hand, in words."""
        plan, failures = self.plan, list[str]()
        parts = math.prod(self.axis(axis) for axis in BATCH_AXES) * plan.microbatches
        if self.sizes.batch % parts:
            failures.append(
                f"a batch of {self.sizes.batch} in {plan.microbatches} microbatches on {plan.mesh}"
            )
        chunks = self.axis("stage") * plan.virtual_stages
        if self.staged and self.sizes.layers % chunks:
            failures.append(f"{self.sizes.layers} layers in {chunks} equal chunks")
        return failures


# --------------------------------------------------------------------------------------------------
# The JSON of DeepSpeed (deepspeed/runtime/config.py of deepspeed 0.19.8).

_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def _deepspeed(job: Job, failures: list[str]) -> JsonObject:
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


# --------------------------------------------------------------------------------------------------
# The YAML of Levanter (levanter/trainer.py of levanter 1.2.dev1644): what it says of `trainer` and
# `model`.

#: Logical axes that tensor shards, by the names of levanter/models/llama.py.
_TENSOR: tuple[str, ...] = ("mlp", "kv_head", "vocab")
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def _levanter(job: Job, failures: list[str]) -> JsonObject:
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
    """Returns whether the slowest links are those between slices of TPUs, which JAX numbers."""
    return job.sizes.vendor == "google"


# --------------------------------------------------------------------------------------------------
# The YAML of MaxText (maxtext/configs/base.yml of maxtext 0.2.5), what it says over `base.yml`.

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


def _maxtext(job: Job, failures: list[str]) -> JsonObject:
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
    for tier in ("ici", "dcn"):
        for axis, word in _AXES.items():
            network = job.network(axis)
            size = network if tier == "dcn" else job.axis(axis) // network
            if axis == "tensor" and plan.sequence_parallel:
                options |= {
                    f"{tier}_tensor_parallelism": 1,
                    f"{tier}_tensor_sequence_parallelism": size,
                }
            else:
                options[f"{tier}_{word}_parallelism"] = size
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


# --------------------------------------------------------------------------------------------------
# Flags of Megatron-Core's training script (NVIDIA/Megatron-LM megatron/training/arguments.py of
# megatron-core 0.19.2), for `pretrain_gpt.py`.

#: Context strategies -> --cp-comm-type (megatron/core/transformer/transformer_config.py).
_CONTEXT = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}


def _megatron(job: Job, failures: list[str]) -> JsonObject:
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
        options |= {"expert-model-parallel-size": experts, "expert-tensor-parallel-size": tensor}
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
    """Options of rematerialisation: every layer, or some of each stage."""
    plan = job.plan
    if plan.remat == "none":
        return {}
    layers = plan.remat_layers
    return {
        "recompute-granularity": "full",
        "recompute-method": "block" if layers else "uniform",
        "recompute-num-layers": layers or 1,
    }


# --------------------------------------------------------------------------------------------------
# The TOML of torchtitan 0.2 (torchtitan/config/job_config.py of torchtitan 0.2.2). Later releases
# take the same names as options, `--parallelism.tensor_parallel_degree 8`.

#: Schedules by the names of torch/distributed/pipelining/schedules.py.
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def _torchtitan(job: Job, failures: list[str]) -> JsonObject:
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


# --------------------------------------------------------------------------------------------------
# The configuration of the framework of a plan.


def _flags(job: Job, options: JsonObject) -> str:
    """Options of a command line, one a line; True is a flag alone."""
    lines = [f"# {job.head}"]
    for name, value in options.items():
        lines.append(f"--{name}" if value is True else f"--{name} {value}")
    return "\n".join(lines) + "\n"


def _yaml(job: Job, options: JsonObject) -> str:
    return f"# {job.head}\n{yaml.safe_dump(options, sort_keys=False, width=100)}"


def _toml(job: Job, options: JsonObject) -> str:
    return f"# {job.head}\n{tomli_w.dumps(options)}"


def _json(job: Job, options: JsonObject) -> str:
    return json.dumps(options, indent=1) + "\n"


#: A form -> what makes the options of a plan, adding to a list what they have no word for; and what
#: writes them.
_FORMS: Mapping[
    str, tuple[Callable[[Job, list[str]], JsonObject], Callable[[Job, JsonObject], str]]
] = {
    "megatron": (_megatron, _flags),
    "torchtitan": (_torchtitan, _toml),
    "maxtext": (_maxtext, _yaml),
    "deepspeed": (_deepspeed, _json),
    "levanter": (_levanter, _yaml),
}


def configuration(plan: Plan) -> str:
    """The configuration of a plan's framework: Megatron-Core's flags, torchtitan's TOML, MaxText's
    or Levanter's YAML, DeepSpeed's JSON.

    Raises:
        PlanError: there is no framework, or it cannot express the plan; all reasons are listed.
    """
    sizes = plan.framework
    require_written(sizes.name if sizes is not None else None)
    assert sizes is not None
    job, chosen = Job(plan=plan, sizes=sizes), framework(sizes.name, sizes.vendor)
    failures = [
        *chosen.abilities.refusals(_unusual(plan), {axis: plan.mesh[axis] for axis in MESH_AXES}),
        *job.indivisible(),
    ]
    options, write = _FORMS[chosen.emits]
    written: JsonObject = {} if failures else options(job, failures)
    if failures:
        raise_all(
            PlanError,
            f"{chosen.release} has no words for this plan",
            failures,
            hint="plan again with framework=, which keeps to what it can do",
        )
    return write(job, written)


def require_written(name: str | None) -> None:
    """Raises a `PlanError` if no configuration of a framework can be written.

    Args:
        name: of the framework; None for programs of shardlib.
    """
    entries = frameworks()
    written = ", ".join(entry for entry, its in entries.items() if its.emits)
    if name is None:
        raise PlanError(
            "the plan is made for programs of shardlib, which need no configuration\nTry: 'jax',"
            f" for a file of plain JAX, or a framework, one of {written}"
        )
    able = {
        word
        for entry, its in entries.items()
        if its.emits in _FORMS
        for word in (entry, *its.releases)
    }
    if name in framework_profiles() and name not in able:
        raise PlanError(f"no configuration of {name} is written\nTry: one of {written}")


def _unusual(plan: Plan) -> Mapping[str, Any]:
    """The decisions of a plan that are not defaults, in the words of pins."""
    skipped = ("mesh", "rules", "attention")
    return {
        word: value
        for word, entry in TABLE.items()
        if word not in skipped
        and (value := getattr(plan, word)) != entry.default
        and not (word == "gather" and "stage" not in plan.mesh)
    } | ({"sequence_parallel": plan.sequence_parallel} if "tensor" in plan.mesh else {})
