"""Published `config.json` files (the keys that matter) with the parameter counts that their model
cards give.
"""

from __future__ import annotations

from typing import Any

from shardlib.models.config import TransformerConfig

#: A decoder that compiles quickly.
TINY = TransformerConfig(
    name="tiny",
    vocab_size=32,
    layers=3,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    max_seq=32,
    compute_dtype="float32",
)
#: Type, hidden size, width of the MLP, layers, vocabulary, heads, heads of keys and values (None: as
#: many), and parameters.
SIZES = {
    "llama-2-7b": ("llama", 4096, 11008, 32, 32000, 32, None, 6_738_415_616),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 128256, 32, 8, 8_030_261_248),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32000, 32, 8, 7_241_732_096),
    "mixtral-8x7b": ("mixtral", 4096, 14336, 32, 32000, 32, 8, 46_702_792_704),
    "qwen2-7b": ("qwen2", 3584, 18944, 28, 152064, 28, 4, 7_615_616_512),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 151936, 32, 8, 8_190_735_360),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", 2048, 5632, 24, 151936, 16, 16, 14_315_784_192),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 6144, 48, 151936, 32, 4, 30_532_122_624),
    "gemma-2b": ("gemma", 2048, 16384, 18, 256000, 8, 1, 2_506_172_416),
    "gemma-2-9b": ("gemma2", 3584, 14336, 42, 256000, 16, 8, 9_241_705_984),
    "gemma-3-1b": ("gemma3_text", 1152, 6912, 26, 262144, 4, 1, 999_885_952),
    "deepseek-v2-lite": ("deepseek_v2", 2048, 10944, 27, 102400, 16, 16, 15_706_484_224),
    # less the routers' correction biases, 58 of 256
    "deepseek-v3": ("deepseek_v3", 7168, 18432, 61, 129280, 128, 128, 671_026_404_352),
}
#: Other keys of their files.
MORE: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"hidden_act": "silu", "rope_scaling": None},
    "llama-3.1-8b": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral-7b": {"sliding_window": 4096},
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2-7b": {"use_sliding_window": False, "sliding_window": 131072},
    "qwen3-8b": {"head_dim": 128},
    "qwen1.5-moe-a2.7b": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3-30b-a3b": {
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gemma-2b": {"head_dim": 256, "hidden_act": "gelu"},
    "gemma-2-9b": {
        "head_dim": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    "gemma-3-1b": {"head_dim": 256, "sliding_window": 512},
    "deepseek-v2-lite": {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek-v3": {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}
_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
#: Name -> configuration, parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    name: (
        {key: value for key, value in zip(_KEYS, sizes, strict=True) if value is not None}
        | MORE.get(name, {}),
        count,
    )
    for name, (*sizes, count) in SIZES.items()
} | {"gpt2": (_GPT2, 124_439_808)}

_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "head_dim": 4,
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 32,
    "sliding_window": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32,
}


def tiny(name: str) -> dict[str, Any]:
    """A published configuration with small numbers in place of its large ones."""
    data, _ = PUBLISHED[name]
    small = {
        key: _SMALL[key] if key in _SMALL and value is not None else value
        for key, value in data.items()
    }
    if "num_key_value_heads" in data:
        small["num_key_value_heads"] = (
            4
            if data["num_key_value_heads"] == data["num_attention_heads"]
            else min(2, data["num_key_value_heads"])
        )
    if data.get("q_lora_rank"):
        small["q_lora_rank"] = 8
    if data.get("n_group", 1) > 1:
        small |= {"n_group": 4, "topk_group": 2}
    return small
