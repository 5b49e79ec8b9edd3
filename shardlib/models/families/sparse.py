"""Families with mixtures of experts: Mixtral, Qwen MoE, DeepSeek, Switch Transformers."""

from __future__ import annotations

from shardlib.models.config_parts import Experts, LatentAttention
from shardlib.models.families.dense import ACTIVATIONS_BY_NAME, decoder, qwen2, qwen3
from shardlib.models.families.keys import Keys
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import JsonObject


def mixtral(keys: Keys) -> JsonObject:
    keys.data = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **keys.data}
    return decoder(
        keys,
        sliding_window=keys.get("sliding_window", 0),
        experts=Experts(
            count=keys.need("num_local_experts"),
            per_token=keys.need("num_experts_per_tok"),
            mlp=keys.need("intermediate_size"),
            balance=keys.get("router_aux_loss_coef", 0.001),
        ),
    )


def _qwen_experts(keys: Keys, shared: int, normalise: bool) -> Experts:
    interval, dense = keys.get("decoder_sparse_step", 1), sorted(keys.get("mlp_only_layers", []))
    first = len(dense) if dense == list(range(len(dense))) and len(dense) % interval == 0 else 0
    keys.refuse(
        first != len(dense),
        f"mlp_only_layers {shown(dense)}; they can be the first layers, a multiple of"
        f" decoder_sparse_step {interval}",
    )
    width = keys.need("moe_intermediate_size")
    keys.refuse(
        shared % width, f"shared experts of width {shared}, no multiple of the experts' {width}"
    )
    return Experts(
        count=keys.need("num_experts"),
        per_token=keys.need("num_experts_per_tok"),
        mlp=width,
        first_dense=first,
        every=interval,
        shared=shared // width,
        shared_gate=bool(shared),
        normalise=keys.get("norm_topk_prob", normalise),
        balance=keys.get("router_aux_loss_coef", 0.001),
    )


def qwen2_moe(keys: Keys) -> JsonObject:
    return {
        **qwen2(keys),
        "experts": _qwen_experts(
            keys, keys.need("shared_expert_intermediate_size", minimum=0), False
        ),
    }


def qwen3_moe(keys: Keys) -> JsonObject:
    keys.data.setdefault(
        "num_experts", keys.data.get("num_local_experts")
    )  # as newer versions of transformers call it
    return {**qwen3(keys), "experts": _qwen_experts(keys, 0, False)}


def _deepseek(keys: Keys, router: str, normalise: bool, group_score: int) -> JsonObject:
    latent = LatentAttention(
        q_lora=keys.get("q_lora_rank", 0),
        kv_lora=keys.need("kv_lora_rank"),
        rope_dim=keys.need("qk_rope_head_dim"),
        nope_dim=keys.need("qk_nope_head_dim"),
        v_dim=keys.need("v_head_dim"),
    )
    bias = keys.get("attention_bias", False)
    keys.refuse(bias, "attention_bias true with latent attention")
    keys.refuse(
        keys.get("moe_layer_freq", 1) != 1, f"moe_layer_freq {keys.get('moe_layer_freq', 1)}"
    )
    method = keys.get("topk_method", "noaux_tc" if router == "sigmoid" else "greedy")
    grouped = method != "greedy"
    experts = Experts(
        count=keys.need("n_routed_experts"),
        per_token=keys.need("num_experts_per_tok"),
        mlp=keys.need("moe_intermediate_size"),
        shared=keys.get("n_shared_experts", 0),
        first_dense=keys.get("first_k_dense_replace", 0),
        router=keys.get("scoring_func", router),
        normalise=keys.get("norm_topk_prob", normalise),
        scaling=float(keys.get("routed_scaling_factor", 1.0)),
        groups=keys.get("n_group", 1) if grouped else 1,
        groups_per_token=keys.get("topk_group", 1) if grouped else 1,
        group_score=group_score,
        bias=method == "noaux_tc",
        balance=keys.get("aux_loss_alpha", 0.001 if router == "softmax" else 0.0001),
    )
    return decoder(keys, latent=latent, experts=experts, head_dim=latent.nope_dim + latent.rope_dim)


def deepseek_v2(keys: Keys) -> JsonObject:
    return _deepseek(keys, "softmax", False, 1)


def deepseek_v3(keys: Keys) -> JsonObject:
    return _deepseek(keys, "sigmoid", True, 2)


def switch(keys: Keys) -> JsonObject:
    """Switch (arXiv:2101.03961). Files say how many layers of encoder and decoder have experts, and
    how many tokens of a sequence an expert takes.
    """
    keys.refuse(keys.get("router_bias", False), "router_bias true")
    feed = keys.get("feed_forward_proj", keys.get("dense_act_fn", "relu"))
    word = feed.removeprefix("gated-")
    keys.refuse(
        word not in ACTIVATIONS_BY_NAME,
        f"feed_forward_proj {shown(feed)}; known are {', '.join(sorted(ACTIVATIONS_BY_NAME))}, with"
        ' "gated-" before them or without',
    )
    layers, mlp = keys.get("num_layers", 12), keys.get("d_ff", 2048)
    after = keys.get("num_decoder_layers", layers)
    experts = Experts(
        count=keys.get("num_experts", 8),
        per_token=1,
        mlp=mlp,
        normalise=False,
        sequence_capacity=keys.get("expert_capacity", 64),
        balance=keys.get("router_aux_loss_coef", 0.001),
        z_loss=keys.get("router_z_loss_coef", 0.001),
    )
    return {
        "vocab_size": keys.get("vocab_size", 32128),
        "encoder_layers": layers,
        "decoder_layers": after,
        "embed": keys.get("d_model", 768),
        "heads": keys.get("num_heads", 12),
        "head_dim": keys.get("d_kv", 64),
        "mlp": mlp,
        "max_seq": keys.get("n_positions", 512),
        "norm_epsilon": keys.get("layer_norm_epsilon", 1e-6),
        "activation": "gelu_tanh"
        if feed == "gated-gelu"
        else ACTIVATIONS_BY_NAME.get(word, "relu"),
        "gated": feed.startswith("gated-") or keys.get("is_gated_act", False),
        "tied": keys.get("tie_word_embeddings", True),
        "buckets": keys.get("relative_attention_num_buckets", 32),
        "max_distance": keys.get("relative_attention_max_distance", 128),
        "experts": experts,
        "encoder_every": _every(layers, keys.get("num_sparse_encoder_layers", 3)),
        "decoder_every": _every(after, keys.get("num_sparse_decoder_layers", 3)),
    }


def _every(layers: int, sparse: int) -> int:
    """One of how many layers has experts, where so many should have; 0 for none."""
    return layers // sparse if sparse else 0
