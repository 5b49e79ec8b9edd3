"""The `config.json` of a transformer: the first family of Hugging Face whose reader gives the same
transformer back.

What is written is read again, so that no file says anything else than the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardlib.errors import ModelError, ShardlibError
from shardlib.models import huggingface
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import RopeScaling
from shardlib.untrusted.json_types import JsonObject

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}


def described(config: TransformerConfig) -> JsonObject:
    """The content of a `config.json`.

    Args:
        config: of the transformer; in which blocks it attends, and how its experts are balanced
            in training, is said by no file.

    Raises:
        ModelError: no family of Hugging Face has such transformers.
    """
    wanted = _compared(config)
    for family, write in _FAMILIES.items():
        data = {"model_type": family, **write(config), "dtype": config.param_dtype}
        try:
            found = huggingface.read(data, config.name)
        except ShardlibError:
            continue
        if isinstance(found, TransformerConfig) and _compared(found) == wanted:
            return data
    raise ModelError(
        f"{config.name} is a transformer of no family of Hugging Face that is written here:"
        f" {', '.join(_FAMILIES)}\nTry: shardlib.checkpointing.huggingface.save, with the"
        " config.json that the model was made from"
    )


def _compared(config: TransformerConfig) -> TransformerConfig:
    experts = config.experts
    return replace(
        config,
        name="",
        param_dtype="float32",
        compute_dtype="float32",
        attention_block=0,
        query_scale=float(config.query_scale or config.head_dim),
        experts=experts and replace(experts, balance=0.0, z_loss=0.0, bias_rate=0.0),
    )


def _decoder(config: TransformerConfig) -> JsonObject:
    """What all families with rotary positions share."""
    scaling = {"rope_scaling": _scaling(config.rope_scaling)} if config.rope_scaling else {}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": _ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        **scaling,
    }


def _scaling(one: RopeScaling) -> JsonObject:
    low, high = (
        ("beta_slow", "beta_fast")
        if one.kind == "yarn"
        else ("low_freq_factor", "high_freq_factor")
    )
    ends = {low: one.low_frequency, high: one.high_frequency} if one.kind != "linear" else {}
    same = {"mscale": one.scores_factor, "mscale_all_dim": one.scores_factor}
    return {
        "rope_type": one.kind,
        "factor": one.factor,
        "original_max_position_embeddings": one.original_seq,
        **ends,
        **(same if one.scores_factor else {}),
    }


def _llama(config: TransformerConfig) -> JsonObject:
    return {**_decoder(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _mistral(config: TransformerConfig) -> JsonObject:
    return {**_decoder(config), "sliding_window": config.sliding_window or None}


def _qwen3(config: TransformerConfig) -> JsonObject:
    return {**_decoder(config), "attention_bias": config.qkv_bias}


def _gemma(config: TransformerConfig) -> JsonObject:
    return {**_qwen3(config), "hidden_activation": _ACTIVATIONS[config.activation]}


def _gemma2(config: TransformerConfig) -> JsonObject:
    return {
        **_gemma(config),
        "sliding_window": config.sliding_window,
        "query_pre_attn_scalar": int(config.query_scale or config.head_dim),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


def _gemma3(config: TransformerConfig) -> JsonObject:
    return {
        **_gemma2(config),
        "sliding_window_pattern": config.global_every,
        "rope_local_base_freq": config.rope_local_theta,
    }


def _gpt2(config: TransformerConfig) -> JsonObject:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.embed,
        "n_inner": config.mlp,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.max_seq,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
        "tie_word_embeddings": config.tied,
    }


def _mixtral(config: TransformerConfig) -> JsonObject:
    experts = config.experts
    return {
        **_mistral(config),
        **(
            {
                "intermediate_size": experts.mlp,
                "num_local_experts": experts.count,
                "num_experts_per_tok": experts.per_token,
            }
            if experts
            else {}
        ),
    }


def _qwen3_moe(config: TransformerConfig) -> JsonObject:
    experts = config.experts
    return {
        **_qwen3(config),
        **(
            {
                "num_experts": experts.count,
                "num_experts_per_tok": experts.per_token,
                "moe_intermediate_size": experts.mlp,
                "decoder_sparse_step": experts.every,
                "mlp_only_layers": list(range(experts.first_dense)),
                "norm_topk_prob": experts.normalise,
            }
            if experts
            else {}
        ),
    }


_FAMILIES: Mapping[str, Callable[[TransformerConfig], JsonObject]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _decoder,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
