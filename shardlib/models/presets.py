"""Models by name, in TOML files, and in the `config.json` of Hugging Face.

Every preset is a published architecture; its parameter count is checked against the published
number in the tests.

Transformers as TOML files.

The keys are the fields of `TransformerConfig`; mixture of experts, latent attention and rope
scaling are tables:

>>> config = parse('''
... vocab_size = 32000
... layers = 4
... embed = 64
... heads = 4
... kv_heads = 2
... head_dim = 16
... mlp = 128
... [experts]
... count = 8
... per_token = 2
... mlp = 32
... ''', name="small")
>>> config.experts.count, config.max_seq
(8, 2048)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlib.errors import MissingFileError, ModelError, ShardlibError, raise_all
from shardlib.models import huggingface
from shardlib.models.config import (
    EncoderDecoderConfig,
    Experts,
    LatentAttention,
    RopeScaling,
    TransformerConfig,
)
from shardlib.untrusted.data import (
    TOML_LIMITS,
    JsonMapping,
    JsonObject,
    bounded,
    construct,
    fit,
    parse_toml,
    read_bytes,
    shown,
)

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


_TABLES: Mapping[str, type] = {
    "experts": Experts,
    "latent": LatentAttention,
    "rope_scaling": RopeScaling,
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
}


def read(path: str | Path) -> TransformerConfig:
    """Reads a model card; its name is the file's, unless the card has one."""
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"there is no model card {path}")
    return parse(
        read_bytes(path, "model card", ModelError, limit=TOML_LIMITS.bytes),
        name=path.stem,
        source=str(path),
    )


def parse(text: str | bytes, *, name: str, source: str = "the model card") -> TransformerConfig:
    """Reads the text of a model card; see `read`."""
    data = {"name": name, **parse_toml(text, source, ModelError)}
    failures = _check(TransformerConfig, data, "")
    for table, kind in _TABLES.items():
        if isinstance(data.get(table), Mapping):
            failures += _check(kind, data[table], f"{table}.")
    if failures:
        raise_all(ModelError, f"{source} is not usable", bounded(failures))
    return construct(TransformerConfig, data, source, ModelError)


def _check(kind: type, data: JsonMapping, prefix: str) -> list[str]:
    fields_by_name = {field.name: field for field in fields(kind)}
    failures = [
        f"{prefix}{name} is missing"
        for name, field in fields_by_name.items()
        if name not in data and field.default is MISSING
    ]
    for key, value in data.items():
        if key not in fields_by_name:
            near = difflib.get_close_matches(key, fields_by_name, 1)
            failures.append(
                f"{fit(prefix + key, 80)} is not a key"
                + (
                    f"; did you mean {prefix}{near[0]}?"
                    if near
                    else f"; keys are {', '.join(fields_by_name)}"
                )
            )
            continue
        expected = _TYPES.get(str(fields_by_name[key].type), (dict,))
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            failures.append(
                f"{prefix}{key} is {shown(value)}; expected"
                f" {'a table' if expected == (dict,) else fields_by_name[key].type}"
            )
    return failures


# --------------------------------------------------------------------------------------------------
# The word MODEL of the command line.
#
# A preset ("llama3-8b"), a Hugging Face `config.json`, a TOML model card, or the user's own code
# as `package.module:function`. The function takes no arguments and returns a dict, or an object
# with these attributes:
#
# - `init`: `nnx.Rngs -> nnx.Module`, or what `shardlib.linen` or `shardlib.tree` return;
# - `loss`: `(model, batch) -> scalar` or `-> (scalar, metrics)`;
# - `batch`: a pytree of arrays or `jax.ShapeDtypeStruct`;
# - optional: `optimizer` (an optax transformation), `batch_axes` (a pytree of tuples of names),
#   `name`, `wrt` (what is trained) and `rows` (how the loss depends on the rows of its batch), see
#   `shardlib.plan`; and `forward`, `(model, tokens) -> logits`, for serving, see
#   `shardlib.plan_serving`; and for `shardlib export`, `outputs`, `(model, batch) -> arrays by
#   name`, and `weights` (params, or a seed).

#: What a user's function may return.
_KEYS = (
    *("name", "init", "loss", "batch", "optimizer", "batch_axes", "wrt", "rows"),
    *("forward", "outputs", "weights"),
)


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """A model that the user's own function returned; see the module's docstring for the fields."""

    name: str
    init: Any
    loss: Callable[..., Any]
    batch: Any
    optimizer: Any = None
    batch_axes: Any = None
    wrt: Any = None
    rows: str = "prove"
    forward: Callable[..., Any] | None = None
    outputs: Callable[..., Any] | None = None
    weights: Any = None


def load(spec: str) -> TransformerConfig | EncoderDecoderConfig | UserModel:
    """Finds a model."""
    if spec in PRESETS:
        return PRESETS[spec]
    if spec.endswith(".toml"):
        return read(spec)
    if spec.endswith(".json"):
        return huggingface.read(spec)
    if Path(spec).is_dir():
        return _folder(Path(spec))
    if ":" in spec and "/" not in spec:
        return _user_model(spec)
    if "/" in spec and not Path(spec).exists():
        raise MissingFileError(
            f"there is no model file or folder {spec}\nTry: a preset (`shardlib models`), a folder"
            " that `shardlib train --run` or Hugging Face wrote, or a config.json"
        )
    near = difflib.get_close_matches(spec, PRESETS, 1, 0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise ModelError(
        f"{spec!r} is not a preset, .json or .toml file, or package.module:function{guess} (presets"
        f" are {', '.join(PRESETS)})"
    )


def _folder(path: Path) -> TransformerConfig | EncoderDecoderConfig:
    if (path / "config.json").is_file():
        return huggingface.read(path / "config.json")
    raise MissingFileError(f"the folder {path} holds no config.json")


def _user_model(spec: str) -> UserModel:
    module_name, _, function_name = spec.partition(":")
    function = _find(spec, module_name, function_name)
    required = _required_arguments(function)
    if required:
        raise ModelError(
            f"{spec} must be callable without arguments; it asks for {', '.join(required)}"
        )
    result = function()
    values = (
        result
        if isinstance(result, Mapping)
        else {name: getattr(result, name) for name in _KEYS if hasattr(result, name)}
    )
    failures = [
        f"{name!r} is missing" for name in ("init", "loss", "batch") if values.get(name) is None
    ]
    failures += [
        f"{name!r} is {type(values[name]).__name__}, not callable"
        for name in ("loss", "forward", "outputs")
        if values.get(name) is not None and not callable(values[name])
    ]
    failures += [
        f"{name!r} is not a key; keys are {', '.join(_KEYS)}"
        for name in values
        if name not in _KEYS
    ]
    if failures:
        raise_all(ModelError, f"what {spec} returned is not a model", failures)
    return UserModel(**{"name": spec, **values})


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _find(spec: str, module_name: str, function_name: str) -> Callable[[], Any]:
    """Imports the module, also from the current folder, as `python -m` would."""
    if not module_name or not function_name:
        raise ModelError(f"{spec!r} should be package.module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ModelError(
                f"{spec}: there is no module {error.name!r} on the path or in {Path.cwd()}"
            ) from error
        raise ModelError(
            f"{spec}: importing {module_name} needs the module {error.name!r}, which is not"
            " installed"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{spec}: {_no_function(module, module_name, function_name)}")
    return function


def _no_function(module: ModuleType, module_name: str, name: str) -> str:
    """Returns what a module has in place of a function of a name."""
    if hasattr(module, name):
        kind = type(getattr(module, name)).__name__
        return f"{name!r} of {module_name} is of the type {kind}, and no function"
    near = difflib.get_close_matches(
        name,
        [attribute for attribute in dir(module) if callable(getattr(module, attribute, None))],
        1,
    )
    return f"{module_name} has no function {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )


# --------------------------------------------------------------------------------------------------
# The `config.json` of a transformer: the first family of Hugging Face whose reader gives the same
# transformer back.
#
# What is written is read again, so that no file says anything else than the model is.

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
    """Returns what each family would say of a transformer."""
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
    """Returns what all families with rotary positions share."""
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
