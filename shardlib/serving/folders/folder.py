"""A folder of Hugging Face, as it is served: `config.json`, safetensors, `tokenizer.json`,
`generation_config.json`. No code of it is run.

    found = read_folder("Llama-3.1-8B")
    engine = found.engine(Capacity(longest=4096))
    engine.generate([found.text.encode("The capital of France is")], most=16)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardlib import models
from shardlib.annotation.model import Model
from shardlib.annotation.read import read
from shardlib.checkpointing.huggingface.reading import read_config
from shardlib.checkpointing.huggingface.whole import load_weights
from shardlib.errors import ArgumentError, MissingFileError, ModelError
from shardlib.models.config import DTYPES, TransformerConfig
from shardlib.models.huggingface import CONFIG
from shardlib.serving.folders.generation import read_generation
from shardlib.serving.folders.text import read_text
from shardlib.serving.served import Served
from shardlib.untrusted import read_json, shown


def is_folder(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face."""
    return (folder / "config.json").is_file()


def read_folder(folder: str | Path, *, dtype: str | None = None) -> Served:
    """Reads a folder; its weights are in memory afterwards.

    Args:
        dtype: "float32", "bfloat16" or "float16", of weights and products; by default what
            `config.json` says, or float32.
    """
    root = Path(folder)
    if not is_folder(root):
        raise MissingFileError(f"the folder {root} holds no config.json")
    config, family = read_config(root / "config.json")
    if not isinstance(config, TransformerConfig):
        raise ModelError(
            f"{root} holds a {family}, whose decoder looks at an encoder; only decoders are served"
        )
    kind = _dtype(root, dtype)
    config = replace(config, param_dtype=kind, compute_dtype=kind)
    generation = read_generation(root)
    text = read_text(root, generation.stop)
    model: Model = read(models.build(config)[0])
    return Served(
        name=root.resolve().name,
        init=models.build(config)[0],
        forward=lambda model, tokens: model(tokens),
        hidden=lambda model, tokens: model.hidden(tokens),
        weights=load_weights(root, model, config, family),
        longest=config.max_seq,
        text=text,
        config=config,
        sampling=generation.sampling,
    )


def _dtype(root: Path, dtype: str | None) -> str:
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype is {shown(dtype)}\nTry: one of {', '.join(DTYPES)}")
    if dtype is not None:
        return dtype
    data = read_json(root / "config.json", "model configuration", ModelError, limits=CONFIG)
    nested = data.get("text_config")
    for section in (data, nested if isinstance(nested, Mapping) else {}):
        stored = section.get("dtype", section.get("torch_dtype"))
        if stored is not None:
            if stored not in DTYPES:
                raise ModelError(
                    f"{root / 'config.json'} has dtype {shown(stored)}; known are"
                    f" {', '.join(DTYPES)}\nTry: dtype="
                )
            return stored
    return "float32"
