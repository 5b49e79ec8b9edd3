"""The `config.json` of a transformer: the first family of Hugging Face whose reader gives the same
transformer back.

What is written is read again, so that no file says anything else than the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from shardlib.errors import ModelError, ShardlibError
from shardlib.models import huggingface
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import RopeScaling
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig
from shardlib.untrusted.json_types import JsonObject

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}


def described(config: TransformerConfig | EncoderDecoderConfig) -> JsonObject:
    """The content of a `config.json`."""
    reference = _compared(config)
    for family, candidate in _candidates(config):
        data = {"model_type": family, **candidate, "dtype": config.param_dtype}
        try:
            parsed = huggingface.read(data, config.name)
        except ShardlibError:
            continue
        if _compared(parsed) == reference:
            return data
    families = ", ".join([*_FAMILIES, "switch_transformers"])
    raise ModelError(
        f"{config.name} is a transformer of no family of Hugging Face that is written here:"
        f" {families}\nTry: shardlib.checkpointing.huggingface.save, with the config.json that the"
        " model was made from"
    )


def _candidates(
    config: TransformerConfig | EncoderDecoderConfig,
) -> Iterator[tuple[str, JsonObject]]:
    """What each family would say of a transformer."""
    if isinstance(config, EncoderDecoderConfig):
        yield "switch_transformers", _switch(config)
        return
    for family, write in _FAMILIES.items():
        yield family, write(config)


def _compared(
    config: TransformerConfig | EncoderDecoderConfig,
) -> TransformerConfig | EncoderDecoderConfig:
    """Without what files do not say."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, balance=0.0, z_loss=0.0, bias_rate=0.0)
    plain = {"name": "", "param_dtype": "float32", "compute_dtype": "float32", "experts": experts}
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, **plain)
    scale = float(config.query_scale or config.head_dim)
    return replace(config, **plain, attention_block=0, query_scale=scale)


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


def _scaling(scaling: RopeScaling) -> JsonObject:
    low, high = (
        ("beta_slow", "beta_fast")
        if scaling.kind == "yarn"
        else ("low_freq_factor", "high_freq_factor")
    )
    ends = (
        {low: scaling.low_frequency, high: scaling.high_frequency}
        if scaling.kind != "linear"
        else {}
    )
    same = {"mscale": scaling.scores_factor, "mscale_all_dim": scaling.scores_factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq,
        **ends,
        **(same if scaling.scores_factor else {}),
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


def _qwen2_moe(config: TransformerConfig) -> JsonObject:
    experts = config.experts
    if experts is None:
        return _decoder(config)
    return {
        **_qwen3_moe(config),
        "shared_expert_intermediate_size": experts.shared * experts.mlp,
        "qkv_bias": config.qkv_bias,
    }


def _deepseek(config: TransformerConfig) -> JsonObject:
    latent, experts = config.latent, config.experts
    data = _decoder(config)
    if latent is None or experts is None:
        return data
    del data["head_dim"]  # follows from the widths below
    method = "group_limited_greedy" if experts.groups > 1 else "greedy"
    return {
        **data,
        "q_lora_rank": latent.q_lora or None,
        "kv_lora_rank": latent.kv_lora,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.v_dim,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.first_dense,
        "scoring_func": experts.router,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scaling,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "topk_method": "noaux_tc" if experts.bias else method,
    }


def _switch(config: EncoderDecoderConfig) -> JsonObject:
    experts = config.experts
    word = "gelu" if config.gated and config.activation == "gelu_tanh" else config.activation
    word = {"gelu_tanh": "gelu_new"}.get(word, word)
    layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    intervals = {"encoder": config.encoder_every, "decoder": config.decoder_every}
    content: JsonObject = {
        "vocab_size": config.vocab_size,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "d_model": config.embed,
        "num_heads": config.heads,
        "d_kv": config.head_dim,
        "d_ff": config.mlp,
        "n_positions": config.max_seq,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": f"gated-{word}" if config.gated else word,
        "tie_word_embeddings": config.tied,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }
    for which, count in layers.items():
        content[f"num_sparse_{which}_layers"] = count // intervals[which] if intervals[which] else 0
    if experts is not None:
        content |= {"num_experts": experts.count, "expert_capacity": experts.sequence_capacity}
    return content


_FAMILIES: Mapping[str, Callable[[TransformerConfig], JsonObject]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _decoder,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
