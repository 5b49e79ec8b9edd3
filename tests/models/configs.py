"""Published `config.json` files (the keys that matter) with the parameter counts that their model
cards give.
"""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
            "hidden_act": "silu",
            "rope_scaling": None,
        },
        6_738_415_616,
    ),
    "llama-3.1-8b": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
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
        8_030_261_248,
    ),
    "mistral-7b": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        46_702_792_704,
    ),
    "qwen2-7b": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 131072,
        },
        7_615_616_512,
    ),
    "qwen3-8b": (
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "vocab_size": 151936,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        8_190_735_360,
    ),
    "qwen1.5-moe-a2.7b": (
        {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "vocab_size": 151936,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        14_315_784_192,
    ),
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        30_532_122_624,
    ),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "vocab_size": 256000,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_act": "gelu",
        },
        2_506_172_416,
    ),
    "gemma-2-9b": (
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "vocab_size": 256000,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        9_241_705_984,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "vocab_size": 262144,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        999_885_952,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "deepseek-v2-lite": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "vocab_size": 102400,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
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
        15_706_484_224,
    ),
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "vocab_size": 129280,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
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
        671_026_419_200 - 58 * 256,
    ),  # less the routers' correction biases
}

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
