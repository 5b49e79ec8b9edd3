"""Families with a dense feed-forward: Llama, Mistral, Qwen, Gemma, GPT-2."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.models.config_parts import RopeScaling
from shardlib.models.families.keys import Keys
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import Json, JsonObject

ACTIVATIONS_BY_NAME: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def decoder(keys: Keys, **special: Json) -> JsonObject:
    """What all families with rotary positions and a gated feed-forward share."""
    embed, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    theta, scaling = _rope(keys)
    return {
        "vocab_size": keys.need("vocab_size"),
        "layers": keys.need("num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": keys.get("num_key_value_heads", heads),
        "head_dim": keys.get("head_dim", embed // heads),
        "mlp": keys.need("intermediate_size"),
        "max_seq": keys.get("max_position_embeddings", 4096),
        "norm_epsilon": keys.get("rms_norm_eps", 1e-6),
        "activation": activation_of(keys, "hidden_act", "silu"),
        "tied": keys.get("tie_word_embeddings", False),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **special,
    }


def activation_of(keys: Keys, key: str, default: str) -> str:
    """Name of the activation in our words; unknown ones are refused at the end."""
    word = keys.get(key, default)
    keys.refuse(
        word not in ACTIVATIONS_BY_NAME,
        f"{key} {shown(word)}; known are {', '.join(sorted(ACTIVATIONS_BY_NAME))}",
    )
    return ACTIVATIONS_BY_NAME.get(word, "silu")


def _rope(keys: Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling` or from the newer
    `rope_parameters`.
    """
    parameters = keys.part("rope_parameters")
    parameters = (
        parameters.part("full_attention") if "full_attention" in parameters.data else parameters
    )
    theta = float(parameters.get("rope_theta", 0.0) or keys.get("rope_theta", 10000.0))
    data = parameters if keys.data.get("rope_scaling") is None else keys.part("rope_scaling")
    kind = data.get("rope_type", data.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        keys.refuse(True, f"rope scaling {shown(kind)}; known are default, linear, llama3, yarn")
        return theta, None
    low, high = (
        ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    )
    return theta, RopeScaling(
        kind=kind,
        factor=float(data.get("factor", 1.0)),
        original_seq=data.get("original_max_position_embeddings", 0)
        or keys.get("max_position_embeddings", 8192),
        low_frequency=float(data.get(low, 1.0)),
        high_frequency=float(data.get(high, 32.0 if kind == "yarn" else 4.0)),
        scores_factor=float(data.get("mscale_all_dim", 0.0)),
    )


def llama(keys: Keys) -> JsonObject:
    attention_bias = keys.get("attention_bias", False)
    return decoder(
        keys, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=keys.get("mlp_bias", False)
    )


def mistral(keys: Keys) -> JsonObject:
    return decoder(keys, sliding_window=keys.get("sliding_window", 0))


def qwen_window(keys: Keys) -> None:
    keys.refuse(
        keys.get("use_sliding_window", False),
        "use_sliding_window true, a window in some layers only",
    )


def qwen2(keys: Keys) -> JsonObject:
    qwen_window(keys)
    return decoder(keys, qkv_bias=True)


def qwen3(keys: Keys) -> JsonObject:
    qwen_window(keys)
    bias = keys.get("attention_bias", False)
    return decoder(
        keys, qk_norm=True, qkv_bias=bias, out_bias=bias, head_dim=keys.get("head_dim", 128)
    )


def gemma(keys: Keys, **special: Json) -> JsonObject:
    bias = keys.get("attention_bias", False)
    activation = activation_of(keys, "hidden_activation", "gelu_pytorch_tanh")
    return decoder(
        keys,
        **{
            "norm_offset": True,
            "embed_scale": True,
            "tied": keys.get("tie_word_embeddings", True),
            "qkv_bias": bias,
            "out_bias": bias,
            "activation": activation,
            "head_dim": keys.get("head_dim", 256),
            **special,
        },
    )


def gemma2(keys: Keys) -> JsonObject:
    return gemma(
        keys,
        post_norms=True,
        sliding_window=keys.get("sliding_window", 4096),
        global_every=2,
        query_scale=float(keys.get("query_pre_attn_scalar", 256)),
        attention_softcap=keys.get("attn_logit_softcapping", 0.0),
        logit_softcap=keys.get("final_logit_softcapping", 0.0),
    )


def gemma3(keys: Keys) -> JsonObject:
    """Gemma 3; the multimodal files hold the text model in `text_config`, without what equals
    `Gemma3TextConfig`'s defaults.
    """
    if isinstance(keys.data.get("text_config"), Mapping):
        defaults = {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        }
        keys.data = {**defaults, **keys.data["text_config"]}
    keys.data.setdefault("rope_theta", 1e6)
    local = keys.part("rope_parameters").part("sliding_attention").get(
        "rope_theta", 0.0
    ) or keys.get("rope_local_base_freq", 10000.0)
    return gemma(
        keys,
        post_norms=True,
        qk_norm=True,
        sliding_window=keys.get("sliding_window", 4096),
        global_every=keys.get("sliding_window_pattern", keys.get("_sliding_window_pattern", 6)),
        rope_local_theta=float(local),
        query_scale=float(keys.get("query_pre_attn_scalar", 256)),
        attention_softcap=keys.get("attn_logit_softcapping", 0.0),
        logit_softcap=keys.get("final_logit_softcapping", 0.0),
    )


def gpt2(keys: Keys) -> JsonObject:
    embed, heads = keys.need("n_embd"), keys.need("n_head")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        keys.refuse(keys.get(key, False), f"{key} true")
    return {
        "vocab_size": keys.need("vocab_size"),
        "layers": keys.need("n_layer"),
        "embed": embed,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": embed // heads,
        "mlp": keys.get("n_inner", 4 * embed),
        "max_seq": keys.get("n_positions", 1024),
        "norm": "layer",
        "norm_epsilon": keys.get("layer_norm_epsilon", 1e-5),
        "activation": activation_of(keys, "activation_function", "gelu_new"),
        "gated": False,
        "tied": keys.get("tie_word_embeddings", True),
        "learned_positions": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }
