"""Names of the parameters of reference models in the files of their families.

One table for each family: our path within a layer -> the name in the file and the form. `{layer}`
and `{expert}` stand for numbers. Names are those of the published files, which `transformers` reads
and writes. Tables have rows for what only some configurations have (biases, norms of heads); a
model's own parameters say which are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.checkpointing.huggingface.form import Form
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import LatentAttention
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where a parameter is in the files.

    Attributes:
        name: of the tensor, with `{layer}` and `{expert}`; parameters with `{expert}` have a dim of
            experts before the dims of the form.
        form: how one layer's or one expert's part lies in it.
    """

    name: str
    form: Form


#: Our path within a layer, or outside of layers -> where it is.
Table = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a model's parameters.

    Attributes:
        ends: parameters outside of layers.
        stacks: by our name of a stack of layers, what its layers have.
        starts: how names of the model proper may start in files; the first is written.
        ignored: ends of names that are in some files and are no parameters.
    """

    ends: Table
    stacks: Mapping[str, Table]
    starts: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def names(config: TransformerConfig | EncoderDecoderConfig, family: str) -> Names:
    """The names of the parameters of a configuration."""
    if isinstance(config, EncoderDecoderConfig):
        return _switch(config)
    if family == "gpt2":
        return _gpt2()
    table = (
        _NORMS["sandwich" if config.post_norms else "before"]
        | _mlp("mlp.", "mlp.")
        | _EXPERTS.get(family, {})
    )
    table |= (
        _latent(config.latent)
        if config.latent
        else _attention("self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj"))
    )
    layer = {
        path: _t(f"model.layers.{{layer}}.{tensor.name}", tensor.form)
        for path, tensor in table.items()
    }
    starts = (
        ("model.", "language_model.model.", "model.language_model.")
        if family == "gemma3"
        else ("model.",)
    )
    return Names(ends=_ENDS, stacks={"layers": layer, "dense_layers": layer}, starts=starts)


def _t(
    name: str,
    form: str | Form,
    windows: Mapping[str, tuple[int, int]] | None = None,
    paired: str = "",
) -> Tensor:
    return Tensor(
        name=name,
        form=(
            form
            if isinstance(form, Form)
            else Form(dims=form, windows=windows or {}, paired=paired)
        ),
    )


_LINEAR, _VECTOR = "i o -> o i", "i -> i"
_ENDS: Table = {
    "embedding": _t("model.embed_tokens.weight", "v e -> v e"),
    "norm.scale": _t("model.norm.weight", _VECTOR),
    "head": _t("lm_head.weight", "e v -> v e"),
}
_NORMS: Mapping[str, dict[str, Tensor]] = {
    "before": {
        "attention_norm.scale": _t("input_layernorm.weight", _VECTOR),
        "mlp_norm.scale": _t("post_attention_layernorm.weight", _VECTOR),
    },
    "sandwich": {
        "attention_norm.scale": _t("input_layernorm.weight", _VECTOR),
        "attention_post_norm.scale": _t("post_attention_layernorm.weight", _VECTOR),
        "mlp_norm.scale": _t("pre_feedforward_layernorm.weight", _VECTOR),
        "mlp_post_norm.scale": _t("post_feedforward_layernorm.weight", _VECTOR),
    },
}


def _attention(
    start: str, theirs: tuple[str, str, str, str], ours: str = "attention."
) -> dict[str, Tensor]:
    """Queries, keys, values and the projection of their sum, with what biases and norms there may
    be.
    """
    *three, out = theirs
    found = {
        f"{ours}out": _t(f"{start}{out}.weight", "h w e -> e h.w"),
        f"{ours}out_bias": _t(f"{start}{out}.bias", _VECTOR),
        f"{ours}query_norm.scale": _t(f"{start}q_norm.weight", _VECTOR),
        f"{ours}key_norm.scale": _t(f"{start}k_norm.weight", _VECTOR),
    }
    for which, name in zip(("query", "key", "value"), three, strict=True):
        found[ours + which] = _t(f"{start}{name}.weight", "e h w -> h.w e")
        found[f"{ours}{which}_bias"] = _t(f"{start}{name}.bias", "h w -> h.w")
    return found


def _latent(latent: LatentAttention) -> dict[str, Tensor]:
    """Latent attention of DeepSeek, whose files join what has a position to what has none, and keys
    to values.
    """
    head, down, both = (
        latent.nope_dim + latent.rope_dim,
        latent.kv_lora + latent.rope_dim,
        latent.nope_dim + latent.v_dim,
    )
    query = "self_attn.q_b_proj.weight" if latent.q_lora else "self_attn.q_proj.weight"
    return {
        "attention.query_down": _t("self_attn.q_a_proj.weight", _LINEAR),
        "attention.query_norm.scale": _t("self_attn.q_a_layernorm.weight", _VECTOR),
        "attention.query": _t(query, "s h w -> h.w s", {"w": (head, 0)}),
        "attention.query_rope": _t(query, "s h r -> h.r s", {"r": (head, latent.nope_dim)}, "r"),
        "attention.down": _t("self_attn.kv_a_proj_with_mqa.weight", "e k -> k e", {"k": (down, 0)}),
        "attention.key_rope": _t(
            "self_attn.kv_a_proj_with_mqa.weight", "e r -> r e", {"r": (down, latent.kv_lora)}, "r"
        ),
        "attention.norm.scale": _t("self_attn.kv_a_layernorm.weight", _VECTOR),
        "attention.out": _t("self_attn.o_proj.weight", "h w e -> e h.w"),
        "attention.key": _t("self_attn.kv_b_proj.weight", "k h w -> h.w k", {"w": (both, 0)}),
        "attention.value": _t(
            "self_attn.kv_b_proj.weight", "k h w -> h.w k", {"w": (both, latent.nope_dim)}
        ),
    }


def _mlp(
    start: str, ours: str, theirs: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    """The two or three matrices of a feed-forward, or of an expert."""
    pairs = list(zip(("gate", "up", "down"), theirs, strict=True))
    return {
        **{ours + which: _t(f"{start}{name}.weight", _LINEAR) for which, name in pairs},
        **{f"{ours}{which}_bias": _t(f"{start}{name}.bias", _VECTOR) for which, name in pairs},
    }


def _routed(
    router: str, expert: str, theirs: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    return {"experts.router": _t(router, _LINEAR), **_mlp(expert, "experts.", theirs)}


_QWEN_EXPERTS = _routed("mlp.gate.weight", "mlp.experts.{expert}.")
_DEEPSEEK_EXPERTS = {
    **_QWEN_EXPERTS,
    **_mlp("mlp.shared_experts.", "experts.shared."),
    "experts.bias": _t("mlp.gate.e_score_correction_bias", _VECTOR),
}
_EXPERTS: Mapping[str, dict[str, Tensor]] = {
    "mixtral": _routed(
        "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")
    ),
    "qwen2_moe": {
        **_QWEN_EXPERTS,
        **_mlp("mlp.shared_expert.", "experts.shared."),
        "experts.shared_gate": _t("mlp.shared_expert_gate.weight", "e -> o e", {"o": (1, 0)}),
    },
    "qwen3_moe": _QWEN_EXPERTS,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK_EXPERTS),
}


def _gpt2() -> Names:
    """GPT-2, whose matrices are not turned and whose queries, keys and values are one matrix."""
    start = "h.{layer}."
    layer = {
        **{
            f"{ours}_norm.{which}": _t(f"{start}{name}.{end}", _VECTOR)
            for ours, name in (("attention", "ln_1"), ("mlp", "ln_2"))
            for which, end in (("scale", "weight"), ("bias", "bias"))
        },
        **{
            f"attention.{which}": _t(
                f"{start}attn.c_attn.weight", "e h w -> e k.h.w", {"k": (3, i)}
            )
            for i, which in enumerate(("query", "key", "value"))
        },
        **{
            f"attention.{which}_bias": _t(f"{start}attn.c_attn.bias", "h w -> k.h.w", {"k": (3, i)})
            for i, which in enumerate(("query", "key", "value"))
        },
        "attention.out": _t(f"{start}attn.c_proj.weight", "h w e -> h.w e"),
        "attention.out_bias": _t(f"{start}attn.c_proj.bias", _VECTOR),
        "mlp.up": _t(f"{start}mlp.c_fc.weight", "i o -> i o"),
        "mlp.up_bias": _t(f"{start}mlp.c_fc.bias", _VECTOR),
        "mlp.down": _t(f"{start}mlp.c_proj.weight", "i o -> i o"),
        "mlp.down_bias": _t(f"{start}mlp.c_proj.bias", _VECTOR),
    }
    ends = {
        "embedding": _t("wte.weight", "v e -> v e"),
        "positions": _t("wpe.weight", "p e -> p e"),
        "norm.scale": _t("ln_f.weight", _VECTOR),
        "norm.bias": _t("ln_f.bias", _VECTOR),
        "head": _t("lm_head.weight", "e v -> v e"),
    }
    return Names(
        ends=ends,
        stacks={"layers": layer},
        starts=("", "transformer."),
        ignored=(".attn.bias", ".attn.masked_bias"),
    )


def _switch(config: EncoderDecoderConfig) -> Names:
    """Switch, in the names of T5: an encoder and a decoder, whose first layers hold the biases for
    distances of all.
    """
    ends = {
        "embedding": _t("shared.weight", "v e -> v e"),
        "head": _t("lm_head.weight", "e v -> v e"),
    }
    stacks: dict[str, Table] = {}
    three = ("wi_0", "wi_1" if config.gated else "wi", "wo")
    for stack, last in (("encoder", 1), ("decoder", 2)):
        ends[f"{stack}.bias"] = _t(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "b h -> b h"
        )
        ends[f"{stack}.norm.scale"] = _t(f"{stack}.final_layer_norm.weight", _VECTOR)
        start = f"{stack}.block.{{layer}}.layer."
        layer = {
            **_attention(f"{start}0.SelfAttention.", ("q", "k", "v", "o")),
            "attention_norm.scale": _t(f"{start}0.layer_norm.weight", _VECTOR),
            **_attention(f"{start}1.EncDecAttention.", ("q", "k", "v", "o"), "cross."),
            "cross_norm.scale": _t(f"{start}1.layer_norm.weight", _VECTOR),
            "mlp_norm.scale": _t(f"{start}{last}.layer_norm.weight", _VECTOR),
            **_mlp(f"{start}{last}.mlp.", "mlp.", three),
            **_routed(
                f"{start}{last}.mlp.router.classifier.weight",
                f"{start}{last}.mlp.experts.expert_{{expert}}.",
                three,
            ),
        }
        stacks[f"{stack}.layers"] = layer
    return Names(
        ends=ends,
        stacks=stacks,
        starts=("",),
        ignored=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )
