"""What is served, as a folder of Hugging Face: `config.json`, safetensors, `tokenizer.json`,
`generation_config.json`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax

from shardlib.annotation.model import Tree
from shardlib.annotation.read import read
from shardlib.annotation.trees.paths import path_text
from shardlib.checkpointing.huggingface.writing import save_weights
from shardlib.errors import CheckpointError, MissingPackageError, ModelError
from shardlib.jax_types import KeyPath
from shardlib.models.described import described
from shardlib.serving.served import Served
from shardlib.serving.text import ByteText
from shardlib.serving.weights import both
from shardlib.untrusted.json_types import JsonObject

#: Files of a tokenizer that are copied as they are.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
#: Tokens of a model of bytes.
BYTES = 256


def write_folder(
    served: Served, folder: str | Path, *, source: Path | None = None, dtype: str | None = None
) -> tuple[str, ...]:
    """Writes a folder that `transformers` loads, and that is served again.

    Args:
        source: folder that the tokenizer's files are copied from; None where tokens are bytes.
        dtype: of the files, see `save`.
    """
    if served.config is None:
        raise ModelError(
            f"{served.name} is no reference transformer, so that Hugging Face has no names for its"
            " parameters"
        )
    root, config, weights = Path(folder), served.config, both(read(served.init), served.weights)
    tokenizer: str | None = None
    if isinstance(served.text, ByteText):
        tokenizer = byte_tokenizer()
        config, weights = replace(config, vocab_size=BYTES), _of_bytes(weights, config.tied)
    files = save_weights(weights, root, described(config), dtype=dtype)
    try:
        if tokenizer is not None:
            (root / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            _write(root / "tokenizer_config.json", _about(config.max_seq))
        for name in _COPIED if source is not None else ():
            assert source is not None
            if (source / name).is_file():
                shutil.copyfile(source / name, root / name)
        _write(root / "generation_config.json", _generation(served))
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer could not be written to {root} ({error})\nTry: a folder with more room"
        ) from error
    return files


def _of_bytes(weights: tuple[Tree, Tree], tied: bool) -> tuple[Tree, Tree]:
    """Without the rows of tokens that no text has."""

    def cut(path: KeyPath, leaf: jax.Array) -> jax.Array:
        name = path_text(path)
        if name == "embedding":
            return leaf[:BYTES]
        return leaf[:, :BYTES] if name == "head" and not tied else leaf

    return jax.tree_util.tree_map_with_path(cut, weights[0]), weights[1]


def _generation(served: Served) -> JsonObject:
    ends = sorted(served.text.ends)
    fields: JsonObject = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    sampling = served.sampling
    if sampling is None or not sampling.temperature:
        return {**fields, "do_sample": False}
    return {
        **fields,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def _about(longest: int) -> JsonObject:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }


def _write(path: Path, data: JsonObject) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer() -> str:
    """A `tokenizer.json` with a token for every byte of UTF-8."""
    try:
        from tokenizers import Tokenizer, decoders, pre_tokenizers
        from tokenizers.models import BPE
    except ImportError as error:
        raise MissingPackageError(
            "tokenizers of Hugging Face need the library tokenizers\nTry: pip install"
            " 'shardlib[serve]'"
        ) from error
    tokenizer = Tokenizer(BPE(vocab=_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str(pretty=True)


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level tokenizers: itself where it can be seen,
    and the next free one from U+0100 on where not (GPT-2's `bytes_to_unicode`).
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(BYTES) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(BYTES + number): byte for number, byte in enumerate(hidden)
    }
