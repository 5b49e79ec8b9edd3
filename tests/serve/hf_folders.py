"""Small folders of Hugging Face, with numbers that follow from the names of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shardlib import models
from shardlib.annotation.model import read
from shardlib.checkpointing.huggingface import held_state, locate, names, read_config, stored
from shardlib.checkpointing.tree import named_leaves
from tests.checkpointing.test_huggingface import transformers_name, weights

TEXT = [f"value_{n} = {n * 7} + {n}  # größer als zuvor\n" for n in range(400)]


def write_folder(folder: Path, config: dict[str, Any], name: str = "") -> Path:
    """`config.json` and safetensors, with the numbers of benchmarks/serving_families.py."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    described, family = read_config(folder / "config.json")
    model = read(models.build(described)[0])
    leaves = {**named_leaves(model.params), **held_state(model.state)}
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    tensors = stored(locate(described, names(described, family), shapes))
    held: dict[str, np.ndarray] = {
        tensor: weights(transformers_name(name, tensor), one.shape)
        for tensor, one in tensors.items()
    }
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_adapter(folder: Path, base: Path, name: str, about: dict[str, Any]) -> Path:
    """A folder as PEFT writes it, with the numbers of benchmarks/serving_families.py.

    Args:
        folder: made.
        base: of the model.
        name: that the numbers follow from.
        about: r, lora_alpha, target_modules and the like.
    """
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "bias": "none", **about}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    held: dict[str, np.ndarray] = {}
    for tensor, array in load_file(base / "model.safetensors").items():
        stem = tensor.removesuffix(".weight")
        if stem.rsplit(".", 1)[-1] in about["target_modules"]:
            shapes = {"A": (about["r"], array.shape[1]), "B": (array.shape[0], about["r"])}
            for part, shape in shapes.items():
                key = f"base_model.model.{stem}.lora_{part}.weight"
                held[key] = weights(f"{name} {key}", shape)
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocab: int = 300) -> Any:
    """A byte-level BPE tokenizer that begins every prompt with a token, as Llama's does."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
