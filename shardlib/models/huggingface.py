"""Families of models on Hugging Face: the keys of their `config.json`, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import MissingFileError, ModelError, raise_all
from shardlib.models.blocks import Block
from shardlib.models.config import (
    SIZE,
    EncoderDecoderConfig,
    Experts,
    LatentAttention,
    RopeScaling,
    TransformerConfig,
)
from shardlib.models.transformer import Transformer
from shardlib.untrusted.data import (
    WRONG,
    Json,
    JsonMapping,
    JsonObject,
    Limits,
    bounded,
    construct,
    fit,
    printable,
    read_json,
    shown,
)

# --------------------------------------------------------------------------------------------------
# A reference transformer with low-rank adapters.


def blocks(model: Transformer) -> Iterator[Block]:
    """The stacked blocks of a transformer."""
    for stack in (getattr(model, "dense_layers", None), model.layers):
        if stack is not None:
            yield from getattr(stack, "blocks", [stack])


# --------------------------------------------------------------------------------------------------
# Keys of a configuration, read one by one; what is missing or wrong is remembered and reported at
# once.


class Keys:
    """Reads keys of a configuration and remembers what is wrong with them."""

    def __init__(self, data: JsonMapping, defaults: JsonMapping | None = None):
        self.data = {**(defaults or {}), **data}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.refused: list[str] = []

    def need(self, key: str, minimum: int = 1) -> int:
        """The size that a key has, at least `minimum`; what is missing or no size is remembered,
        and 1 stands in for it.
        """
        value = self.data.get(key)
        if value is None:
            self.missing.append(key)
        elif isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < SIZE:
            self.wrong.append(
                f"{key} is {shown(value)}; it is an integer from {minimum} on, below {SIZE:.0e}"
            )
        else:
            return value
        return 1

    def get(self, key: str, default: Json) -> Json:
        """The value of a key, or the default where it is absent or null; one of another type than
        the default is remembered.
        """
        value = self.data.get(key)
        if value is None:
            return default
        if expected := _unlike(value, default):
            self.wrong.append(f"{key} is {shown(value)}; it is {expected}")
            return default
        return value

    def part(self, key: str) -> Keys:
        """The keys of an object in it; of none where it is absent or null. What is wrong with them
        is remembered here.
        """
        nested = Keys(self.get(key, {}))
        nested.missing, nested.wrong, nested.refused = self.missing, self.wrong, self.refused
        return nested

    def refuse(self, wrong: object, message: str) -> None:
        """Remembers a setting that the reference model does not have."""
        if wrong:
            self.refused.append(message)


def _unlike(value: Json, default: Json) -> str:
    """Of what type a value should be like a default; empty where it is."""
    if isinstance(default, bool) or isinstance(value, bool):
        return (
            ""
            if isinstance(value, bool) and isinstance(default, bool)
            else "true or false"
            if isinstance(default, bool)
            else _KINDS[type(default)]
        )
    if isinstance(default, int) and isinstance(value, int):
        return "" if 0 <= value < SIZE else f"an integer from 0 on, below {SIZE:.0e}"
    fits = (
        isinstance(value, int | float)
        if isinstance(default, float)
        else isinstance(value, type(default))
    )
    return "" if fits else _KINDS[type(default)]


_KINDS: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


# --------------------------------------------------------------------------------------------------
# Families with a dense feed-forward: Llama, Mistral, Qwen, Gemma, GPT-2.

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
    """Returns what all families with rotary positions and a gated feed-forward share."""
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


# --------------------------------------------------------------------------------------------------
# Families with mixtures of experts: Mixtral, Qwen MoE, DeepSeek, Switch Transformers.


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


# --------------------------------------------------------------------------------------------------
# Models that a Hugging Face `config.json` describes.
#
# One function per family, in one table. Keys that a family's `transformers` configuration leaves
# out of the file take the default that `transformers` gives them; keys that have no sensible
# default are required, and all that are missing are reported together. Biases that routers learn
# outside the gradient (DeepSeek V3) are not parameters but state of the model; files do not say how
# fast they move, so that they stay where they are unless `Experts.bias_rate` is given.

#: Configurations are smaller than this.
CONFIG = Limits(bytes=1 << 24)


def read(
    source: str | Path | JsonMapping, name: str = ""
) -> TransformerConfig | EncoderDecoderConfig:
    """Reads a configuration.

    Args:
        name: for people; by default the file's folder, or the family.
    """
    source_name, data = "the configuration", source
    if isinstance(source, str | Path):
        source_name, data = str(source), _load(Path(source))
        name = name or Path(source).resolve().parent.name
    assert isinstance(data, Mapping)
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"{source_name} has model_type {shown(family)}; known are"
            f" {', '.join(sorted(FAMILIES))}\nTry: describe the model in a TOML card, or give your"
            " own code as package.module:function"
        )
    keys = Keys(data)
    fields, failure = dict[str, Any](), None
    try:
        fields = FAMILIES[family](keys)
    except (*WRONG, ModelError) as error:
        failure = error
    if keys.missing:
        raise_all(ModelError, f"{source_name} ({family}) lacks keys", sorted(set(keys.missing)))
    if keys.wrong:
        raise_all(
            ModelError,
            f"{source_name} ({family}) has values that no model has",
            bounded(list(dict.fromkeys(keys.wrong))),
        )
    if keys.refused:
        raise_all(
            ModelError,
            f"{source_name} ({family}) asks for what the reference model does not have",
            bounded(keys.refused),
        )
    if failure is not None:
        raise ModelError(
            f"{source_name} ({family}) has a value that no model has"
            f" ({fit(printable(str(failure)), 300)})"
        ) from failure
    return construct(
        EncoderDecoderConfig if family in ENCODER_DECODERS else TransformerConfig,
        {"name": name or family, **fields},
        f"{source_name} ({family})",
        ModelError,
        most=float(SIZE),
    )


def _load(path: Path) -> JsonMapping:
    if not path.is_file():
        raise MissingFileError(f"there is no model configuration {path}")
    data = read_json(path, "model configuration", ModelError, limits=CONFIG)
    if not isinstance(data, Mapping):
        raise ModelError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


#: Families that are read as an `EncoderDecoderConfig`.
ENCODER_DECODERS = frozenset({"switch_transformers"})
#: `model_type` -> what it means in the fields of `TransformerConfig` or `EncoderDecoderConfig`.
FAMILIES: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "switch_transformers": switch,
}
