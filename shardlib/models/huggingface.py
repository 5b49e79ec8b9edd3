"""Models that a Hugging Face `config.json` describes.

One function per family, in one table. Keys that a family's `transformers` configuration leaves out
of the file take the default that `transformers` gives them; keys that have no sensible default are
required, and all that are missing are reported together. Biases that routers learn outside the
gradient (DeepSeek V3) are no parameters but state of the model; files do not say how fast they
move, so that they stay where they are unless `Experts.bias_rate` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import MissingFileError, ModelError, raise_all
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import SIZE
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig
from shardlib.models.families.dense import gemma, gemma2, gemma3, gpt2, llama, mistral, qwen2, qwen3
from shardlib.models.families.keys import Keys
from shardlib.models.families.sparse import (
    deepseek_v2,
    deepseek_v3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    switch,
)
from shardlib.untrusted import Limits, construct, fit, printable, read_json, shown
from shardlib.untrusted.json_types import JsonMapping
from shardlib.untrusted.shown import bounded
from shardlib.untrusted.typed import WRONG

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
