"""Models that are known by name.

Every preset is a published architecture; its parameter count is checked against the published
number in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import Experts, LatentAttention, RopeScaling
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig

#: The byte-level model that `shardlib train` trains on this machine.
DEMO = TransformerConfig(
    name="demo",
    vocab_size=256,
    layers=4,
    embed=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=384,
    max_seq=256,
    tied=True,
    compute_dtype="float32",
)

#: Radford et al. 2019, https://huggingface.co/openai-community/gpt2
_GPT2_SMALL = TransformerConfig(
    name="gpt2-small",
    vocab_size=50257,
    layers=12,
    embed=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    mlp=3072,
    max_seq=1024,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    tied=True,
    learned_positions=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)

#: arXiv:2307.09288
_LLAMA2_7B = TransformerConfig(
    name="llama2-7b",
    vocab_size=32000,
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    mlp=11008,
    max_seq=4096,
)
_LLAMA2_70B = TransformerConfig(
    name="llama2-70b",
    vocab_size=32000,
    layers=80,
    embed=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp=28672,
    max_seq=4096,
)

#: arXiv:2407.21783, table 3
_LLAMA3_8B = TransformerConfig(
    name="llama3-8b",
    vocab_size=128256,
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    max_seq=8192,
    rope_theta=500000.0,
)
_LLAMA3_70B = TransformerConfig(
    name="llama3-70b",
    vocab_size=128256,
    layers=80,
    embed=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp=28672,
    max_seq=8192,
    rope_theta=500000.0,
)
_LLAMA3_405B = TransformerConfig(
    name="llama3-405b",
    vocab_size=128256,
    layers=126,
    embed=16384,
    heads=128,
    kv_heads=8,
    head_dim=128,
    mlp=53248,
    max_seq=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0),
)

#: Megatron-Turing NLG, arXiv:2201.11990, section 2.2; the vocabulary of GPT-2 is padded to 51200 so
#: that tensor parallelism divides it (arXiv:2104.04473, section 5).
_MT_NLG_530B = TransformerConfig(
    name="mt-nlg-530b",
    vocab_size=51200,
    layers=105,
    embed=20480,
    heads=128,
    kv_heads=128,
    head_dim=160,
    mlp=81920,
    max_seq=2048,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    tied=True,
    learned_positions=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)

#: arXiv:2401.04088, table 1
_MIXTRAL_8X7B = TransformerConfig(
    name="mixtral-8x7b",
    vocab_size=32000,
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    max_seq=32768,
    rope_theta=1e6,
    experts=Experts(count=8, per_token=2, mlp=14336, balance=0.02),
)

#: arXiv:2412.19437, section 4.2; the multi-token prediction module is not part of it.
_DEEPSEEK_V3 = TransformerConfig(
    name="deepseek-v3",
    vocab_size=129280,
    layers=61,
    embed=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    mlp=18432,
    max_seq=163840,
    norm_epsilon=1e-6,
    latent=LatentAttention(q_lora=1536, kv_lora=512, rope_dim=64, nope_dim=128, v_dim=128),
    rope_scaling=RopeScaling(
        kind="yarn",
        factor=40.0,
        original_seq=4096,
        low_frequency=1.0,
        high_frequency=32.0,
        scores_factor=1.0,
    ),
    experts=Experts(
        count=256,
        per_token=8,
        mlp=2048,
        shared=1,
        first_dense=3,
        router="sigmoid",
        scaling=2.5,
        groups=8,
        groups_per_token=4,
        group_score=2,
        bias=True,
        balance=0.0001,
    ),
)

#: The shape of Kimi K2, arXiv:2507.20534, table 2: 1.04T parameters, 32B of them active.
_ONE_T_MOE = TransformerConfig(
    name="1t-moe",
    vocab_size=163840,
    layers=61,
    embed=7168,
    heads=64,
    kv_heads=64,
    head_dim=192,
    mlp=18432,
    max_seq=131072,
    norm_epsilon=1e-6,
    rope_theta=50000.0,
    latent=LatentAttention(q_lora=1536, kv_lora=512, rope_dim=64, nope_dim=128, v_dim=128),
    experts=Experts(
        count=384,
        per_token=8,
        mlp=2048,
        shared=1,
        first_dense=1,
        router="sigmoid",
        scaling=2.827,
        balance=0.0001,
    ),
)

#: arXiv:2101.03961: T5 Base with eight experts in every second layer, without a gate, as it was
#: published with weights (https://huggingface.co/google/switch-base-8).
_SWITCH_BASE_8 = EncoderDecoderConfig(
    name="switch-base-8",
    vocab_size=32128,
    encoder_layers=12,
    decoder_layers=12,
    embed=768,
    heads=12,
    head_dim=64,
    mlp=3072,
    experts=Experts(count=8, per_token=1, mlp=3072, normalise=False, balance=0.01, capacity=1.25),
)
#: arXiv:2101.03961, table 9: 1571 billion parameters, experts in every layer.
_SWITCH_C_2048 = EncoderDecoderConfig(
    name="switch-c-2048",
    vocab_size=32128,
    encoder_layers=15,
    decoder_layers=15,
    embed=2080,
    heads=32,
    head_dim=64,
    mlp=6144,
    encoder_every=1,
    decoder_every=1,
    experts=Experts(
        count=2048, per_token=1, mlp=6144, normalise=False, balance=0.01, capacity=1.25
    ),
)

#: Preset name -> configuration.
PRESETS: Mapping[str, TransformerConfig | EncoderDecoderConfig] = {
    config.name: config
    for config in (
        DEMO,
        _GPT2_SMALL,
        _LLAMA2_7B,
        _LLAMA2_70B,
        _LLAMA3_8B,
        _LLAMA3_70B,
        _LLAMA3_405B,
        _MT_NLG_530B,
        _MIXTRAL_8X7B,
        _DEEPSEEK_V3,
        _ONE_T_MOE,
        _SWITCH_BASE_8,
        _SWITCH_C_2048,
    )
}
