"""The reference transformer that stands for a published model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.environment import table
from benchmarks.published.document import Entry
from shardlib.models.config import Experts, LatentAttention, TransformerConfig

#: Published word -> the reference model's nearest activation; element-wise functions differ by a
#: few operations.
ACTIVATIONS: Mapping[str, str] = table("published_activations")
#: Vocabularies are padded to a multiple of this times the tensor axis (NVIDIA/Megatron-LM
#: `--make-vocab-size-divisible-by`, default 128).
PADDING = 128


def configuration(name: str, spec: Entry, row: Entry, param_dtype: str) -> TransformerConfig:
    """Describes a model as the row runs it.

    Models with experts in every second layer become as many dense layers followed by as many layers
    with experts, and models of which some layers have a window become one whose layers all have the
    window with as many scores: the work of a step is the same.
    """
    heads = int(row.get("heads_override") or spec["heads"])
    overridden = heads != spec["heads"]
    classic = spec["position"] != "rope"
    tensor = int(row["parallel"].get("tp") or 1)
    return TransformerConfig(
        name=name,
        vocab_size=_padded(int(spec["vocab"]), tensor),
        layers=spec["layers"],
        embed=spec["hidden"],
        heads=heads,
        kv_heads=heads if overridden else _kept(spec["kv_heads"], heads),
        head_dim=spec["hidden"] // heads if overridden else spec["head_dim"],
        mlp=spec["ffn_hidden"],
        max_seq=row["seq_len"],
        norm="layer" if classic else "rms",
        activation=ACTIVATIONS[spec["activation"]],
        gated=bool(spec["gated_mlp"]),
        tied=bool(spec["tied_embeddings"]),
        learned_positions=classic,
        qkv_bias=classic and not spec.get("moe"),
        out_bias=classic,
        mlp_bias=classic and not spec.get("moe"),
        sliding_window=_alike(_window(spec, row["seq_len"]), _global_every(spec), row["seq_len"]),
        experts=_experts(spec),
        latent=_latent(spec),
        param_dtype=param_dtype,
        compute_dtype="float16" if row["precision"] == "fp16" else "bfloat16",
    )


def _padded(vocab: int, tensor: int) -> int:
    return (
        vocab if vocab % tensor == 0 else math.ceil(vocab / (PADDING * tensor)) * PADDING * tensor
    )


def _kept(kv_heads: int, heads: int) -> int:
    return kv_heads if heads % kv_heads == 0 else heads


def _window(spec: Entry, seq: int) -> int:
    window = int(
        spec.get("sliding_window")
        or (8192 if str(spec["attention"]).startswith("chunked_8192") else 0)
    )
    return window if window < seq else 0


def _global_every(spec: Entry) -> int:
    return int(
        spec.get("full_attn_every") or (4 if str(spec["attention"]).startswith("chunked") else 0)
    )


def _alike(window: int, every: int, seq: int) -> int:
    """The window with which a layer has the mean scores of a model's layers.

    The kernels that such models were published with leave out what a layer's own window hides;
    in one loop over all layers it is known only while it runs.

    >>> _alike(1024, 6, 32768), _alike(1024, 0, 32768)
    (3790, 1024)
    """
    if not window or not every:
        return window
    mean = seq**2 / 2 / every + (1 - 1 / every) * (seq * window - window**2 / 2)
    return round(seq - math.sqrt(seq**2 - 2 * mean))


def _experts(spec: Entry) -> Experts | None:
    moe: Any = spec.get("moe")
    if not moe:
        return None
    layers, width = spec["layers"], moe["expert_ffn_hidden"]
    dense = (
        moe["first_dense_layers"] if moe["moe_every"] == 1 else layers - layers // moe["moe_every"]
    )
    return Experts(
        count=moe["num_experts"],
        per_token=moe["top_k"],
        mlp=width,
        shared=round((moe["shared_ffn_hidden"] or 0) / width),
        first_dense=dense,
    )


def _latent(spec: Entry) -> LatentAttention | None:
    mla: Any = spec.get("mla")
    return mla and LatentAttention(
        q_lora=mla["q_lora_rank"],
        kv_lora=mla["kv_lora_rank"],
        rope_dim=mla["qk_rope_head_dim"],
        nope_dim=mla["qk_nope_head_dim"],
        v_dim=mla["v_head_dim"],
    )
