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
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
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


def _presets() -> dict[str, TransformerConfig | EncoderDecoderConfig]:
    text = (resources.files("shardlib.models") / "presets.toml").read_text(encoding="utf-8")
    return {
        name: construct(
            EncoderDecoderConfig if "encoder_layers" in data else TransformerConfig,
            {"name": name, **data},
            f"the preset {name}",
            ModelError,
        )
        for name, data in tomllib.loads(text).items()
    }


#: Preset name -> configuration.
PRESETS: Mapping[str, TransformerConfig | EncoderDecoderConfig] = _presets()


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


#: What a user's function may return.
_KEYS = tuple(field.name for field in fields(UserModel))


def load(spec: str | Path) -> TransformerConfig | EncoderDecoderConfig | UserModel:
    """Finds a model."""
    spec = str(spec)
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
                f"{spec}: there is no module {error.name!r} on the path or in {Path.cwd()}\nTry:"
                " package.module:function, with dots between folders and without .py"
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
        return f"{name!r} of {module_name} is of the type {kind}, not a function"
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
